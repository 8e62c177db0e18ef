"""Room perf/suite.py: resuming, planted faults and priming, in real runs."""

import re
import signal
import subprocess
import sys
import time

import numpy
import psutil
import pytest
from msgspec.structs import replace
from safetensors.numpy import save_file

from perf.facts import jsonfile
from perf.facts.hardware import Node
from perf.facts.outcome import Outcome
from perf.facts.record import RunRecord
from perf.judge import baseline as baselines
from perf.judge.approval import is_screened, unfit
from perf.measure.connection import ROOT
from perf.settings import Settings
from perf.suite import Suite
from perf.tell.progress import Progress
from perf.tell.results import Results
from tests import nodes
from tests.factory import PLAN, gpu_use
from tests.suite_runs import DDP, SINGLE


def test_resumed_test_run_keeps_what_is_finished_and_measures_the_rest(suite_runs):
    """And those of a wider selection: they are of this test run then."""
    first = suite_runs.record("-k", "ddp")
    folder = first.results.folder
    kept = {path: path.read_bytes() for path in folder.glob("runs/*/*.json")}
    missing, disturbed = (folder / "runs" / DDP / f"{index}.json" for index in (1, 2))
    missing.unlink()
    hot = replace(gpu_use("GPU-1", used_bytes=2**30), throttled=("hardware thermal slowdown",))
    jsonfile.write(disturbed, replace(first.results.runs(DDP)[-1], gpus=(hot,)))
    for path in (missing, disturbed):
        kept.pop(path)
    resumed = suite_runs.run(f"--perf-resume={folder}", "--perf-allow=noisy,no-baseline")
    assert resumed.results is None, "no second folder"
    assert resumed.exit_code == 0, resumed.text
    assert {path: path.read_bytes() for path in kept} == kept
    assert [(run.index, run.gpus) for run in Results(folder).runs(DDP)] == [(0, ()), (1, ()), (2, ())]
    assert [cell.id for cell in Results(folder).manifest().cells] == [DDP, SINGLE]
    assert {verdict.cell_id for verdict in Results(folder).verdicts()} == {DDP, SINGLE}


def test_resume_with_another_fault_is_refused_and_overwrites_nothing(suite_runs):
    folder = suite_runs.record("-k", "single", "--perf-runs=1").results.folder
    kept = {path: path.read_bytes() for path in folder.glob("*/*/*.json")}
    resumed = suite_runs.run("-k", "single", "--perf-runs=1", f"--perf-resume={folder}", "--perf-plant=slow_step=1")
    assert resumed.exit_code == pytest.ExitCode.USAGE_ERROR
    assert "measured with no fault planted, now slow_step=1; start a new test run" in resumed.text
    assert {path: path.read_bytes() for path in kept} == kept


@pytest.mark.long
def test_resume_adds_runs_to_chosen_cells_of_another_matrix(suite_runs):
    """Each once, then the best of them more often, in one test run."""
    folder = suite_runs.record("--perf-runs=1").results.folder
    whole = suite_runs.matrix
    suite_runs.matrix = whole.with_name("picks.toml")
    suite_runs.matrix.write_text("[[cells]]" + whole.read_text().split("[[cells]]")[1])
    suite_runs.run("--perf-runs=2", f"--perf-resume={folder}")
    results = Results(folder)
    assert [len(results.runs(cell_id)) for cell_id in (SINGLE, DDP)] == [2, 1]
    manifest = results.manifest()
    assert (manifest.plan.runs, manifest.matrix) == (2, "cells.toml, picks.toml")
    assert [cell.id for cell in manifest.cells] == [SINGLE, DDP]
    screened = results.measurements()[1]
    assert (unfit(screened), is_screened(screened, manifest.plan)) == (None, True), "right, but no baseline"


