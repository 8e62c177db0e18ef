"""The history in a report: the step time of its cells over the test runs beside it, up to this one."""

from collections.abc import Mapping, Sequence

import msgspec

from perf.facts.measurement import STEP_TIME, Measurement
from perf.judge.band import Band, judged_band
from perf.judge.rule import Rule
from perf.judge.verdict import Verdict
from perf.tell.history import Series, gather
from perf.tell.history_charts import draw
from perf.tell.history_pages import Page, pages, told
from perf.tell.results import Results
from strategies.value import Value

LEAST_TEST_RUNS = 3
"""A cell with fewer comparable ones has no history yet."""
MOST_TEST_RUNS = 30
"""The newest: a report must not take longer with every test run. `tools.history` draws all."""


class Shown(Value, frozen=True, kw_only=True):
    """The chart of one cell, as a report shows it."""

    cell_id: str
    file_name: str
    """Within the folder of the test run."""
    texts: tuple[str, ...]
    """What changed, in words."""


def write_section(
    results: Results, measurements: Sequence[Measurement], verdicts: Mapping[str, Verdict]
) -> list[Shown]:
    """Draws each cell with at least three test runs of its machine and recipe in the folder around this one.

    Test runs that began later are left out, so that an old report stays as it was when it is built again. The band is
    the one that this test run was judged by. Damaged neighbours never fail a report: `tools.history` names them.
    """
    shown = []
    for page in _pages(results, measurements, verdicts):
        file_name = f"history/{page.cell_id}.png"
        draw(page, results.folder / file_name)
        shown.append(Shown(cell_id=page.cell_id, file_name=file_name, texts=tuple(told(page))))
    return shown


def _pages(results: Results, measurements: Sequence[Measurement], verdicts: Mapping[str, Verdict]) -> tuple[Page, ...]:
    """A page for each cell that has a history."""
    own = {(one.cell.id, one.runs[-1].environment.machine.key): one.recipe for one in measurements}
    ids = {one.cell.id for one in measurements}
    started_at, root = results.manifest().started_at, results.folder.resolve().parent
    try:
        found = gather(root, wanted=lambda cell: cell.id in ids, until=started_at, newest=MOST_TEST_RUNS)
    except (OSError, ValueError):  # the folder around may not be ours to read, or this run's start be no time
        return ()
    kept = tuple(
        line
        for line in found.series
        if line.metric == STEP_TIME
        and line.recipe == own.get((line.cell.id, line.machine.key))
        and len(line.points) >= LEAST_TEST_RUNS
    )

    def band_of(line: Series) -> Band | None:
        verdict = verdicts.get(line.cell.id)
        bands = [judged_band(comparison, Rule()) for comparison in verdict.comparisons] if verdict else []
        return next((band for band in bands if band is not None), None)

    return pages(msgspec.structs.replace(found, series=kept), (STEP_TIME,), band_of)
