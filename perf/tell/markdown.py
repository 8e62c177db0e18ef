"""Text of others in Markdown: what a run printed must not become markup, end a code block, or act on a terminal."""

import re

import msgspec

from perf.judge.verdict import Verdict


def printable(text: str) -> str:
    """Without colours and other control characters, which a terminal or a log viewer would act upon."""
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f]", "", text)


def one_line(text: str) -> str:
    """For a cell of a table or an item of a list."""
    return re.sub(r"\s*\n\s*", " ", text).replace("|", "\\|").replace("<", "&lt;")


def fence(text: str) -> str:
    """A code block that the text cannot close."""
    text = printable(text)  # first: without what stood between them, backticks may form a longer row
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    ticks = "`" * max(3, longest + 1)
    return f"{ticks}text\n{text.strip()}\n{ticks}"


def without_tags(verdict: Verdict) -> Verdict:
    """Markdown passes HTML through, and reasons quote what a run printed."""
    return msgspec.structs.replace(
        verdict,
        reasons=tuple(reason.replace("<", "&lt;") for reason in verdict.reasons),
        notes=tuple(note.replace("<", "&lt;") for note in verdict.notes),
    )
