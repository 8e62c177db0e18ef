"""The long grid: every strategy compiled, on more ranks, and under all options at once. `make test-all` runs it."""

import pytest

from strategies.rules import refusal
from strategies.spec import AXES, STAGES_PER_RANK, ComputeDtype, LossKind, Mode, Options, StrategyName
from tests.equivalence import Case
from tests.test_equivalence import NUM_LAYERS, NUM_RANKS, distances, faults

pytestmark = [pytest.mark.usefixtures("sound_collectives"), pytest.mark.long]
ALL_OPTIONS = Options(activation_checkpointing=True, optimizer_state=ComputeDtype.BFLOAT16, clip_norm=0.5)
MANY = [strategy for strategy in StrategyName if strategy is not StrategyName.SINGLE]


def case(strategy: StrategyName, **settings: object) -> Case:
    changes = {"num_layers": NUM_LAYERS[strategy]}
    return Case(strategy=strategy, **{"world_size": NUM_RANKS[strategy], "changes": changes, **settings})


@pytest.mark.parametrize("options", [Options(), ALL_OPTIONS], ids=["plain", "options"])
@pytest.mark.parametrize("strategy", StrategyName)
def test_compiled_strategy_equals_unsharded_model(launcher, strategy, options):
    of = case(strategy, mode=Mode.COMPILE, dtype="float32", loss=LossKind.CHUNKED, options=options)
    if reason := refusal(of.layout):
        assert "wrong gradients" in reason
        return
    assert not faults(distances(launcher, of), of)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("loss", LossKind)
@pytest.mark.parametrize("strategy", StrategyName)
def test_options_together_change_nothing(launcher, strategy, loss, tied):
    changes = {"num_layers": NUM_LAYERS[strategy], "tied_embeddings": tied}
    of = case(strategy, loss=loss, options=ALL_OPTIONS, changes=changes)
    assert not faults(distances(launcher, of), of)


@pytest.mark.parametrize("micro_batch", [1, 2])
@pytest.mark.parametrize("strategy", MANY)
def test_four_ranks_equal_the_unsharded_model(launcher, strategy, micro_batch):
    """Eight where a strategy cuts along two axes; as many kv heads as tensor parallelism needs, one layer too many."""
    world_size = 4 ** len(AXES[strategy]) // len(AXES[strategy])
    changes = {"num_kv_heads": 4, "vocab_size": 100, "num_layers": 4 * STAGES_PER_RANK.get(strategy, 1) + 1}
    of = case(strategy, world_size=world_size, changes=changes, sequences=8, micro_batch=micro_batch)
    if reason := refusal(of.layout):
        assert "do not divide" in reason or "too few" in reason or "rounds" in reason
        return
    assert not faults(distances(launcher, of), of)


@pytest.mark.parametrize("micro_batch", [1, 3])
@pytest.mark.parametrize("strategy", MANY)
def test_accumulation_of_three_micro_batches_equals_one(launcher, strategy, micro_batch):
    data_degree = case(strategy).layout.data_degree
    of = case(strategy, sequences=3 * data_degree * (2 if micro_batch == 1 else 1), micro_batch=micro_batch)
    if reason := refusal(of.layout):
        assert "too few" in reason or "rounds" in reason
        return
    assert not faults(distances(launcher, of), of)