def test_cells_in_the_order_of_the_matrix_are_all_asked_where_their_step_goes(suite_runs):
    outcomes = suite_runs.run("--perf-in-order", "--perf-profile", "--perf-runs=1", "--perf-seed=1", evidence=True)
    results = outcomes.results
    assert "in random order" not in outcomes.text
    begun = sorted((run.started_at, cell_id) for cell_id in (DDP, SINGLE) for run in results.runs(cell_id))
    assert [cell_id for _, cell_id in begun] == [SINGLE, DDP]
    assert outcomes.by_cell == {SINGLE: Outcome.NO_BASELINE, DDP: Outcome.NO_BASELINE}
    for cell_id in (DDP, SINGLE):
        assert results.explanation(cell_id)
    assert "exposed communication" in (results.folder / "report.md").read_text()
    profiled = {path: path.read_bytes() for path in results.folder.glob("evidence/*/*.json")}
    again = ("-k", "ddp", "--perf-profile", "--perf-runs=1", f"--perf-resume={results.folder}")
    assert "why: " in suite_runs.run(*again, evidence=True).text
    assert {path: path.read_bytes() for path in profiled} == profiled, "no cell is profiled twice"
    assert suite_runs.run("--collect-only", "--perf-steps=1", plan=()).exit_code == 0, "that is not a self-test's"


def test_terminated_test_run_ends_its_servers_and_says_what_was_not_run(suite_runs):
    """As a scheduler ends it, in the middle of a run."""
    command = suite_runs.command("-k", "single", "--perf-plant=hang@0")
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        pytest_process = psutil.Process(process.pid)
        deadline_s = time.monotonic() + 60
        while not (family := pytest_process.children(recursive=True)) or len(family) < 2:
            assert time.monotonic() < deadline_s, "no rank was started"
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        process.send_signal(signal.SIGTERM)  # as `timeout` does, once to the process and once to its group
        text, _ = process.communicate(timeout=60)
    assert process.returncode == pytest.ExitCode.INTERRUPTED, text
    _, left = psutil.wait_procs(family, timeout=20)  # a server in the middle of its imports ends after them
    assert not [one for one in left if one.status() != psutil.STATUS_ZOMBIE]
    (folder,) = (suite_runs.root / "results").iterdir()
    assert [verdict.outcome for verdict in Results(folder).verdicts()] == [Outcome.NOT_RUN]
    assert (folder / "report.md").exists()
    collected = suite_runs.run("--collect-only", f"--perf-resume={folder}", "--perf-plant=hang@0")
    assert collected.exit_code == 0, "that judges nothing"


def test_resume_with_another_plan_or_matrix_is_refused(suite_runs):
    folder = suite_runs.record("-k", "single").results.folder
    other_plan = suite_runs.run(f"--perf-resume={folder}", plan=("--perf-steps=7",))
    assert other_plan.exit_code == pytest.ExitCode.USAGE_ERROR
    assert "start a new test run" in other_plan.text
    suite_runs.matrix.write_text(suite_runs.matrix.read_text().replace('"gloo"', '"gloo"\nmicro_batch = 1'))
    other_cells = suite_runs.run(f"--perf-resume={folder}")
    assert other_cells.exit_code == pytest.ExitCode.USAGE_ERROR
    assert f"another cell of the name {SINGLE}" in other_cells.text


@pytest.fixture
def recorded_ddp(suite_runs):
    """A steady baseline of the ddp cell, so that noise does not decide."""
    suite_runs.be_recorded()
    suite_runs.be_steady(DDP)
    return suite_runs


@pytest.mark.parametrize(
    ("fault", "outcome", "says"),
    [
        ("nan_loss", Outcome.WRONG, "the loss is not finite from step 2 on"),
        ("gradient_scale=2", Outcome.WRONG, "start gradient norm"),
        ("missing_metric", Outcome.INVALID, "losses of 0 of 6 steps"),
        pytest.param("truncated=1", Outcome.INVALID, "1 of 4 measured steps", marks=pytest.mark.long),
        ("slow_step=4", Outcome.REGRESSED, "step time"),
        pytest.param("raise@1", Outcome.ERROR, "CRASH: rank 1: AssertionError: planted", marks=pytest.mark.long),
        ("hang@0", Outcome.ERROR, "HANG: timeout after 8 s, rank 0 in"),
    ],
)
def test_planted_fault_turns_its_cell_red_or_invalid(recorded_ddp, fault, outcome, says):
    before = {path: path.read_bytes() for path in recorded_ddp.state.glob("baselines/*/*.json")}
    outcomes = recorded_ddp.run("-k", "ddp", f"--perf-plant={fault}", "--perf-provisional", "--perf-timeout=8")
    assert outcomes.by_cell == {DDP: outcome}, outcomes.text
    assert says in outcomes.text
    assert outcomes.exit_code == (8 if outcome is Outcome.INVALID else 1)
    assert {path: path.read_bytes() for path in before} == before


