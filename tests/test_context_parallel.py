"""Context parallelism on the whole model: packed documents, ranks without labels, and who sees whom."""

import pytest

from strategies.spec import StrategyName
from tests.equivalence import Case, Probe
from tests.test_equivalence import NUM_RANKS, distances, faults

pytestmark = pytest.mark.usefixtures("sound_collectives")
CONTEXT = [StrategyName.CP_ULYSSES, StrategyName.CP_RING, StrategyName.CP_USP]
LENGTH = 16


def probe(launcher, strategy, *, changed, packed=False, mistake=""):
    """Positions of the last sequence whose logits move when one token does, over all ranks."""
    case = Case(strategy=strategy, world_size=NUM_RANKS[strategy], packed=packed, mistake=mistake)
    records, _ = launcher.run(
        "tests.equivalence:perturb",
        {"case": case, "changed": changed},
        world_size=case.world_size,
        record=Probe,
        deadline_s=60.0,
    )
    return sorted(position for record in records for position in record.moved)


@pytest.mark.parametrize("strategy", CONTEXT)
def test_packed_documents_change_nothing(launcher, strategy):
    case = Case(strategy=strategy, world_size=NUM_RANKS[strategy], packed=True)
    assert not faults(distances(launcher, case), case)


@pytest.mark.parametrize("strategy", CONTEXT)
def test_rank_whose_positions_have_no_label_changes_nothing(launcher, strategy):
    """The last half or the last quarter: all of Ulysses' last rank, a chunk of everybody in a zigzag."""
    case = Case(strategy=strategy, world_size=NUM_RANKS[strategy], masked_positions=tuple(range(LENGTH // 2, LENGTH)))
    assert not faults(distances(launcher, case), case)


@pytest.mark.parametrize("changed", [0, 7, LENGTH - 1])
@pytest.mark.parametrize("strategy", [StrategyName.SINGLE, *CONTEXT])
def test_token_is_seen_by_itself_and_all_later_positions_on_whatever_rank(launcher, strategy, changed):
    assert probe(launcher, strategy, changed=changed) == list(range(changed, LENGTH))


@pytest.mark.parametrize("strategy", [StrategyName.SINGLE, *CONTEXT])
def test_token_of_a_packed_document_is_seen_by_no_other_document(launcher, strategy):
    """The second document of the last sequence begins at position 2."""
    assert probe(launcher, strategy, changed=0, packed=True) == [0, 1]
    assert probe(launcher, strategy, changed=5, packed=True) == list(range(5, LENGTH))


@pytest.mark.parametrize("strategy", CONTEXT)
def test_attention_to_the_own_shard_alone_is_seen_by_the_probe(launcher, strategy):
    moved = probe(launcher, strategy, changed=0, mistake="attends to its own positions alone")
    assert moved != list(range(LENGTH))


@pytest.mark.parametrize(
    ("mistake", "told"),
    [
        ("attends to its own positions alone", "logits"),
        ("counts positions from its own first", "logits"),
        ("labels of the next position it holds", "loss"),
        ("gradients of its own positions alone", "gradients"),
    ],
)
@pytest.mark.parametrize("strategy", [StrategyName.CP_ULYSSES, StrategyName.CP_RING])
def test_mistake_is_found(launcher, strategy, mistake, told):
    case = Case(strategy=strategy, world_size=2, mistake=mistake)
    assert any(f": {told} " in fault for fault in faults(distances(launcher, case), case))
