"""Room perf/trials.py: cells that are looked at again, the breaker, and comparisons side by side, in real runs."""

import re
import shutil
import sys

import pytest
from msgspec.structs import replace

from perf.facts.measurement import STEP_TIME
from perf.facts.outcome import Outcome
from perf.judge import baseline as baselines
from perf.judge.baseline import Baseline, Invariants
from perf.measure.connection import ROOT
from tests.factory import change_ranks, write_text
from tests.suite_runs import DDP, SINGLE, seed_that_begins_with


@pytest.fixture
def recorded(suite_runs):
    """Both cells have baselines; tiny cells on shared cores are noisy, and may be all the same."""
    suite_runs.be_recorded()
    override = '[[override]]\ncells = "*"\ncap = 0.9\npair_floor = 0.5\nreason = "shown to whoever reads it"\n'
    write_text(suite_runs.baselines / "overrides.toml", override)
    return suite_runs


def time_of(verdict):
    return next(comparison for comparison in verdict.comparisons if comparison.metric == STEP_TIME)


@pytest.mark.long
def test_cell_that_was_slow_once_passes_at_its_second_look(recorded):
    """Its first three runs were made by a slower build of the same commit; fresh ones are as fast as the baseline."""
    recorded.be_steady(DDP, factor=4.0)
    first = recorded.run("-k", "ddp", "--perf-commit=same", "--perf-plant=slow_step=19")
    folder = first.results.folder
    assert first.by_cell == {DDP: Outcome.REGRESSED}
    runs = first.results.runs(DDP)
    assert len(runs) == 6, "two looks that agree"
    for path in folder.glob(f"runs/{DDP}/[345].json"):
        path.unlink()
    for run in runs[:3]:
        first.results.write_run(replace(run, fault=None))
    again = recorded.run("-k", "ddp", "--perf-commit=same", f"--perf-resume={folder}")
    assert f"SUSPICIOUS  {DDP}" in again.text
    verdict = next(iter(first.results.verdicts()))
    assert (verdict.outcome, verdict.suspicious) == (Outcome.PASS, True), again.text
    assert len(verdict.looks) >= 2
    assert again.exit_code == 0


def test_comparison_side_by_side_interleaves_two_builds_and_proves_it(recorded, tmp_path):
    """Against a copy whose step is longer: the candidate is faster, whatever the baseline says."""
    shutil.copytree(ROOT / "strategies", tmp_path / "slow" / "strategies")
    sharded = tmp_path / "slow" / "strategies" / "sharded.py"
    text = sharded.read_text(encoding="utf-8")
    step = "def train_step("
    assert text.count(step) == 1
    body = text[text.index(step) :]
    end_of_docstring = body.index('"""', body.index('"""') + 3) + 3
    slow = body[:end_of_docstring] + "\n    import time\n\n    time.sleep(0.1)" + body[end_of_docstring:]
    sharded.write_text(text.replace(body, slow), encoding="utf-8")
    builds = (f"--perf-ab={tmp_path / 'slow'}", f"--perf-candidate={ROOT}", "--perf-commit=said")
    outcomes = recorded.run("-k", "ddp", *builds, "--perf-pairs=2")
    assert outcomes.by_cell == {DDP: Outcome.IMPROVED}, outcomes.text
    assert "override cap 0.9, pair_floor 0.5: shown to whoever reads it" in outcomes.text
    assert "2 pairs side by side" in outcomes.text
    mine, other = outcomes.results.runs(DDP), outcomes.results.reference_runs(DDP)
    order = sorted([*mine, *other], key=lambda run: run.ranks[0].arrivals_s)
    assert [run.arm for run in order] == ["reference", "candidate", "candidate", "reference"]
    for runs, folder in ((mine, ROOT / "strategies"), (other, tmp_path / "slow" / "strategies")):
        assert {rank.imported.strategies for run in runs for rank in run.ranks} == {str(folder)}
    assert (mine[0].environment.commit, other[0].environment.commit) == ("said", None)
    assert mine[0].ranks[0].imported.digest != other[0].ranks[0].imported.digest