@pytest.mark.long
def test_checkpoint_is_where_every_rank_starts_and_part_of_the_recipe(recorded_ddp):
    folder = recorded_ddp.root / "my-checkpoint"
    folder.mkdir()
    save = (
        "import torch; from safetensors.torch import save_file; from strategies.model import build_model;"
        "from strategies.shapes import SIZES; model = build_model(SIZES['tiny'], device=torch.device('cpu'), seed=7);"
        "save_file({n: p.detach().clone() for n, p in model.named_parameters()}, sys.argv[1] + '/model.safetensors')"
    )
    subprocess.run([sys.executable, "-c", f"import sys; {save}", str(folder)], cwd=ROOT, check=True)
    outcomes = recorded_ddp.run("-k", "ddp", f"--perf-checkpoint={folder}")
    assert outcomes.by_cell == {DDP: Outcome.NO_BASELINE}
    assert "weights: seeded -> my-checkpoint" in outcomes.text
    (folder / "model.safetensors").unlink()
    save_file({"lm_head.weight": numpy.zeros((2, 2), numpy.float32)}, folder / "other.safetensors")
    refused = recorded_ddp.run("-k", "ddp", f"--perf-checkpoint={folder}")
    assert refused.by_cell == {DDP: Outcome.ERROR}
    assert re.search(r"REFUSED: rank [01]: ValueError: .* is not a checkpoint of this shape", refused.text)


@pytest.mark.long
def test_resume_with_other_software_is_refused(suite_runs):
    folder = suite_runs.record("-k", "single").results.folder
    (folder / "runs" / SINGLE / "2.json").unlink()
    for path in folder.glob(f"runs/{SINGLE}/*.json"):
        run = jsonfile.read(path, RunRecord)
        software = replace(run.environment.software, torch="2.10.0")
        jsonfile.write(path, replace(run, environment=replace(run.environment, software=software)))
    kept = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    for exit_code, more in ((pytest.ExitCode.USAGE_ERROR, ()), (pytest.ExitCode.TESTS_FAILED, ("-n1",))):
        resumed = suite_runs.run(f"--perf-resume={folder}", *more)
        assert resumed.exit_code == exit_code, resumed.text
        if not more:
            assert {path: path.read_bytes() for path in kept} == kept
        assert "torch 2.10.0 when measured, 2.1" in resumed.text
        assert not Results(folder).runs(DDP), "no cell of it is measured"
    assert "start a new test run" in resumed.text


def test_time_of_a_run_holds_no_imports_of_the_server(suite_runs):
    runs = suite_runs.record("-k", "single").results.runs(SINGLE)
    assert runs[0].server_start_up_s > 1.0
    assert runs[0].wall_s < runs[0].server_start_up_s
    assert [run.server_start_up_s for run in runs[1:]] == [0.0, 0.0]


@pytest.mark.parametrize(
    ("launches", "looks"), [((130e3,), 1), ((65e3, 130e3), 2), ((65e3, 65e3), 2), ((66e3, 65e3), 2)]
)
def test_node_that_falls_short_is_looked_at_again(monkeypatch, tmp_path, launches, looks):
    """Its launch rate differs from one start of the ranks to the next; twice too low is believed."""
    record = nodes.recorded(nodes.ceilings(launches_per_s=nodes.rate(130e3)))
    baselines.write(tmp_path / "baselines", record)
    seen = iter([nodes.preflight(ceilings=nodes.ceilings(launches_per_s=nodes.rate(rate))) for rate in launches])
    asked = []
    monkeypatch.setattr("perf.suite.examine", lambda *_, variables, **__: asked.append(variables) or next(seen))
    options = {"matrix": "auto", "plan": PLAN, "deadline_s": 60.0, "baselines": tmp_path / "baselines"}
    settings = Settings(**options, state=tmp_path / "state", variables=(("NCCL_P2P_DISABLE", "1"),))
    node = Node(cpu="Test CPU", cpu_cores=2, gpus=nodes.VISIBLE)
    suite = Suite(settings, node, Results(tmp_path / "results"), Progress(1, None))
    found = suite.examine()
    assert next(seen, None) is None
    assert asked == [{"NCCL_P2P_DISABLE": "1"}] * looks
    assert suite.results.preflight().ceilings.launches_per_s.median == max(launches)
    assert bool(found.of_host_bound_cells) is (max(launches) < 130e3)
    assert not found.of_all_cells
