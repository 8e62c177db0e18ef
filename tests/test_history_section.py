"""The history in a report: comparable test runs up to this one, and nothing that a neighbour could break."""

import pytest

from perf.judge.rule import Rule
from perf.judge.verdict import judge
from perf.tell.history_section import LEAST_TEST_RUNS, MOST_TEST_RUNS
from perf.tell.report import write_report
from perf.tell.results import Results
from strategies.spec import Mode
from tests import factory
from tests.history_runs import keep

DDP = factory.cell()
CHART = f"history/{DDP.id}.png"
SECTION = f"![Step time of {DDP.id} over test runs]({CHART})"


def report(results) -> str:
    write_report(Results(results.folder))
    return (results.folder / "report.md").read_text(encoding="ascii")


@pytest.fixture
def runs(tmp_path):
    return [keep(tmp_path, day, 0.1, 0.11, 0.105) for day in range(LEAST_TEST_RUNS)]


def test_three_comparable_test_runs_make_a_history(runs):
    for results in runs[:-1]:
        assert "## History" not in report(results)
    assert SECTION in report(runs[-1])
    assert runs[-1].folder / CHART in write_report(runs[-1])
    page = (runs[-1].folder / "report.html").read_text(encoding="ascii")
    assert page.count('<img src="data:image/png;base64,') == 4
    assert f'alt="Step time of {DDP.id} over test runs"' in page


def test_other_recipes_machines_and_planted_faults_do_not_count(runs, tmp_path):
    other = factory.environment(factory.H200X2)
    for day, changes in enumerate(({"timed_steps": 30}, {"env": other}, {"fault": "slow_step=0.5"}), start=3):
        assert (SECTION in report(keep(tmp_path, day, 0.1, **changes))) is ("fault" in changes)


def test_a_report_that_is_built_again_knows_no_later_test_run(runs, tmp_path):
    report(runs[-1])
    first = {path.name: path.read_bytes() for path in runs[-1].folder.rglob("*") if path.is_file()}
    keep(tmp_path, 10, 0.5)
    report(runs[-1])
    assert {path.name: path.read_bytes() for path in runs[-1].folder.rglob("*") if path.is_file()} == first


def test_no_neighbour_breaks_a_report(runs, tmp_path):
    (tmp_path / "notes").mkdir()
    factory.write_text(tmp_path / "broken" / "manifest.json", "[" * 100_000)
    for day, name in enumerate((f"runs/{DDP.id}/0.json", f"runs/{DDP.id}/x.json", f"verdicts/{DDP.id}.json"), start=-9):
        factory.write_text(keep(tmp_path, day, 0.1).folder / name, "{")
    assert SECTION in report(runs[-1])


def test_the_band_is_the_one_of_the_verdict(runs):
    measured = factory.measurement(DDP)
    plain = report(runs[-1])
    before = (runs[-1].folder / CHART).read_bytes()
    runs[-1].write_verdict(judge(measured, factory.baseline(DDP), factory.invariants(DDP), Rule()))
    assert report(runs[-1]) != plain
    assert (runs[-1].folder / CHART).read_bytes() != before


def test_only_the_newest_test_runs_are_read(tmp_path):
    for day in range(MOST_TEST_RUNS):
        last = keep(tmp_path, day, 0.1)
    report(last)
    first = (last.folder / CHART).read_bytes()
    keep(tmp_path, -1, 9.9)
    report(last)
    assert (last.folder / CHART).read_bytes() == first


def test_a_cell_without_a_past_has_no_chart(runs, tmp_path):
    assert "## History" not in report(keep(tmp_path, 9, 0.1, of=factory.cell(mode=Mode.COMPILE)))


def test_long_runs_have_a_table_of_decay(tmp_path):
    assert "## Within a long run" not in report(keep(tmp_path, 0, 0.1, timed_steps=59))
    text = report(keep(tmp_path, 1, 0.1, timed_steps=60))
    assert f"| {DDP.id} | 60 | 100.0 ms | 100.0 ms | +0.0 % | 1.0 % | 0 of 1 runs |" in text
