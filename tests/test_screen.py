"""Room perf/tell/screen.py and tools.screen: who competes with whom, who is fastest, and the matrix of those."""

import re

import pytest
from msgspec.structs import replace

from perf.facts.matrix import as_toml, cells_of, from_file
from perf.facts.outcome import Outcome
from perf.judge.verdict import Verdict
from perf.tell.exports import read_test_run
from perf.tell.results import Results
from perf.tell.screen import axis_of, fastest, groups_of
from strategies.spec import ComputeDtype, LinkProfile, Mode, Options
from tests import factory
from tests.finished_runs import manifest, write_test_run
from tools.screen import main

DDP, FSDP2, TP = (factory.cell(name) for name in ("ddp", "fsdp2", "tp"))
AS_IN_80_GB = Options(activation_checkpointing=True, optimizer_state=ComputeDtype.BFLOAT16)
SLOW = replace(factory.cell("zero1"), options=AS_IN_80_GB)
FAILED, WRONG, BROKEN = factory.cell("zero2"), factory.cell("tp_sp"), factory.cell("pp_gpipe")


@pytest.mark.parametrize(
    ("strategy", "world_size", "axis"),
    [
        ("single", 1, "single"),
        ("hsdp", 4, "data"),
        ("tp_sp", 4, "tensor"),
        ("pp_zbv", 4, "pipeline"),
        ("cp_usp", 4, "context"),
        ("ep", 4, "expert"),
        ("tp2.ulysses2", 4, "context"),
        ("fsdp2.ring2", 4, "context"),
        ("dp2.tp2", 4, "product"),
        ("dp2.tp2.pp2", 8, "product"),
    ],
)
def test_axis_of_a_candidate(strategy, world_size, axis):
    assert axis_of(factory.cell(strategy, world_size=world_size)) == axis


def test_axes_of_the_candidates_for_four_gpus():
    cells = cells_of("perf/matrices/four_gpus.toml")
    of_a_size = [cell for cell in cells if (cell.size, cell.link) == ("0.6b", LinkProfile.NATIVE)]
    counts = {axis: [axis_of(cell) for cell in of_a_size].count(axis) for axis in map(axis_of, of_a_size)}
    assert counts == {"data": 3, "tensor": 6, "pipeline": 4, "context": 5, "product": 3}


def screened(root, name, started_at, step_times_s, failed=None):
    """A test run that measured each cell once, in so many seconds a step; `failed`: outcomes of others."""
    results = Results(root / name)
    failed = failed or {}
    results.write_manifest(manifest(*step_times_s, *failed, run_id=name, started_at=started_at))
    for cell, step_time_s in step_times_s.items():
        results.write_run(factory.run_record(cell, step_time_s=step_time_s))
    for cell in step_times_s:
        results.write_verdict(Verdict(cell_id=cell.id, outcome=Outcome.NO_BASELINE))
    for cell, outcome in failed.items():
        results.write_run(factory.run_record(cell, step_time_s=0.001))
        results.write_verdict(Verdict(cell_id=cell.id, outcome=outcome, reasons=("said why\nat length",)))
    return results


@pytest.fixture
def first(tmp_path):
    times_s = {DDP: 0.101, FSDP2: 0.1, SLOW: 0.2, TP: 0.3}
    failed = {FAILED: Outcome.ERROR, WRONG: Outcome.WRONG, BROKEN: Outcome.INVALID}
    return screened(tmp_path, "first", "2026-11-29T01:00:00+00:00", times_s, failed)


def test_fastest_is_found_in_each_group_and_what_failed_does_not_compete(first):
    groups = groups_of([read_test_run(first)])
    assert [(group.axis, [one.cell for one in candidates]) for group, candidates in groups.items()] == [
        ("data", [FSDP2, DDP, SLOW]),
        ("tensor", [TP]),
    ]
    data, _ = groups.values()
    assert [one.cell for one in fastest(data)] == [FSDP2, DDP], "one run does not tell 1 % apart"
    assert [one.cell for one in fastest(data, 0.0)] == [FSDP2]
    assert [one.cell for one in fastest(data, 0.5)] == [FSDP2, DDP, SLOW]


def test_cell_of_two_test_runs_counts_by_its_newest(first, tmp_path):
    newer = screened(tmp_path, "newer", "2026-11-29T02:00:00+00:00", {SLOW: 0.05})
    for order in ([first, newer], [newer, first]):
        (data, _) = groups_of([read_test_run(results) for results in order]).values()
        assert [one.cell for one in data] == [SLOW, FSDP2, DDP]


def test_two_machines_are_not_compared(first, tmp_path):
    elsewhere = Results(tmp_path / "elsewhere")
    elsewhere.write_manifest(manifest(SLOW, run_id="elsewhere", started_at="2026-11-29T02:00:00+00:00"))
    elsewhere.write_run(factory.run_record(SLOW, step_time_s=0.01, env=factory.environment(factory.H200X2)))
    elsewhere.write_verdict(Verdict(cell_id=SLOW.id, outcome=Outcome.PASS))
    with pytest.raises(
        ValueError, match=rf"{re.escape(SLOW.id)} was measured on 2x-nvidia-h200.*, .* on cpu.*: screen"
    ):
        groups_of([read_test_run(results) for results in (first, elsewhere)])


