"""Every strategy computes what the unsharded model computes: logits, loss, every gradient, updated parameters."""

import statistics
from typing import Any

import pytest
from msgspec.structs import replace
from torch import nn

from perf.measure.launch import Launcher
from strategies.fully_sharded import units
from strategies.shapes import SIZES
from strategies.spec import AXES, STAGES_PER_RANK, ComputeDtype, LossKind, Mode, Options, StrategyName
from tests.equivalence import EXPERTS, UPDATES, Case, Distances
from tests.low_precision import Errors

pytestmark = pytest.mark.usefixtures("sound_collectives")
# Bounds hold with room: rounding stays two orders below them, real mistakes lie ten orders above.
BOUNDS = {
    "float64": {"logits": 1e-12, "loss": 1e-12, "gradients": 1e-12},
    "float32": {"logits": 5e-6, "loss": 5e-6, "gradients": 2e-5},
}
UPDATED_FLOAT64 = 1e-10
"""After two updates, which only float64 makes."""
NUM_RANKS = {strategy: 2 ** len(AXES[strategy]) for strategy in StrategyName} | {StrategyName.SINGLE: 1}
NUM_LAYERS = {
    strategy: 2 * STAGES_PER_RANK[strategy] + 1 if strategy in STAGES_PER_RANK else 2 for strategy in StrategyName
}
"""Of pipelines on two ranks, one more than stages, so that they are cut unevenly."""
DATA_PARALLEL = [StrategyName.DDP, StrategyName.ZERO1, StrategyName.ZERO2, StrategyName.FSDP2, StrategyName.HSDP]


def small_case(strategy: StrategyName, *, tied: bool = True, **settings: Any) -> Case:
    """On as few ranks and layers as the strategy can have."""
    changes = {"num_layers": NUM_LAYERS[strategy], "tied_embeddings": tied}
    return Case(strategy=strategy, world_size=NUM_RANKS[strategy], changes=changes, **settings)


def distances(launcher: Launcher, case: Case) -> list[Distances]:
    records, teardown_hang = launcher.run(
        "tests.equivalence:compare", case, world_size=case.world_size, record=Distances, deadline_s=120.0
    )
    assert not teardown_hang
    return records


def faults(records: list[Distances], case: Case) -> list[str]:
    """Every way in which a strategy is not the unsharded model."""
    found = [f"rank {record.rank}: {record.odd_names} on one side only" for record in records if record.odd_names]
    bounds = BOUNDS[case.dtype] | {"gradient_norm": BOUNDS[case.dtype]["gradients"]}
    if case.dtype == "float64":
        bounds["parameters"] = bounds["later"] = UPDATED_FLOAT64
    for record in records:
        for field, bound in bounds.items():
            if not getattr(record, field) <= bound:
                found.append(
                    f"rank {record.rank}: {field} {getattr(record, field):.2g} > {bound:g} {record.worst_gradient}"
                )
    if sum(record.owned_numel for record in records) != case.layout.shape.num_parameters:
        found.append(
            f"the ranks own {[record.owned_numel for record in records]}, not {case.layout.shape.num_parameters}"
        )
    return found


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("strategy", StrategyName)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_strategy_equals_unsharded_model(launcher, strategy, dtype, tied):
    case = small_case(strategy, dtype=dtype, tied=tied)
    records = distances(launcher, case)
    assert not faults(records, case)
    # Layers of 11 tensors each, the embedding, the last norm, and the head where it is not tied.
    assert {record.num_gradients for record in records} == {11 * NUM_LAYERS[strategy] + (2 if tied else 3)}
    assert UPDATES == 2


def test_units_of_several_layers_and_a_shorter_last_one_change_nothing(launcher):
    case = Case(strategy=StrategyName.FSDP2, world_size=2, changes={"num_layers": 5})
    assert [len(unit) for unit in units([nn.Linear(8, 8) for _ in range(case.layout.shape.num_layers)])] == [2, 2, 1]
    assert not faults(distances(launcher, case), case)


@pytest.mark.parametrize(("size", "layers_per_unit"), [("tiny", 2), ("0.6b", 4), ("1.7b", 1), ("4b", 1), ("8b", 1)])
def test_units_gather_enough_for_the_link_and_more_than_one_is_left(size, layers_per_unit):
    shape = SIZES[size]
    layer_numel = (shape.num_parameters - shape.vocab_size * shape.hidden_size) // shape.num_layers
    layers = [nn.Linear(layer_numel, 1, bias=False, device="meta") for _ in range(shape.num_layers)]
    cut = units(layers)
    assert [layer for unit in cut for layer in unit] == layers
    assert {len(unit) for unit in cut} == {layers_per_unit}


@pytest.mark.parametrize("strategy", DATA_PARALLEL)
def test_rank_without_a_label_token_changes_nothing(launcher, strategy):
    case = Case(strategy=strategy, world_size=NUM_RANKS[strategy], masked_sequences=(4, 5, 6, 7), masked_positions=(2,))
    assert not faults(distances(launcher, case), case)


OPTIONS = {
    "checkpointed": Options(activation_checkpointing=True),
    "clipped": Options(clip_norm=0.5),
    "bfloat16 state": Options(optimizer_state=ComputeDtype.BFLOAT16),
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("strategy", StrategyName)
def test_options_change_nothing_else(launcher, strategy, options):
    case = small_case(strategy, options=options)
    assert not faults(distances(launcher, case), case)


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("strategy", StrategyName)
def test_chunked_loss_changes_nothing(launcher, strategy, dtype):
    """With a rank whose last chunk is a short one: chunks are made of 7 tokens here, a micro-batch has 32."""
    case = small_case(strategy, dtype=dtype, loss=LossKind.CHUNKED)
    assert not faults(distances(launcher, case), case)


@pytest.mark.parametrize("strategy", StrategyName)
def test_bfloat16_is_no_further_from_float32_than_that_of_the_unsharded_model(launcher, strategy):
    """Measured, not assumed: rounding errors of the same size, tensor by tensor, though not the same ones."""
    case = small_case(strategy, compute_dtype=ComputeDtype.BFLOAT16)
    if strategy is StrategyName.EP:
        # Every expert for each token: rounding that makes a router choose another expert is no small error.
        case = replace(case, changes=case.changes | {"experts_per_token": EXPERTS["num_experts"]})
    records, _ = launcher.run(
        "tests.low_precision:compare", case, world_size=case.world_size, record=Errors, deadline_s=120.0
    )
    for record in records:
        assert 1e-4 < record.unsharded["logits"] < 0.1
        ratios = {name: error / record.unsharded[name] for name, error in record.sharded.items()}
        assert max(ratios.values()) < 2.5, max(ratios, key=ratios.__getitem__)
        assert statistics.median(ratios.values()) < 1.3


def test_compiled_strategy_equals_unsharded_model(launcher):
    case = Case(strategy=StrategyName.FSDP2, world_size=2, mode=Mode.COMPILE, dtype="float32", loss=LossKind.CHUNKED)
    assert not faults(distances(launcher, case), case)


@pytest.mark.parametrize("strategy", DATA_PARALLEL)
def test_wrong_gradient_scale_is_found_where_the_loss_is_right(launcher, strategy):
    case = Case(strategy=strategy, world_size=NUM_RANKS[strategy], mistake="gradients twice too large")
    records = distances(launcher, case)
    found = faults(records, case)
    assert any("gradients" in fault for fault in found)
    assert all(record.gradients == pytest.approx(1.0, abs=0.1) for record in records)
    assert all(record.loss < 1e-4 for record in records)