def test_variable_on_and_off_are_compared_on_one_build(recorded, monkeypatch):
    options = ("--perf-ab-env=OMP_DYNAMIC=TRUE", "--perf-pairs=1", "--perf-plant=slow_step=4", "--perf-commit=said")
    monkeypatch.setenv("OMP_DYNAMIC", "TRUE")  # of the shell: off has to be off all the same
    outcomes = recorded.run("-k", "ddp", *options, evidence=True)
    assert outcomes.by_cell == {DDP: Outcome.REGRESSED}, outcomes.text
    runs = [*outcomes.results.runs(DDP), *outcomes.results.reference_runs(DDP)]
    assert [run.environment.commit for run in runs] == ["said"] * 2, "both are this tree"
    assert "changed: OMP_DYNAMIC unset -> TRUE" in outcomes.text
    assert "accept:" not in outcomes.text, "there is no baseline to change"
    assert re.search(r"why: step \d+\.\d ms -> \d+\.\d ms, \+", outcomes.text)
    results = outcomes.results
    assert {path.name for path in results.traces(DDP)} == {
        f"{arm}-rank{rank}.json.gz" for arm in ("candidate", "reference") for rank in (0, 1)
    }
    assert 5 <= len(results.explanation(DDP)) <= 10
    assert "## Why" in (results.folder / "report.md").read_text()


def test_same_build_under_another_name_is_refused(recorded, tmp_path):
    (tmp_path / "link").symlink_to(ROOT / "strategies")
    (tmp_path / "same").mkdir()
    (tmp_path / "same" / "strategies").symlink_to(ROOT / "strategies")
    outcomes = recorded.run(f"--perf-ab={tmp_path / 'same'}", "--perf-pairs=1")
    assert outcomes.by_cell == {DDP: Outcome.ERROR, SINGLE: Outcome.ERROR}
    assert outcomes.text.count("nothing would be compared with nothing") >= 2
    assert not outcomes.results.runs(DDP)


def test_reference_that_is_as_slow_says_that_the_machine_moved(recorded, tmp_path):
    """Ten times slower than its baseline, and so is the reference."""
    shutil.copytree(ROOT / "strategies", tmp_path / "same" / "strategies")
    recorded.be_steady(DDP, factor=0.1)
    reference = f"--perf-reference={tmp_path / 'same'}"
    outcomes = recorded.run("-k", "ddp", reference)
    assert outcomes.by_cell == {DDP: Outcome.ENVIRONMENT}, outcomes.text
    (verdict,) = outcomes.results.verdicts()
    assert (verdict.num_pairs, verdict.num_runs) in ((4, 10), (6, 12))
    assert abs(time_of(verdict).change) < 0.5, "the pairs' estimate, not the screen's"
    assert outcomes.exit_code == 8


@pytest.mark.long
def test_reference_blames_a_slow_build(recorded, tmp_path):
    shutil.copytree(ROOT / "strategies", tmp_path / "same" / "strategies")
    recorded.be_steady(DDP, factor=0.1)
    reference = f"--perf-reference={tmp_path / 'same'}"
    planted = recorded.run("-k", "ddp", reference, "--perf-plant=slow_step=4")
    assert planted.by_cell == {DDP: Outcome.REGRESSED}, planted.text
    (verdict,) = planted.results.verdicts()
    assert time_of(verdict).change > 1


def label_cells(suite_runs, labels, *, factor):
    """One cell under several labels, each with a baseline of `factor` times its step time; their names."""
    suite_runs.be_recorded()
    suite_runs.be_steady(SINGLE, factor=factor)
    table = suite_runs.matrix.read_text().split("[[cells]]")[1].replace('link = "gloo"', 'link = "gloo"\nlabel = "a"')
    suite_runs.matrix.write_text("".join(f"[[cells]]{table}".replace('"a"', f'"{label}"') for label in labels))
    for kind, path in (
        (Baseline, suite_runs.baseline_path(SINGLE)),
        (Invariants, suite_runs.state / "baselines" / "invariants" / f"{SINGLE}.json"),
    ):
        for label in labels:
            of_label = replace(baselines.read(path, kind), cell_id=f"{SINGLE}-{label}")
            baselines.write(suite_runs.state / "baselines", of_label)
    return [f"{SINGLE}-{label}" for label in labels]


def in_order(results, names):
    """When, the index and the cell of each run."""
    return sorted((run.started_at, run.index, name) for name in names for run in results.runs(name))


def test_suite_that_moved_as_a_whole_is_said_once_and_its_size_subtracted(suite_runs):
    """Five cells, all ten times slower than their baselines."""
    names = label_cells(suite_runs, "abcde", factor=0.1)
    outcomes = suite_runs.run()
    shift = outcomes.results.shift()
    assert (shift.num_cells, shift.num_suspicious, shift.beside) == (5, 5, None)
    assert 1.5 < shift.change < 3.5
    assert outcomes.text.count("ENVIRONMENT: 5 of 5 cells are suspicious, the median moved +") == 1
    assert "by which the whole suite moved" in outcomes.text
    begun = in_order(outcomes.results, names)
    assert begun[0][2] == shift.control
    first_reruns = [name for _, index, name in begun if index >= 3]
    assert first_reruns[0] == shift.control, "measured again before any suspicious cell"
    assert Outcome.ENVIRONMENT in outcomes.by_cell.values()
    assert Outcome.PASS not in outcomes.by_cell.values()


