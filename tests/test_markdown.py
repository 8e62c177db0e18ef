"""Room perf/tell/markdown.py: whatever a run printed stays text, as a reader of Markdown sees it."""

from hypothesis import example, given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from perf.tell.markdown import fence, one_line, printable

READER = MarkdownIt("commonmark").enable("table")
MARKUP = st.text(alphabet="`~|\\<>/ab \n\t\r\x00\x1b[0m-#*_\x85\u2028", max_size=60)


@given(MARKUP)
@example("```")
@example("`\x00``\n# out")
@example("\x1b[1m``````\x1b[0m")
def test_no_text_leaves_its_code_block(text):
    tokens = READER.parse(printable(f"before\n\n{fence(text)}\n\nafter"))
    assert [token.type for token in tokens[3:-3]] == ["fence"]
    assert tokens[3].content.strip() == printable(text).strip()


@given(MARKUP, MARKUP)
@example("a | b\nc", "<script>")
@example("a\\", "b\\|")
def test_no_text_changes_the_shape_of_a_table(first, second):
    row = f"| {one_line(first)} | {one_line(second)} | last |"
    tokens = READER.parse(printable(f"| one | two | three |\n|---|---|---|\n{row}\n\nafter"))
    cells = [tokens[index + 1].content for index, token in enumerate(tokens) if token.type == "td_open"]
    assert (len(cells), cells[-1]) == (3, "last")
    assert tokens[-2].content == "after"
    assert not [token for cell in tokens for token in cell.children or [] if token.type == "html_inline"]


def test_control_characters_are_gone_and_lines_stay():
    assert printable("\x1b[31mred\x1b[0m\x07 a\r\n\tb\x00") == "red a\n\tb"
