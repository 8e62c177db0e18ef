"""tools.approve: the one writer of baselines writes what ran and was valid, whole, and nothing else."""

import multiprocessing
import os
import signal
import subprocess
import sys

import pytest
from msgspec.structs import replace

import tools.approve
from perf.judge.baseline import Baseline, Invariants, read
from perf.measure.connection import ROOT
from perf.tell.results import Results
from strategies.spec import StrategyName
from tests.approvals import DDP, FSDP2, approve, files, one_night, results, root, runs_of, with_preflight
from tests.factory import CPU, PLAN, cell, change_ranks, run_record
from tools.approve import main

__all__ = ["one_night", "root"]


def test_only_cells_that_ran_are_written(root, one_night, capsys):
    assert approve(root, one_night) == 0
    assert set(files(root)) == {f"{CPU.key}/{DDP.id}.json", f"invariants/{DDP.id}.json"}
    assert f"not run    {FSDP2.id}" in capsys.readouterr().out
    assert read(root / CPU.key / f"{DDP.id}.json", Baseline).is_provisional
    assert read(root / "invariants" / f"{DDP.id}.json", Invariants).cell_id == DDP.id


def test_other_cells_and_unchanged_values_keep_their_bytes(root, tmp_path, one_night):
    both = results(tmp_path, DDP, FSDP2, run_id="2026-11-28", ran={DDP.id: runs_of(DDP), FSDP2.id: runs_of(FSDP2)})
    assert approve(root, both) == 0
    before = files(root)
    assert approve(root, both) == 0
    assert files(root) == before
    assert approve(root, one_night) == 0
    after = files(root)
    assert {name for name in after if after[name] != before.get(name)} == {f"{CPU.key}/{DDP.id}.json"}


def test_several_nights_at_once_make_one_series_in_time_order(root, tmp_path, capsys):
    nights = [results(tmp_path, DDP, run_id=f"2026-11-2{day}", ran={DDP.id: runs_of(DDP)}) for day in (3, 1, 2)]
    assert approve(root, *nights) == 0
    stored = read(root / CPU.key / f"{DDP.id}.json", Baseline)
    assert [night.origin.run_id for night in stored.nights] == ["2026-11-21", "2026-11-22", "2026-11-23"]
    assert not stored.is_provisional
    assert "step time 100.0 ms -> 100.0 ms (+0.0 %)" in capsys.readouterr().out


def test_refused_cell_is_said_and_left_alone_while_others_are_written(root, tmp_path, one_night, capsys):
    approve(root, one_night)
    before = files(root)
    slow = results(tmp_path, DDP, FSDP2, run_id="2026-11-30", ran={DDP.id: runs_of(DDP, 0.2), FSDP2.id: runs_of(FSDP2)})
    assert approve(root, slow) == 1
    assert f"refused    {DDP.id}: worse than the baseline" in capsys.readouterr().out
    after = files(root)
    assert after[f"{CPU.key}/{DDP.id}.json"] == before[f"{CPU.key}/{DDP.id}.json"]
    assert f"{CPU.key}/{FSDP2.id}.json" in after
    assert approve(root, slow, "--accept-regression", "--reason", "safer kernel") == 0
    stored = read(root / CPU.key / f"{DDP.id}.json", Baseline)
    assert stored.nights[-1].origin.reason == "safer kernel"


def test_wrong_numbers_are_never_written(root, tmp_path):
    wrong = [change_ranks(run, losses=(None,) * 15) for run in runs_of(DDP)]
    folder = results(tmp_path, DDP, ran={DDP.id: wrong})
    assert approve(root, folder, "--reason", "x", "--accept-regression", "--accept-invariants") == 1
    assert files(root) == {}


def test_invariants_only_leaves_times_out(root, one_night):
    assert approve(root, one_night, "--invariants-only") == 0
    assert set(files(root)) == {f"invariants/{DDP.id}.json"}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nowhere"], "nowhere is not a test run"),
        (["RUN", "--accept-regression"], "needs a --reason"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(root, one_night, capsys, arguments, says):
    assert approve(root, *[one_night if word == "RUN" else word for word in arguments]) == 2
    assert says in capsys.readouterr().err
    assert files(root) == {}


def test_damaged_record_and_damaged_baseline_are_named(root, one_night, capsys):
    approve(root, one_night)
    stored = root / CPU.key / f"{DDP.id}.json"
    whole = stored.read_text()
    stored.write_text(whole.replace("0.1", "0.2", 1))
    assert approve(root, one_night) == 2
    assert "checksum" in capsys.readouterr().err
    stored.write_text(whole)
    (one_night / "runs" / DDP.id / "1.json").write_text("{")
    assert approve(root, one_night) == 2
    assert "1.json" in capsys.readouterr().err


def test_two_approvals_at_once_lose_no_night(root, tmp_path):
    nights = [results(tmp_path, DDP, run_id=f"2026-11-1{day}", ran={DDP.id: runs_of(DDP)}) for day in range(4)]
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=approve, args=(root, night)) for night in nights]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(timeout=60)
    assert len(read(root / CPU.key / f"{DDP.id}.json", Baseline).nights) == 4


def test_kill_in_the_middle_leaves_whole_files(root, tmp_path):
    """Killed after ever more cells, an approval leaves each file absent or whole."""
    cells = [replace(of, label=label) for of in (DDP, FSDP2) for label in "abcdefghijklmnop"]
    night = results(tmp_path, *cells, ran={of.id: runs_of(of) for of in cells})
    command = [sys.executable, "-u", "-m", "tools.approve", str(night), "--baselines", str(root)]
    for num_lines in (1, 2, 4):
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as process:
            assert all(process.stdout.readline() for _ in range(num_lines))
            os.kill(process.pid, signal.SIGKILL)
        assert process.returncode == -signal.SIGKILL, "it had not ended"
        assert len(list(root.rglob("*.json"))) < 2 * len(cells)
        for path in root.rglob("*.json"):
            read(path, Invariants if path.parent.name == "invariants" else Baseline)


