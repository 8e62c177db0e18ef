"""Room perf/tell/gathering.py: several test runs in one report, whole or not at all, and never a night of their own."""

import pytest
from msgspec.structs import replace

from perf.judge.breaker import Shift
from perf.judge.rule import Rule
from perf.judge.verdict import judge
from perf.tell.gathering import gather
from perf.tell.results import Manifest, Results
from strategies.spec import StrategyName
from tests import factory, nodes
from tools import approve
from tools.report import main as report

DDP, FSDP2 = factory.cell(), factory.cell(StrategyName.FSDP2)
MOVED = Shift(num_cells=8, num_suspicious=6, change=0.05)


def part(folder, of, *, num_runs=3):
    """A test run of one cell."""
    results, plan = Results(folder), replace(factory.PLAN, runs=num_runs)
    started_at = "2026-11-29T14:00:00+00:00"
    results.write_manifest(Manifest(run_id=folder.name, started_at=started_at, matrix="auto", plan=plan, cells=(of,)))
    measurement = factory.measurement(of)
    runs = tuple(replace(run, plan=plan) for run in measurement.runs[:num_runs])
    for run in runs:
        results.write_run(run)
    measurement = replace(measurement, runs=runs, plan=plan)
    results.write_verdict(judge(measurement, factory.baseline(of), factory.invariants(of), Rule()))
    return results


@pytest.fixture
def parts(tmp_path):
    return [part(tmp_path / "one", DDP), part(tmp_path / "two", FSDP2)]


def test_one_report_over_a_matrix_measured_piece_by_piece(tmp_path, parts, capsys):
    parts[0].write_shift(MOVED)
    parts[0].write_reference_run(replace(parts[0].runs(DDP.id)[0], arm="reference"))
    into = tmp_path / "whole"
    assert report([*(str(one.folder) for one in parts), "--into", str(into)]) == 0
    text = (into / "report.md").read_text()
    assert "**All 2 cells are green: 2 PASS.**" in text
    assert f"one: {MOVED.text}." in text
    assert len(Results(into).reference_runs(DDP.id)) == 1
    capsys.readouterr()
    assert report([str(parts[0].folder), "--into", str(into)]) == 2
    assert capsys.readouterr().err == f"error: {into} is not empty; name a new folder\n"


def test_copy_of_one_test_run_keeps_its_node_and_its_shift(tmp_path, parts):
    parts[0].write_shift(MOVED)
    parts[0].write_preflight(nodes.preflight())
    copy = gather(parts[:1], tmp_path / "copy")
    assert (copy.shift(), copy.preflight()) == (MOVED, nodes.preflight())
    assert copy.manifest().remarks == ()
    parts[1].write_shift(MOVED)
    both = gather(parts, tmp_path / "both")
    assert gather([both], tmp_path / "again").manifest().remarks == both.manifest().remarks


def test_screen_and_its_picks_are_of_one_plan(tmp_path):
    whole = gather([part(tmp_path / "1", DDP, num_runs=1), part(tmp_path / "3", FSDP2)], tmp_path / "whole")
    assert [measurement.plan.runs for measurement in whole.measurements()] == [1, 3]
    assert whole.manifest().plan.runs == 3


def test_parts_that_do_not_fit_together_are_refused_and_nothing_is_written(tmp_path, parts):
    longer = Results(tmp_path / "longer")
    plan = replace(factory.PLAN, timed_steps=7)
    longer.write_manifest(replace(parts[0].manifest(), run_id="longer", plan=plan))
    beside = Results(tmp_path / "beside")
    beside.write_manifest(replace(parts[1].manifest(), run_id="beside", side_by_side=True))
    for found, says in (
        ([parts[0], parts[0]], rf"{DDP.id} was measured in .*one and in .*one; leave one out"),
        ([parts[0], longer], r"longer was measured with 3 runs of 5 \+ 7 .*, one with"),
        ([parts[0], beside], r"of one and beside one compares builds side by side"),
    ):
        with pytest.raises(ValueError, match=says):
            gather(found, tmp_path / "whole")
        assert not (tmp_path / "whole").exists()


def test_damaged_part_leaves_nothing_behind(tmp_path, parts):
    (parts[1].folder / "verdicts" / f"{FSDP2.id}.json").write_text("{")
    with pytest.raises(ValueError, match=f"{FSDP2.id}.json"):
        gather(parts, tmp_path / "whole")
    assert not (tmp_path / "whole").exists()


def test_copies_are_no_night_and_their_node_is_not_asked(tmp_path, parts, capsys):
    """Else a night would count twice, and a slow node would be compared by nobody."""
    root = tmp_path / "baselines"
    folders = [str(one.folder) for one in parts]
    assert approve.main([*folders, "--baselines", str(root)]) == 0
    before = {path: path.read_bytes() for path in root.rglob("*.json")}
    gather(parts, tmp_path / "whole")
    assert approve.main([str(tmp_path / "whole"), "--baselines", str(root)]) == 1
    assert "refused    all: a copy of one, two, for one report" in capsys.readouterr().out
    assert {path: path.read_bytes() for path in root.rglob("*.json")} == before
