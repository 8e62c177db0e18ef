"""Tables for people: drawn on a terminal, columns of plain text elsewhere."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from strategies.value import Value


class Section(Value, frozen=True, kw_only=True):
    """A table of the page."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def show(sections: Sequence[Section], console: Console | None) -> None:
    """Tables on a terminal; elsewhere, columns of plain text."""
    for section in sections:
        if console is None:
            print(f"{section.title}\n{_columns(section)}\n")
            continue
        table = Table(*section.header, title=section.title, title_justify="left", show_header=any(section.header))
        for row in section.rows:
            table.add_row(*row)
        console.print(table)


def _columns(section: Section) -> str:
    rows = [section.header, *section.rows] if any(section.header) else list(section.rows)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join(f"  {line}" for line in lines)
