"""tools.approve where a node is asked: its ceilings, and cells of one below its kind."""

from perf.facts import jsonfile
from perf.judge.baseline import Baseline, RecordedCeilings, read
from strategies.spec import LinkProfile
from tests import nodes
from tests.approvals import CEILINGS, DDP, approve, files, one_night, results, root, with_preflight
from tests.factory import cell, environment, run_record

__all__ = ["one_night", "root"]


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
