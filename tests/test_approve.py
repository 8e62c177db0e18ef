"""tools.approve: the one writer of baselines writes what ran and was valid, whole, and nothing else."""

import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from perf.facts import jsonfile
from perf.facts.cell import Cell
from perf.facts.record import RunRecord
from perf.judge.baseline import Baseline, Invariants, RecordedCeilings, read
from perf.measure.connection import ROOT
from perf.tell.results import Manifest, Results
from strategies.spec import LinkProfile, StrategyName
from tests import nodes
from tests.factory import CPU, PLAN, cell, change_ranks, environment, run_record
from tools.approve import main

DDP, FSDP2 = cell(), cell(StrategyName.FSDP2)


def results(folder: Path, *cells: Cell, run_id: str = "2026-11-29T02-00-00", ran: dict[str, list[RunRecord]]) -> Path:
    made = Results(folder / run_id)
    manifest = Manifest(run_id=run_id, started_at="2026-11-29T02:00:00+00:00", matrix="smoke", plan=PLAN, cells=cells)
    made.write_manifest(manifest)
    for runs in ran.values():
        for run in runs:
            made.write_run(run)
    return made.folder


def runs_of(of: Cell, step_time_s: float = 0.1) -> list[RunRecord]:
    return [run_record(of, index=index, step_time_s=step_time_s) for index in range(3)]


def files(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in sorted(root.rglob("*.json"))}


@pytest.fixture
def root(tmp_path) -> Path:
    return tmp_path / "baselines"


@pytest.fixture
def one_night(tmp_path) -> Path:
    return results(tmp_path, DDP, FSDP2, ran={DDP.id: runs_of(DDP)})


def approve(root: Path, *arguments: object) -> int:
    return main([*map(str, arguments), "--baselines", str(root)])


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


def test_cell_of_a_node_below_its_kind_is_not_stored(root, tmp_path, capsys):
    of = cell(link=LinkProfile.NATIVE)
    env = environment(machine=nodes.H200S)
    runs = [run_record(of, index=index, allocated_bytes=10 * 2**30, env=env) for index in range(3)]
    night = results(tmp_path, of, ran={of.id: runs})
    assert approve(root, with_preflight(night)) == 0
    slower = nodes.preflight(ceilings=nodes.ceilings(gemm_flop_per_s=nodes.rate(500e12)))
    second = results(tmp_path, of, run_id="2026-11-30", ran={of.id: runs})
    assert approve(root, with_preflight(second, slower)) == 1
    assert "the node is not comparable: GEMM" in capsys.readouterr().out
    (stored,) = root.rglob(f"{nodes.H200S.key}/{of.id}.json")
    assert len(read(stored, Baseline).nights) == 1


CEILINGS = f"ceilings/{nodes.H200S.key}.json"


def with_preflight(night: Path, preflight=None) -> Path:
    Results(night).write_preflight(preflight or nodes.preflight())
    return night


def test_ceilings_of_a_test_runs_node_are_stored_beside_its_cells(root, one_night, capsys):
    assert approve(root, with_preflight(one_night)) == 0
    assert read(root / CEILINGS, RecordedCeilings).ceilings == nodes.ceilings()
    out = capsys.readouterr().out
    assert f"  stored     ceilings of {nodes.H200S.key}: first ceilings: GEMM 793 TFLOP/s, launch rate 251 k/s" in out
    before = files(root)
    assert approve(root, one_night) == 0
    assert files(root) == before
    assert f"  unchanged  ceilings of {nodes.H200S.key}: within tolerance" in capsys.readouterr().out


def test_ceilings_are_no_part_of_invariants_only(root, one_night):
    assert approve(root, with_preflight(one_night), "--invariants-only") == 0
    assert set(files(root)) == {f"invariants/{DDP.id}.json"}


def test_preflight_of_the_doctor_is_stored_alone_and_a_lower_one_only_with_consent(root, tmp_path, capsys):
    first, worse = tmp_path / "first.json", tmp_path / "worse.json"
    jsonfile.write(first, nodes.preflight())
    jsonfile.write(worse, nodes.preflight(ceilings=nodes.ceilings(gemm_flop_per_s=nodes.rate(640e12, 1))))
    assert approve(root, "--ceilings", first) == 0
    assert set(files(root)) == {CEILINGS}
    before = files(root)
    assert approve(root, "--ceilings", worse) == 1
    assert files(root) == before
    assert "refused    ceilings of" in capsys.readouterr().out
    assert approve(root, "--ceilings", worse, "--accept-regression") == 2
    assert files(root) == before
    assert approve(root, "--ceilings", worse, "--accept-regression", "--reason", "capped rack") == 0
    assert "GEMM 793 TFLOP/s -> 640 TFLOP/s" in capsys.readouterr().out
    stored = read(root / CEILINGS, RecordedCeilings)
    assert (stored.origin.reason, stored.origin.run_id) == ("capped rack", "2026-11-29T02:00:00+00:00")


def test_damaged_preflight_and_damaged_ceilings_are_named(root, one_night, capsys):
    assert approve(root, with_preflight(one_night)) == 0
    whole = (root / CEILINGS).read_text()
    (root / CEILINGS).write_text(whole.replace("793", "794", 1))
    assert approve(root, one_night) == 2
    assert f"{CEILINGS}: checksum" in capsys.readouterr().err
    (root / CEILINGS).write_text(whole)
    (one_night / "preflight.json").write_text("{}")
    assert approve(root, one_night) == 2
    assert "preflight.json" in capsys.readouterr().err


def test_nothing_named_is_a_usage_error(root, capsys):
    with pytest.raises(SystemExit):
        approve(root)
    assert "--ceilings PREFLIGHT.json" in capsys.readouterr().err
