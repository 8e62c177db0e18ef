"""Tables that others published: shown beside our measurements, never mixed with them and never a baseline."""

from pathlib import Path
from typing import ClassVar

from perf.facts import jsonfile
from perf.facts.measurement import PEAK_ALLOCATED, STEP_TIME, THROUGHPUT
from perf.tell.render import quantity
from perf.tell.tables import Table
from strategies.value import Value

FOLDER = "published"


class PublishedRow(Value, frozen=True, kw_only=True):
    """One figure triple, as its source states it."""

    strategy: str
    """In the source's words."""
    size: str
    tokens_per_s: float
    """Cluster throughput."""
    step_time_s: float
    peak_memory_bytes: int
    note: str = ""


class PublishedTable(Value, frozen=True, kw_only=True):
    """A table with what must be known to read it."""

    SCHEMA_VERSION: ClassVar[int] = 1
    schema_version: int = 1
    title: str
    source: str
    machine: str
    workload: str
    num_ranks: int
    tokens_per_step: int | None = None
    sequence_length: int | None = None
    """Both None where the source does not state them: then nobody can tell whose work was the same."""
    rows: tuple[PublishedRow, ...]


def published_tables(baselines: Path) -> list[PublishedTable]:
    """All tables below `baselines`/published. Raises ValueError that names a damaged file."""
    return [jsonfile.read(path, PublishedTable) for path in sorted((baselines / FOLDER).glob("*.json"))]


def published_rows(published: PublishedTable) -> Table:
    """Somebody else's figures, in our units."""
    header = ("strategy", "size", "cluster throughput", "step time", "peak memory", "remarks")
    rows = tuple(
        (
            row.strategy,
            row.size,
            quantity(row.tokens_per_s, THROUGHPUT),
            quantity(row.step_time_s, STEP_TIME),
            quantity(row.peak_memory_bytes, PEAK_ALLOCATED),
            row.note,
        )
        for row in published.rows
    )
    return Table(header=header, rows=rows, first_number=2)