def test_links_sizes_and_numbers_of_ranks_do_not_compete(tmp_path):
    others = [
        factory.cell("ddp", world_size=4),
        factory.cell("ddp", size="0.6b", link=LinkProfile.NATIVE),
        factory.cell("ddp", size="0.6b", link=LinkProfile.NO_P2P),
    ]
    results = screened(tmp_path, "run", "2026-11-29T01:00:00+00:00", dict.fromkeys([DDP, *others], 0.1))
    assert [len(candidates) for candidates in groups_of([read_test_run(results)]).values()] == [1] * 4


def test_other_workloads_do_not_compete_and_other_micro_batches_do(tmp_path, capsys):
    """A step of half the tokens is no faster candidate: it does half the work, and is told apart in the title."""
    work = DDP.workload
    longer = replace(work, sequences=work.sequences // 2, sequence_length=work.sequence_length * 2)
    others = {
        replace(DDP, workload=replace(work, sequences=work.sequences // 2), label="half"): 0.04,
        replace(DDP, workload=longer, label="long"): 0.09,
        replace(FSDP2, workload=replace(work, micro_batch=work.micro_batch * 2), label="mb"): 0.08,
    }
    results = screened(tmp_path, "run", "2026-11-29T01:00:00+00:00", {DDP: 0.1} | others)
    groups = groups_of([read_test_run(results)])
    half, long, micro = others
    assert [[one.cell for one in candidates] for candidates in groups.values()] == [[half], [micro, DDP], [long]]
    assert main([str(results.folder)]) == 0
    assert "tiny, 2 ranks, gloo, 256 tokens a step in sequences of 64\n" in capsys.readouterr().out


def test_small_sizes_come_first(tmp_path):
    sizes = [factory.cell("ddp", size=size, link=LinkProfile.NATIVE) for size in ("a3b", "7b", "4b", "0.6b")]
    results = screened(tmp_path, "run", "2026-11-29T01:00:00+00:00", dict.fromkeys(sizes, 0.1))
    assert [group.size for group in groups_of([read_test_run(results)])] == ["0.6b", "4b", "a3b", "7b"]


def test_tool_prints_each_candidate_and_writes_the_fastest_as_a_matrix(first, tmp_path, capsys):
    picks = tmp_path / "picks.toml"
    assert main([str(first.folder), "--into", str(picks)]) == 0
    assert from_file(picks) == (FSDP2, DDP, TP)
    out = capsys.readouterr().out
    assert "tiny, 2 ranks, gloo" in out
    assert "zero1 ac+bf16state" in out
    assert "50.0 %" in out
    assert f"left out: {FAILED.id}: ERROR: said why\n" in out
    assert f"picked (*): 3 of 4; pytest perf --perf-matrix {picks}" in out
    assert main([str(first.folder), "--into", str(picks)]) == 2
    assert f"{picks} exists; name a new file" in capsys.readouterr().err
    starred = [line.split()[2] for line in out.splitlines() if line.lstrip().startswith("*")]
    assert starred == ["fsdp2", "ddp", "tp"]


def test_a_pick_of_one_link_is_taken_over_the_others_too_on_request(tmp_path):
    times_s = {
        factory.cell(name, size="0.6b", link=link): step_time_s
        for link, ddp_s, fsdp2_s in ((LinkProfile.NATIVE, 0.2, 0.1), (LinkProfile.NO_P2P, 0.3, 0.4))
        for name, step_time_s in (("ddp", ddp_s), ("fsdp2", fsdp2_s), ("zero1", 1.0))
    }
    run = screened(tmp_path, "run", "2026-11-29T01:00:00+00:00", times_s)
    for options, num_picks in (([], 2), (["--every-link"], 4)):
        picks = tmp_path / f"{num_picks}.toml"
        assert main([str(run.folder), "--into", str(picks), *options]) == 0
        assert len(from_file(picks)) == num_picks
    assert {cell.strategy for cell in from_file(picks)} == {"ddp", "fsdp2"}


def test_tool_reads_a_whole_test_run(tmp_path, capsys):
    assert main([str(write_test_run(tmp_path))]) == 0
    assert "left out: " in capsys.readouterr().out


def test_nothing_measured_no_test_run_and_no_margin_are_told(first, tmp_path, capsys):
    empty = screened(tmp_path, "empty", "2026-11-29T03:00:00+00:00", {}, {WRONG: Outcome.WRONG})
    assert main([str(empty.folder), "--into", str(tmp_path / "none.toml")]) == 1
    assert not (tmp_path / "none.toml").exists()
    assert main([str(tmp_path)]) == 2
    assert main([str(first.folder), "--margin", "2"]) == 2
    assert "--margin 2: a share" in capsys.readouterr().err


def test_matrix_of_written_cells_is_read_back_as_the_same(tmp_path):
    cells = [
        *cells_of("auto"),
        *cells_of("perf/matrices/four_gpus.toml"),
        SLOW,
        replace(factory.cell("hsdp", world_size=8), degrees=(4, 2), options=Options(clip_norm=0.5)),
        replace(DDP, mode=Mode.COMPILE, variables=(("A", '"quoted" \\ \u4e2d'), ("B", "2")), label="two.vars"),
    ]
    path = tmp_path / "all.toml"
    different = tuple({cell.id: cell for cell in cells}.values())
    path.write_text(as_toml(different), encoding="utf-8")
    assert from_file(path) == different