def test_comparisons_side_by_side_and_their_nodes_are_never_stored(root, one_night, capsys):
    made = Results(with_preflight(one_night))
    beside = "every cell of this checkout with NCCL_P2P_DISABLE=1 beside itself without"
    made.write_manifest(replace(made.manifest(), beside=beside, side_by_side=True))
    assert approve(root, one_night) == 1
    assert f"measured {beside}" in capsys.readouterr().out
    assert files(root) == {}


def test_first_values_of_a_cell_that_computes_something_else_than_the_unsharded_model_are_not_stored(
    root, tmp_path, capsys
):
    single = cell(StrategyName.SINGLE, world_size=1)
    assert approve(root, results(tmp_path, single, run_id="1", ran={single.id: runs_of(single)})) == 0
    before = files(root)
    wrong = [change_ranks(run, start_gradient_norm=2.6) for run in runs_of(DDP)]
    assert approve(root, results(tmp_path, DDP, run_id="2", ran={DDP.id: wrong}), "--reason", "really") == 1
    assert "unlike the unsharded model, start gradient norm 2.5 -> 2.6" in capsys.readouterr().out
    assert files(root) == before


def test_removed_file_is_recorded_again_as_its_damage_says(root, one_night, capsys):
    assert approve(root, one_night) == 0
    stored = root / CPU.key / f"{DDP.id}.json"
    whole = stored.read_bytes()
    stored.write_text(stored.read_text().replace("0.1", "0.2", 1))
    assert approve(root, one_night) == 2
    assert "or remove it and record it again with tools.approve" in capsys.readouterr().err
    stored.unlink()
    assert approve(root, one_night) == 0
    assert stored.read_bytes() == whole


@pytest.fixture
def local(root, tmp_path, monkeypatch):
    """A checkout with baselines of its own beside the checked-in ones."""
    monkeypatch.setattr(tools.approve, "BASELINES", root)
    monkeypatch.setattr(tools.approve, "LOCAL_BASELINES", tmp_path / "local")
    return tmp_path / "local"


def test_local_baseline_that_a_checked_in_one_would_win_over_is_refused(root, local, tmp_path, one_night, capsys):
    assert approve(root, with_preflight(one_night)) == 0
    second = results(tmp_path, DDP, FSDP2, run_id="2026-11-30", ran={DDP.id: runs_of(DDP), FSDP2.id: runs_of(FSDP2)})
    assert main([str(second), "--local"]) == 1
    assert f"refused    {DDP.id}: {root / CPU.key / DDP.id}.json wins over a local one" in capsys.readouterr().out
    assert set(files(local)) == {f"{CPU.key}/{FSDP2.id}.json", f"invariants/{FSDP2.id}.json"}
    invariants = local / "invariants" / f"{FSDP2.id}.json"
    invariants.rename(root / "invariants" / invariants.name)
    (local / CPU.key / f"{FSDP2.id}.json").unlink()
    other = [change_ranks(run, start_gradient_norm=2.7) for run in runs_of(FSDP2)]
    third = results(tmp_path, FSDP2, run_id="2026-12-01", ran={FSDP2.id: other})
    assert main([str(third), "--local", "--accept-invariants", "--reason", "x"]) == 1
    assert f"invariants/{FSDP2.id}.json wins over a local one" in capsys.readouterr().out
    assert files(local) == {}


@pytest.mark.parametrize(("most", "stored", "code"), [(3, {DDP.id}, 0), (5, {DDP.id, FSDP2.id}, 0)])
def test_cells_with_more_runs_do_not_spoil_the_others(root, tmp_path, capsys, most, stored, code):
    """A screen's single run is no baseline beside cells of three; three are one beside cells of five."""
    few = 1 if most == 3 else 3
    ran = {
        of.id: [replace(run_record(of, index=index), plan=replace(PLAN, runs=num_runs)) for index in range(num_runs)]
        for of, num_runs in ((DDP, most), (FSDP2, few))
    }
    folder = results(tmp_path, DDP, FSDP2, ran=ran)
    made = Results(folder)
    made.write_manifest(replace(made.manifest(), plan=replace(PLAN, runs=most)))
    assert approve(root, folder) == code
    assert {path.stem for path in (root / CPU.key).iterdir()} == stored
    assert ("1 of 3 runs, as a screen has them; no baseline" in capsys.readouterr().out) is (most == 3)


def test_interrupted_cell_is_refused(root, tmp_path, capsys):
    folder = results(tmp_path, DDP, ran={DDP.id: runs_of(DDP)[:1]})
    assert approve(root, folder) == 1
    cure = f"pytest perf --perf-resume results/{folder.name} --perf-runs 3 makes the 2 that it lacks"
    assert f"1 of 3 runs; {cure}" in capsys.readouterr().out


def test_runs_that_came_after_an_approval_are_told(root, tmp_path, capsys):
    folder = results(tmp_path, DDP, ran={DDP.id: runs_of(DDP)})
    assert approve(root, folder) == 0
    Results(folder).write_run(run_record(DDP, index=3))
    assert approve(root, folder) == 0
    assert "recorded already, without 1 newer runs: a night stays as it was approved" in capsys.readouterr().out


def test_nothing_named_is_a_usage_error(root, capsys):
    with pytest.raises(SystemExit):
        approve(root)
    assert "--ceilings PREFLIGHT.json" in capsys.readouterr().err
