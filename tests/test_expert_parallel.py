"""Room strategies/expert_parallel.py: spread experts are the same experts; test_equivalence takes up `ep` too."""

import msgspec
import pytest

from perf.facts.measurement import RankLedger, measure
from perf.facts.record import LedgerEntry
from perf.judge.correctness import differences
from strategies.rules import refusal
from strategies.spec import LossKind, Mode, Options
from tests.equivalence import EXPERTS, Case
from tests.expert_ranks import Load
from tests.factory import PLAN, change_ranks, invariants, run_record
from tests.test_equivalence import distances, faults

pytestmark = pytest.mark.usefixtures("sound_collectives")
FEW_TOKENS = EXPERTS | {"num_experts": 32}


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_one_and_three_micro_batches(launcher, world_size, micro_batches):
    of = Case(strategy="ep", world_size=world_size, sequences=world_size * micro_batches, micro_batch=1)
    assert of.layout.num_micro_batches == micro_batches
    assert not faults(distances(launcher, of), of)


def test_experts_without_a_token(launcher):
    """A gradient of exactly 0, neither missing nor NaN; and all others as they should be."""
    of = Case(strategy="ep", world_size=2, sequences=2, sequence_length=8, micro_batch=1, changes=FEW_TOKENS)
    loads, _ = launcher.run("tests.expert_ranks:step", of, world_size=2, record=Load, deadline_s=60.0)
    tokens = [count for load in loads for count in load.tokens]
    gradients = [gradient for load in loads for gradient in load.gradients]
    assert (sum(tokens), len(tokens)) == (32, 32)
    assert 0 in tokens
    assert [count == 0 for count in tokens] == [gradient == 0.0 for gradient in gradients]
    assert not faults(distances(launcher, of), of)


def test_group_of_data_ranks_of_size_one(launcher):
    """`ep` over all ranks: nothing is left to average an expert over."""
    of = Case(strategy="ep", world_size=2, options=Options(clip_norm=0.5))
    assert not faults(distances(launcher, of), of)


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp2", "pp_1f1b", "pp_zbv", "cp_ring", "cp_ulysses"])
def test_other_strategies_take_experts_as_they_are(launcher, strategy):
    of = Case(strategy=strategy, world_size=2, changes=EXPERTS | {"num_layers": 5}, loss=LossKind.CHUNKED)
    assert not faults(distances(launcher, of), of)


@pytest.mark.parametrize(
    ("mistake", "says"),
    [
        ("experts' gradients averaged", "gradients"),
        ("experts not weighted", "logits"),
        ("the router's gradient lost", "gradients"),
        ("the experts of another token", "logits"),
    ],
)
def test_mistake_is_found(launcher, mistake, says):
    of = Case(strategy="ep", world_size=2, mistake=mistake)
    found = faults(distances(launcher, of), of)
    assert any(says in fault for fault in found), found


@pytest.mark.parametrize(
    ("case", "says"),
    [
        (Case(strategy="ep", world_size=3), "experts 8 do not divide by expert degree 3"),
        (Case(strategy="tp", world_size=2, changes=EXPERTS), "`tp` does not cut the 8 experts"),
        (Case(strategy="ep", world_size=2, changes={"num_experts": 0}), "this size has none"),
        (Case(strategy="pp2.ep2", world_size=4), "not with the pipeline part of `pp2.ep2`"),
        (Case(strategy="ep", world_size=2, mode=Mode.CUDAGRAPH), "waits in every layer"),
    ],
)
def test_what_cannot_be_spread_is_refused(case, says):
    sequences = msgspec.structs.replace(case, sequences=12)
    assert says in refusal(sequences.layout)


ROUTED = LedgerEntry(op="all_to_all", axis="ep", dtype="float32", count=4, bytes=1000)
FIXED = LedgerEntry(op="all_reduce", axis="ep", dtype="float32", count=1, bytes=64)


@pytest.mark.parametrize(
    ("per_rank", "found"), [((1000, 1000), []), ((900, 1100), []), ((900, 1101), ["all ranks: 2,000 -> 2,001"])]
)
def test_bytes_of_routed_tokens_are_gated_as_a_sum(per_rank, found):
    recorded = msgspec.structs.replace(invariants(), ledger=(RankLedger(ranks=(0, 1), entries=(FIXED, ROUTED)),))
    run = run_record(index=0)
    ranks = tuple(
        msgspec.structs.replace(rank, ledger=(FIXED, msgspec.structs.replace(ROUTED, bytes=number)))
        for rank, number in zip(run.ranks, per_rank, strict=True)
    )
    now = measure(run.cell, PLAN, [msgspec.structs.replace(run, ranks=ranks)])
    said = [text for text in differences(now, recorded) if "all ranks" in text or "collectives" in text]
    assert len(said) == len(found)
    assert all(part in text for part, text in zip(found, said, strict=True))


def test_more_calls_of_routed_tokens_are_named():
    recorded = msgspec.structs.replace(invariants(), ledger=(RankLedger(ranks=(0, 1), entries=(ROUTED,)),))
    more = change_ranks(run_record(index=0), ledger=(msgspec.structs.replace(ROUTED, count=5),))
    assert any("4 calls" in text for text in differences(measure(more.cell, PLAN, [more]), recorded))
