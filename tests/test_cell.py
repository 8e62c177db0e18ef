"""Room perf/facts/cell.py: a cell's name and JSON, the sampling plan's limits, and what makes two recipes differ."""

import math
import re

import msgspec
import pytest
from msgspec.structs import replace

from perf.facts import jsonfile, matrix
from perf.facts.cell import Cell, Recipe, SamplingPlan
from strategies.shapes import SIZES
from strategies.spec import STEPS_BEFORE_CAPTURE, ComputeDtype, LinkProfile, Mode, Options, StrategyName
from tests.factory import PLAN, cell

CELLS = matrix.cells_of("auto")


@pytest.mark.parametrize("of", CELLS, ids=lambda of: of.id)
def test_json_gives_the_same_cell_back(of):
    assert jsonfile.parse(jsonfile.dumps(of), Cell, source="cell") == of


@pytest.mark.parametrize("of", CELLS, ids=lambda of: of.id)
def test_id_holds_each_axis_and_is_a_file_name(of):
    strategy, size, mode, ranks, link = of.id.split("-")
    assert (strategy, size, mode, link) == (of.strategy, of.size, of.mode, of.link)
    assert math.prod(map(int, ranks.removeprefix("w").split("x"))) == of.world_size
    assert ("x" in ranks) is (of.strategy in (StrategyName.HSDP, StrategyName.CP_USP))
    assert re.fullmatch(r"[a-z0-9._-]+", of.id)


def test_id_of_a_cell():
    of = cell(StrategyName.FSDP2, size="0.6b", mode=Mode.COMPILE, world_size=8, link=LinkProfile.NO_P2P)
    assert of.id == "fsdp2-0.6b-compile-w8-no_p2p"


@pytest.mark.parametrize(
    "change",
    [
        {"strategy": StrategyName.FSDP2},
        {"size": "0.6b"},
        {"mode": Mode.COMPILE},
        {"world_size": 4},
        {"link": LinkProfile.NATIVE},
    ],
    ids=lambda change: next(iter(change)),
)
def test_each_axis_changes_the_id(change):
    assert cell(**change).id != cell().id


def test_options_and_label_end_the_id_and_degrees_tell_several_axes():
    options = Options(activation_checkpointing=True, optimizer_state=ComputeDtype.BFLOAT16, clip_norm=1.0)
    of = replace(cell(StrategyName.HSDP, world_size=8), options=options, degrees=(4, 2), label="tuned")
    assert of.id == "hsdp-tiny-eager-w4x2-gloo-ac+bf16state+clip1-tuned"
    assert replace(of, degrees=()).id == "hsdp-tiny-eager-w2x4-gloo-ac+bf16state+clip1-tuned"
    assert replace(cell(StrategyName.TP_SP), options=Options(async_tp=True)).id == "tp_sp-tiny-eager-w2-gloo-async"
    assert (of.variant, cell().variant) == ("hsdp 4x2 ac+bf16state+clip1 tuned", "ddp")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"variables": (("NCCL_ALGO", "Tree"),)}, r"variables \(NCCL_ALGO\) needs a label"),
        ({"label": "a-b"}, "only small letters"),
        ({"label": "../x"}, "only small letters"),
    ],
)
def test_cell_that_its_name_could_not_tell_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        replace(cell(), **change)


def test_workload_is_not_part_of_the_id():
    assert cell(micro_batch=4).id == cell(micro_batch=2).id


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"speed": 1}, "speed"),
        ({"size": "9b"}, "unknown size '9b'; known: tiny, 0.6b"),
        ({"strategy": "zero9"}, "zero9"),
        ({"mode": "fast"}, "fast"),
        ({"link": "carrier_pigeon"}, "carrier_pigeon"),
        ({"world_size": "2"}, "world_size"),
        ({"workload": {}}, "workload"),
    ],
    ids=str,
)
def test_what_is_not_a_cell_is_refused_by_name(change, named):
    with pytest.raises(ValueError, match=re.escape(named)):
        jsonfile.convert(msgspec.to_builtins(cell()) | change, Cell, source="cell")


def test_unknown_size_lists_all_known_sizes():
    with pytest.raises(ValueError, match="unknown size '70b'") as caught:
        msgspec.structs.replace(cell(), size="70b")
    assert all(size in str(caught.value) for size in SIZES)


@pytest.mark.parametrize(
    ("link", "device_kind"), [(LinkProfile.GLOO, "cpu"), (LinkProfile.NATIVE, "cuda"), (LinkProfile.NO_P2P, "cuda")]
)
def test_link_decides_the_device(link, device_kind):
    assert cell(link=link).device_kind == device_kind


