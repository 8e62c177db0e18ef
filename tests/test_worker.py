"""Room perf/measure/worker.py: a real run's records are whole, agree over the ranks, and with torchrun's."""

import os
import statistics
import subprocess
import sys
import time
from itertools import pairwise

import msgspec
import pytest
from safetensors.torch import save_file

from perf.facts import jsonfile
from perf.facts.cell import SamplingPlan
from perf.facts.fault import Fault
from perf.facts.job import ENTRY, Job
from perf.facts.measurement import measure, straggler
from perf.facts.record import MemoryPeaks, RankRecord
from perf.judge.correctness import intrinsic_errors
from perf.measure.connection import ROOT, python_path
from perf.measure.launch import loopback_variables
from strategies.model import build_model
from strategies.shapes import SIZES
from strategies.spec import AXES, StrategyName
from tests.equivalence import CPU
from tests.factory import cell, run_record

PLAN = SamplingPlan(warmup_steps=3, timed_steps=4, runs=1)
MIB = 2**20
SHAPE = SIZES["tiny"]
LAYERS_BYTES = 4 * (SHAPE.num_parameters - (SHAPE.vocab_size + 1) * SHAPE.hidden_size)
ROOT_BYTES = 4 * (SHAPE.vocab_size + 1) * SHAPE.hidden_size
LEDGERS = {
    StrategyName.DDP: {"all_reduce": (1, LAYERS_BYTES + ROOT_BYTES)},
    # Two micro-batches: two units of two layers are gathered for forward and backward, the root once; shards are half.
    StrategyName.FSDP2: {
        "all_gather": (10, 2 * (2 * LAYERS_BYTES + ROOT_BYTES) // 2),
        "reduce_scatter": (6, 2 * (LAYERS_BYTES + ROOT_BYTES)),
    },
}
SHARDED = pytest.mark.parametrize("strategy", [name for name in StrategyName if name is not StrategyName.SINGLE])
NUM_RANKS = {name: 2 ** len(AXES[name]) for name in StrategyName} | {StrategyName.SINGLE: 1}


def job(strategy=StrategyName.DDP, plan=PLAN, fault=None, size=""):
    of = cell(strategy, world_size=NUM_RANKS[strategy], size=size)
    planted = Fault.parse(fault) if fault else None
    return Job(cell=of, plan=plan, requested_at_s=time.monotonic(), deadline_s=60.0, fault=planted)


def run(launcher, strategy=StrategyName.DDP, plan=PLAN, fault=None, size=""):
    """A run of the strategy's tiny cell, its records as the suite would keep them."""
    task = job(strategy, plan, fault, size)
    records, teardown_hang = launcher.run(
        ENTRY, task, world_size=task.cell.world_size, record=RankRecord, deadline_s=60.0
    )
    assert not teardown_hang
    return msgspec.structs.replace(run_record(task.cell), plan=plan, ranks=tuple(records), fault=task.fault)


@pytest.fixture(scope="module")
def runs(launcher):
    """One run of every strategy, and one of the unsharded model with experts."""
    found = {strategy: run(launcher, strategy) for strategy in StrategyName}
    return found | {"tiny_moe": run(launcher, StrategyName.SINGLE, size="tiny_moe")}


def unsharded(runs, strategy):
    return runs["tiny_moe" if runs[strategy].cell.size == "tiny_moe" else StrategyName.SINGLE]


@pytest.mark.parametrize("strategy", StrategyName)
def test_record_is_complete_and_right_by_itself(runs, strategy):
    of_run = runs[strategy]
    assert [record.rank for record in of_run.ranks] == list(range(of_run.cell.world_size))
    for record in of_run.ranks:
        assert (len(record.warmup_times_s), len(record.step_times_s), len(record.losses)) == (3, 4, 7)
        assert min(record.warmup_times_s + record.step_times_s) > 0
        assert (record.device, record.num_threads) == ("cpu", 1)
        assert record.memory.allocated_bytes is None
        assert (record.compile.graphs, record.compile.recompiles_after_warmup) == (0, 0)
    assert intrinsic_errors(measure(of_run.cell, PLAN, [of_run])) == []


@pytest.mark.parametrize("strategy", StrategyName)
def test_marks_increase_and_hold_the_steps_between_them(runs, strategy):
    for record in runs[strategy].ranks:
        marks = msgspec.structs.astuple(record.marks)
        assert marks[0] > 0
        assert all(first < second for first, second in pairwise(marks))
        assert marks[-1] < 60
        assert sum(record.step_times_s) < record.marks.timed_s - record.marks.warm_s
        assert sum(record.warmup_times_s) < record.marks.warm_s - record.marks.built_s


@SHARDED
def test_losses_of_the_ranks_add_up_to_those_of_the_unsharded_model(runs, strategy):
    assert runs[strategy].losses == pytest.approx(unsharded(runs, strategy).losses, abs=1e-5)


@pytest.mark.parametrize("strategy", StrategyName)
def test_loss_falls_in_every_step(runs, strategy):
    assert all(later < earlier for earlier, later in pairwise(runs[strategy].losses))


@SHARDED
@pytest.mark.parametrize("name", ["start_gradient_norm", "end_gradient_norm"])
def test_gradient_norm_is_global_and_that_of_the_unsharded_model(runs, strategy, name):
    expected = getattr(unsharded(runs, strategy).ranks[0], name)
    norms = [getattr(record, name) for record in runs[strategy].ranks]
    assert norms == pytest.approx([expected] * NUM_RANKS[strategy], rel=1e-4)


@pytest.mark.parametrize("strategy", StrategyName)
def test_parameters_and_tokens_of_the_ranks_add_up_to_the_models_and_the_batchs(runs, strategy):
    of_run = runs[strategy]
    assert sum(record.num_parameters for record in of_run.ranks) == of_run.cell.shape.num_parameters
    assert sum(record.tokens_per_step for record in of_run.ranks) == of_run.cell.workload.tokens_per_step
    seen = {record.tokens_per_step for record in of_run.ranks}
    assert len(seen) == 1 or seen == {0, of_run.cell.workload.tokens_per_step}


@pytest.mark.parametrize("strategy", LEDGERS)
def test_ledger_is_that_of_one_step_alone(runs, strategy):
    for record in runs[strategy].ranks:
        assert {entry.op: (entry.count, entry.bytes) for entry in record.ledger} == LEDGERS[strategy]
        assert {(entry.axis, entry.dtype) for entry in record.ledger} == {("dp", "float32")}
        assert len(record.arrivals_s) == sum(entry.count for entry in record.ledger)
    assert runs[StrategyName.SINGLE].ranks[0].ledger == ()


def test_run_without_timed_steps_only_warms_up(launcher):
    for record in run(launcher, plan=SamplingPlan(warmup_steps=1, timed_steps=0)).ranks:
        assert (len(record.warmup_times_s), record.step_times_s, len(record.losses)) == (1, (), 1)


def test_steps_that_settle_a_long_warm_up_are_like_the_timed_ones(launcher, runs):
    plan = msgspec.structs.replace(PLAN, warmup_steps=7)
    slow = run(launcher, StrategyName.SINGLE, plan, "slow_step=3.0")
    (record,) = slow.ranks
    assert (len(record.warmup_times_s), len(record.step_times_s), len(record.losses)) == (7, 4, 11)
    assert min(record.warmup_times_s[5:] + record.step_times_s) > 2 * statistics.median(record.warmup_times_s[1:5])
    assert slow.losses[:7] == pytest.approx(runs[StrategyName.SINGLE].losses, abs=1e-5), "every step once, in order"


def test_run_starts_from_the_weights_of_a_checkpoint(launcher, tmp_path, runs):
    save_file(dict(build_model(SHAPE, device=CPU, seed=9).named_parameters()), tmp_path / "model.safetensors")
    plan = msgspec.structs.replace(PLAN, checkpoint=str(tmp_path))
    losses = {strategy: run(launcher, strategy, plan).losses for strategy in (StrategyName.SINGLE, StrategyName.FSDP2)}
    assert losses[StrategyName.FSDP2] == pytest.approx(losses[StrategyName.SINGLE], abs=1e-5)
    assert abs(losses[StrategyName.SINGLE][0] - runs[StrategyName.SINGLE].losses[0]) > 1e-4


def test_torchrun_gives_the_same_losses_and_ledgers(runs, tmp_path):
    jsonfile.write(tmp_path / "job.json", job())
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    result = subprocess.run(
        [*command, "-m", "perf.measure.worker", tmp_path / "job.json", tmp_path],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": python_path(ROOT)} | loopback_variables(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    records = [jsonfile.read(tmp_path / f"record-{rank}.json", RankRecord) for rank in range(2)]
    forked = runs[StrategyName.DDP].ranks
    assert [record.losses for record in records] == [record.losses for record in forked]
    assert [record.ledger for record in records] == [record.ledger for record in forked]
    assert all(f'"record": "record-{rank}.json"' in result.stdout for rank in range(2))


def test_late_rank_makes_every_step_slow_and_is_named_by_its_arrivals(launcher):
    late = run(launcher, fault="delay=0.2@1")
    assert min(late.step_times_s) >= 0.2
    assert min(late.ranks[0].step_times_s) > 0.18  # alone, step times do not tell who waits for whom
    rank, lag_s = straggler(late)
    assert rank == 1
    assert lag_s > 0.15


def fill_memory(payload, context):
    """Entry point of the server: a rank that needs 512 MiB more than others."""
    import torch

    from perf.measure.probes import memory_peaks

    torch.ones(512 * MIB // 4)
    jsonfile.write(context.folder / f"record-{context.rank}.json", memory_peaks(CPU))
    context.report("recorded")


def test_run_does_not_inherit_the_resident_peak_of_a_bigger_one(launcher):
    before = [record.memory.resident_bytes for record in run(launcher).ranks]
    bigger, _ = launcher.run("tests.test_worker:fill_memory", None, world_size=2, record=MemoryPeaks, deadline_s=60.0)
    after = [record.memory.resident_bytes for record in run(launcher).ranks]
    assert min(record.resident_bytes for record in bigger) > max(before) + 400 * MIB
    assert after == pytest.approx(before, abs=100 * MIB)
