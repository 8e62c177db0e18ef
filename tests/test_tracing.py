"""Room perf/measure/tracing.py: profiled runs of real ranks: traces open, splits tell who waits for whom."""

import gzip
import json

import pytest

from perf.facts.cell import SamplingPlan
from perf.facts.fault import Fault
from perf.facts.gpus import visible_gpus
from perf.facts.job import PLAIN_STEPS, PROFILED_STEPS
from perf.facts.matrix import node
from perf.measure import evidence as room
from perf.measure.evidence import collect
from perf.measure.launch import LaunchError
from perf.measure.trace_events import FORWARD_BACKWARD_MARK, OPTIMIZER_MARK, WAIT_MARK
from strategies.spec import Mode, StrategyName
from tests.factory import cell
from tests.test_gpu_comms import tiny

PLAN = SamplingPlan(warmup_steps=2)
SETTLING = SamplingPlan(warmup_steps=7)
DELAY_S = 0.25
STRATEGIES = (StrategyName.DDP, StrategyName.FSDP2)
ON_GPUS = [tiny(of) for of in node() if of.size == "0.6b" and of.world_size == 2 and of.strategy in STRATEGIES]
EACH = pytest.mark.parametrize("strategy", STRATEGIES)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("evidence")


@pytest.fixture(scope="module")
def healthy(launcher, folder):
    """A profiled run of each strategy."""
    return {of: collect(launcher, cell(of), PLAN, {}, folder / of, "candidate") for of in STRATEGIES}


def marks(path, name):
    """The annotations of this name in a trace, in order: start and duration in seconds."""
    entries = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    spans = [entry for entry in entries if entry.get("cat") == "user_annotation" and entry["name"] == name]
    return sorted((entry["ts"] / 1e6, entry["dur"] / 1e6) for entry in spans)


@EACH
def test_parts_add_up_to_the_steps_that_the_trace_shows(healthy, folder, strategy):
    for rank in healthy[strategy].ranks:
        shown = [duration for _, duration in marks(folder / strategy / rank.trace, "step")]
        assert len(shown) == 1 + PROFILED_STEPS
        assert [step.step_time_s for step in rank.steps] == pytest.approx(shown[1:], abs=1e-8)
        for step in rank.steps:
            assert min(step.compute_s, step.exposed_communication_s, step.optimizer_s, step.idle_s) > 0


@EACH
def test_each_rank_leaves_a_trace_with_both_parts_of_every_step(healthy, folder, strategy):
    assert [rank.rank for rank in healthy[strategy].ranks] == [0, 1]
    for rank in healthy[strategy].ranks:
        path = folder / strategy / f"candidate-rank{rank.rank}.json.gz"
        assert (path.name, path.stat().st_size) == (rank.trace, rank.trace_bytes)
        for name in (FORWARD_BACKWARD_MARK, OPTIMIZER_MARK):
            assert len(marks(path, name)) == 1 + PROFILED_STEPS
    assert len(list((folder / strategy).iterdir())) == 2


@EACH
def test_plain_steps_stand_beside_the_profiled_ones(healthy, strategy):
    for rank in healthy[strategy].ranks:
        assert len(rank.plain_step_times_s) == PLAIN_STEPS
        assert rank.shortest.step_time_s > 0.5 * min(rank.plain_step_times_s)


def test_collectives_and_waits_of_a_step_are_ops_with_their_counts(healthy):
    counts = {of: {op.name: op.count for op in healthy[of].ranks[0].ops} for of in STRATEGIES}
    assert counts[StrategyName.DDP]["c10d::allreduce_"] == 1
    fsdp2 = counts[StrategyName.FSDP2]
    assert (fsdp2["c10d::_allgather_base_"], fsdp2["c10d::_reduce_scatter_base_"]) == (10, 6)
    assert fsdp2[WAIT_MARK] == 16


@EACH
def test_rank_that_is_late_is_idle_and_the_other_one_shows_exposed_communication(launcher, tmp_path, healthy, strategy):
    fault = Fault.parse(f"delay={DELAY_S}@1")
    found = collect(launcher, cell(strategy), PLAN, {}, tmp_path, "candidate", fault=fault)
    waiting, late = found.ranks
    assert late.shortest.idle_s > DELAY_S
    assert waiting.shortest.idle_s < 0.5 * DELAY_S
    assert waiting.shortest.exposed_communication_s > late.shortest.exposed_communication_s + 0.5 * DELAY_S
    assert waiting.shortest.step_time_s > DELAY_S
    assert found.critical == late
    assert found.fault == fault


def test_compiled_step_is_split_too(launcher, tmp_path):
    found = collect(launcher, cell(StrategyName.SINGLE, mode=Mode.COMPILE, world_size=1), SETTLING, {}, tmp_path, "x")
    (rank,) = found.ranks
    assert len(rank.plain_step_times_s) == PLAIN_STEPS, "without those that settle"
    assert [step.exposed_communication_s for step in rank.steps] == [0.0] * PROFILED_STEPS
    assert any(op.name.startswith("## Call CompiledFxGraph") for op in rank.ops)


def test_build_without_this_module_is_a_failed_launch(launcher, tmp_path, monkeypatch):
    monkeypatch.setattr(room, "TRACE_ENTRY", "perf.tracing_of_the_future:trace_rank")
    with pytest.raises(LaunchError, match=r"No module named 'perf\.tracing_of_the_future'"):
        collect(launcher, cell(), PLAN, {}, tmp_path, "reference")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(len(visible_gpus(None)) < 2, reason="needs 2 GPUs")
@pytest.mark.parametrize("of", ON_GPUS, ids=[of.id for of in ON_GPUS])
def test_on_gpus_the_parts_are_those_of_the_devices_events(launcher, tmp_path, of):
    for rank in collect(launcher, of, PLAN, {}, tmp_path, "candidate").ranks:
        assert any("nccl" in op.name.lower() for op in rank.ops)
        for step in rank.steps:
            assert step.compute_s > 0
            assert min(step.exposed_communication_s, step.idle_s) >= 0
            assert step.optimizer_s is None if of.mode is Mode.CUDAGRAPH else step.optimizer_s > 0
        assert rank.shortest.step_time_s > 0.8 * min(rank.plain_step_times_s)