@pytest.mark.long
def test_slower_everywhere_is_asked_why_in_every_cell(suite_runs, tmp_path):
    """Also in those that were not compared with the reference."""
    names = label_cells(suite_runs, "abcde", factor=0.1)
    shutil.copytree(ROOT / "strategies", tmp_path / "same" / "strategies")
    reference = f"--perf-reference={tmp_path / 'same'}"
    outcomes = suite_runs.run(reference, "--perf-plant=slow_step=4", evidence=True)
    assert outcomes.by_cell == dict.fromkeys(names, Outcome.REGRESSED), outcomes.text
    assert "SLOWER EVERYWHERE" in outcomes.text
    compared = [name for name in names if outcomes.results.reference_runs(name)]
    assert len(compared) == 4
    for name in names:
        assert outcomes.results.explanation(name)
        assert (outcomes.results.evidence(name, "reference") is not None) is (name in compared)


def test_control_cell_is_measured_last_and_says_that_the_machine_drifted(suite_runs):
    """Four cells, all ten times faster than their baselines, so that none is suspicious."""
    names = label_cells(suite_runs, "abcd", factor=10)
    outcomes = suite_runs.run("--perf-runs=1")
    results = outcomes.results
    assert outcomes.by_cell == dict.fromkeys(names, Outcome.IMPROVED), outcomes.text
    begun = in_order(results, names)
    assert len(begun) == 5
    assert begun[0][2] == begun[-1][2]
    assert [index for _, index, _ in begun] == [0, 0, 0, 0, 1]
    last = results.runs(begun[-1][2])[-1]
    slower = [2 * time_s for time_s in last.step_times_s]
    results.write_run(change_ranks(last, step_times_s=tuple(slower)))
    resumed = suite_runs.run("--perf-runs=1", f"--perf-resume={results.folder}")
    assert len(in_order(results, names)) == 5, "nothing is measured again"
    shift = results.shift()
    assert (shift.control, shift.num_suspicious) == (begun[0][2], 0)
    assert shift.drift > 0.3
    assert f"{shift.control} moved +" in resumed.text
    assert outcomes.by_cell == dict.fromkeys(names, Outcome.IMPROVED), "that changes no verdict"


@pytest.mark.long
def test_reference_that_computes_something_else_decides_nothing(recorded, tmp_path):
    shutil.copytree(ROOT / "strategies", tmp_path / "wrong" / "strategies")
    model = tmp_path / "wrong" / "strategies" / "sharded.py"
    text = model.read_text(encoding="utf-8")
    counted = "return all(at == 0 for axis, at in pairs if axis not in DATA_AXES | CONTEXT_AXES)"
    assert text.count(counted) == 1
    model.write_text(text.replace(counted, "return False"), encoding="utf-8")
    recorded.be_steady(DDP, factor=0.1)
    outcomes = recorded.run("-k", "ddp", f"--perf-reference={tmp_path / 'wrong'}")
    assert outcomes.by_cell == {DDP: Outcome.INVALID}, outcomes.text
    assert "reference: every run: 0 tokens a step" in outcomes.text


def test_time_budget_leaves_cells_out_and_a_soak_is_one_long_run(recorded):
    shutil.rmtree(recorded.root / "results", ignore_errors=True)  # a cell of an unknown length always fits
    seed = seed_that_begins_with(SINGLE)
    outcomes = recorded.run(f"--perf-seed={seed}", "--perf-time-budget=0.001s", "--perf-soak=12")
    assert outcomes.by_cell == {SINGLE: Outcome.NO_BASELINE, DDP: Outcome.NOT_RUN}
    assert re.search(r"\d+:\d\d of the time budget 0:00 are used, this cell takes about \d+:\d\d", outcomes.text)
    assert outcomes.exit_code == 8
    (run,) = outcomes.results.runs(SINGLE)
    assert len(run.step_times_s) == 12
    assert "timed_steps: 4 -> 12" in outcomes.text


def test_environment_of_this_interpreter_is_this_build(recorded):
    outcomes = recorded.run("-k", "ddp", f"--perf-ab={sys.prefix}")
    assert outcomes.exit_code == pytest.ExitCode.USAGE_ERROR
    assert "nothing would be compared with nothing" in outcomes.text
