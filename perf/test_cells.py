"""The suite: one test per cell. Refuse, decide, conclude; what each word means stands in its room."""

import pytest

from perf.bench import Bench
from perf.facts.cell import Cell
from perf.facts.measurement import STEP_TIME
from perf.plugin import CELLS
from perf.tell.replay import CLOCK, replay


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test per cell of the matrix, named by its id."""
    if "cell" in metafunc.fixturenames:
        cells = metafunc.config.stash[CELLS]
        metafunc.parametrize("cell", cells, ids=[cell.id for cell in cells])


# A cell that is skipped or fails has nothing to show to the benchmark fixture, which warns of it.
@pytest.mark.filterwarnings("default", "ignore:Benchmark fixture was not used")
@pytest.mark.benchmark(timer=CLOCK)
def test_cell(cell: Cell, bench: Bench, benchmark: object) -> None:
    """A strategy at a size, in a mode, on a number of ranks: as right, as lean and as fast as its baseline."""
    bench.refuse(cell)
    measurement, verdict = bench.decide(cell)
    replay(
        benchmark,
        [seconds for run in measurement.runs for seconds in run.step_times_s],
        {"cell": cell.id, "outcome": verdict.outcome.value, "run_step_times_s": measurement.values(STEP_TIME)},
    )
    bench.conclude(verdict, measurement)
