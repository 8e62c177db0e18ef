"""Room perf/tell/reading.py: what a report says in words is true of its records."""

from msgspec.structs import replace

from perf.facts.measurement import STEP_TIME, measure
from perf.tell import reading, tables
from perf.tell.report import write_report
from perf.tell.results import Manifest, Results
from tests import factory

SCREENED, PICKED, CUT_SHORT, FAILED = (factory.cell(name) for name in ("ddp", "fsdp2", "zero1", "tp"))
CELLS = (SCREENED, PICKED, CUT_SHORT, FAILED)


def runs_of(of, *asked):
    """A run for each number of runs that was asked for when it was made."""
    runs = (factory.run_record(of, index=index) for index in range(len(asked)))
    return [replace(run, plan=replace(run.plan, runs=number)) for run, number in zip(runs, asked, strict=True)]


def measurements():
    """Screened once; picked, so asked for three runs later; interrupted after two of three."""
    runs = {SCREENED: runs_of(SCREENED, 1), PICKED: runs_of(PICKED, 1, 3, 3), CUT_SHORT: runs_of(CUT_SHORT, 3, 3)}
    return [measure(of, factory.PLAN, found) for of, found in runs.items()]


def test_numbers_of_runs_are_those_of_the_records():
    assert reading.run_counts(measurements(), CELLS) == (
        "1 cell has 3 runs; 1 cell has 2 runs of the 3 that were asked for; 1 cell has 1 run, as asked for; "
        "1 cell has none"
    )
    assert reading.run_counts(measurements()[:2] * 2, CELLS) == "2 cells have 3 runs; 2 cells have 1 run, as asked for"
    assert reading.run_counts([], ()) == "there are no cells"


def test_report_of_a_screened_matrix_says_how_often_each_cell_was_run(tmp_path):
    results = Results(tmp_path / "run")
    results.write_manifest(
        Manifest(run_id="run", started_at="2026-11-29T00:00:00+00:00", matrix="x", plan=factory.PLAN, cells=CELLS)
    )
    for measurement in measurements():
        for run in measurement.runs:
            results.write_run(run)
    write_report(results)
    for name in ("report.md", "report.html"):
        text = (results.folder / name).read_text()
        assert text.count("1 cell has 3 runs; 1 cell has 2 runs of the 3 that were asked for; ") == 2
        assert "3 runs a cell" not in text
        assert "3 times" not in text


def test_a_value_of_one_run_shows_no_spread():
    one, three, _ = (tables.runs_frame([measurement]) for measurement in measurements())
    assert tables.spread_text(one, STEP_TIME) == "100.0 ms"
    assert tables.spread_text(three, STEP_TIME) == "100.0 ms [100.0, 100.0]"