@pytest.mark.parametrize("bad", [{"warmup_steps": 0}, {"runs": 0}, {"timed_steps": -1}], ids=str)
def test_plan_without_evidence_is_refused(bad):
    with pytest.raises(ValueError, match="a plan needs at least"):
        SamplingPlan(**bad)


def recipe(**changes: object) -> Recipe:
    """Of the usual cell, with fields of the workload or of the plan changed."""
    of = cell()
    of_workload = {name: value for name, value in changes.items() if name in of.workload.__struct_fields__}
    of_plan = {name: value for name, value in changes.items() if name not in of_workload}
    of = msgspec.structs.replace(of, workload=msgspec.structs.replace(of.workload, **of_workload))
    return of.recipe(msgspec.structs.replace(PLAN, **of_plan))


@pytest.mark.parametrize(
    ("changes", "differences"),
    [
        ({}, []),
        ({"runs": 7}, []),
        ({"micro_batch": 4}, ["micro_batch: 2 -> 4"]),
        ({"sequences": 16}, ["sequences: 8 -> 16"]),
        ({"sequence_length": 128}, ["sequence_length: 64 -> 128"]),
        ({"learning_rate": 0.5}, ["learning_rate: 0.001 -> 0.5"]),
        ({"seed": 1}, ["seed: 0 -> 1"]),
        ({"compute_dtype": ComputeDtype.BFLOAT16}, ["compute_dtype: float32 -> bfloat16"]),
        ({"warmup_steps": 6}, ["warmup_steps: 5 -> 6"]),
        ({"timed_steps": 11}, ["timed_steps: 10 -> 11"]),
        ({"checkpoint": "/anywhere/step-100"}, ["weights: seeded -> step-100"]),
        ({"micro_batch": 1, "timed_steps": 2}, ["micro_batch: 2 -> 1", "timed_steps: 10 -> 2"]),
    ],
    ids=str,
)
def test_recipe_differences_are_named_old_to_new(changes, differences):
    assert recipe().differences(recipe(**changes)) == differences


def test_checkpoint_counts_by_its_name_wherever_it_lies():
    assert recipe(checkpoint="/a/step-100") == recipe(checkpoint="/b/step-100")
    assert recipe(checkpoint="/a/step-100") != recipe(checkpoint="/a/step-200")


@pytest.mark.parametrize(("mode", "least"), [(Mode.EAGER, 10), (Mode.COMPILE, 10), (Mode.CUDAGRAPH, 19)])
def test_gpu_warms_up_longer_than_planned(mode, least):
    """Five ordinary steps, or eleven and three replays, and five to settle; a longer plan holds."""
    short, long = SamplingPlan(), SamplingPlan(warmup_steps=20)
    on_gpu = cell(mode=mode, link=LinkProfile.NATIVE)
    assert on_gpu.plan(short).warmup_steps == least
    assert on_gpu.plan(on_gpu.plan(short)) == on_gpu.plan(short)
    assert on_gpu.plan(long) == long


def test_cpu_warms_up_as_planned():
    assert cell(mode=Mode.COMPILE).plan(SamplingPlan()) == SamplingPlan()


@pytest.mark.parametrize(
    ("mode", "warmup_steps", "settling"),
    [
        (Mode.EAGER, 1, 0), (Mode.EAGER, 5, 0), (Mode.COMPILE, 6, 1), (Mode.COMPILE, 10, 5), (Mode.EAGER, 30, 5),
        (Mode.CUDAGRAPH, 2, 0), (Mode.CUDAGRAPH, 15, 1), (Mode.CUDAGRAPH, 20, 5),
    ],
)  # fmt: skip
def test_warm_up_pauses_before_the_steps_that_settle(mode, warmup_steps, settling):
    assert cell(mode=mode, link=LinkProfile.NATIVE).settling_steps(SamplingPlan(warmup_steps=warmup_steps)) == settling


@pytest.mark.parametrize("warmup_steps", [5, 15, 17, 30])
def test_what_is_probed_and_ends_before_the_pause_of_a_captured_cell_are_replays(warmup_steps):
    """The first replay, which loads the graph's kernels, is neither; the step before a pause tells an ordinary time."""
    captured = cell(mode=Mode.CUDAGRAPH, link=LinkProfile.NATIVE)
    plan = captured.plan(SamplingPlan(warmup_steps=warmup_steps))
    pause = plan.warmup_steps - captured.settling_steps(plan)
    assert STEPS_BEFORE_CAPTURE < captured.probed_step(plan) < pause - 1


def test_the_last_step_but_one_is_probed_where_none_settles():
    assert cell(mode=Mode.COMPILE).probed_step(SamplingPlan(warmup_steps=5)) == 3
