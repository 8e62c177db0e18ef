"""Names of kernels and ops as people can read them: templates of C++ cut down to what tells kernels apart."""

import re

MOST_CHARACTERS = 96
_COMPILED_GRAPH = "## Call CompiledFxGraph"
_LEVELS = 2
"""Of arguments inside of arguments that are kept."""
_SAYS_LITTLE = re.compile(r"[-+!]?[0-9]\w*|!?true|!?false|!|.*\*|(unsigned |signed )?(int|long|char|short|bool)")
"""Arguments that are left out: numbers, flags, pointers, types of an index."""


def short_name(name: str) -> str:
    """`void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>, ...>(int, ...)` becomes
    `vectorized_elementwise_kernel<FillFunctor<float>>`.

    Namespaces, parameters, lambdas and the arguments of a template that say little go. What is no C++ stays. The middle
    of what is still too long is left out.
    """
    if name.startswith(_COMPILED_GRAPH):
        return _COMPILED_GRAPH  # a hash follows, which says of which code
    is_template = ("<" in name or "(" in name) and not name.startswith(("Memcpy", "Memset"))
    text = (_with_arguments(_plain(name), _LEVELS) if is_template else "") or name
    if len(text) <= MOST_CHARACTERS:
        return text
    half = (MOST_CHARACTERS - 3) // 2
    return f"{text[: MOST_CHARACTERS - 3 - half]}...{text[-half:]}"


def _plain(name: str) -> str:
    """Without return type, parameters, lambdas and namespaces."""
    text = _without(_without(name.replace("operator()", ""), "()"), "{}")
    text = re.sub(r"\bconst\b|&", "", text)
    text = re.sub(r"(\s*::\s*)+", "::", text)
    text = re.sub(r"::(?=\s*([<>,]|$))", "", text)
    text = re.sub(r"(\w*::)+", "", text)
    before, opening, arguments = text.partition("<")
    if before.endswith("enable_if"):  # a return type that is a template itself
        before, opening, arguments = arguments[_end_of_arguments(arguments) + 1 :].partition("<")
    return before.strip().rpartition(" ")[2] + opening + arguments


def _without(text: str, brackets: str) -> str:
    """Without what stands between brackets, nested ones too."""
    kept, depth = [], 0
    for character in text:
        depth += character == brackets[0]
        if not depth:
            kept.append(character)
        depth -= character == brackets[1] and depth > 0
    return "".join(kept)


def _with_arguments(text: str, levels: int) -> str:
    """A name with those arguments of its template that say something, each once."""
    head, opening, rest = text.strip().partition("<")
    if not opening or not levels:
        return head
    arguments, depth, start = [], 0, 0
    inside = rest[: _end_of_arguments(rest)]
    for index, character in enumerate(inside + ","):
        depth += (character == "<") - (character == ">")
        if character == "," and depth <= 0:
            arguments.append(inside[start:index].strip())
            start = index + 1
    telling = {
        _with_arguments(argument, levels - 1): None for argument in arguments if not _SAYS_LITTLE.fullmatch(argument)
    }
    telling.pop("", None)
    return f"{head}<{', '.join(telling)}>" if telling else head


def _end_of_arguments(text: str) -> int:
    """Where the bracket closes that stands open before the text; its end where none does."""
    depth = 1
    for index, character in enumerate(text):
        depth += (character == "<") - (character == ">")
        if not depth:
            return index
    return len(text)
