"""Room strategies/rules.py: every reason to refuse a layout, said with the numbers and the cure."""

import msgspec
import pytest

from perf.facts.matrix import node, smoke
from strategies.layout import Layout, default_workload
from strategies.rules import RULES, refusal
from strategies.shapes import SIZES
from strategies.spec import LinkProfile, Mode, Options, StrategyName

LAYOUT = ("shape", "mode", "link", "options", "degrees")


def layout(strategy: StrategyName, world_size: int, **changes: object) -> Layout:
    """Of size tiny with its default workload; changes of the layout or of the workload."""
    own = {name: value for name, value in changes.items() if name in LAYOUT}
    others = {name: value for name, value in changes.items() if name not in LAYOUT}
    workload = msgspec.structs.replace(default_workload("tiny", strategy, max(1, world_size)), **others)
    whole = {"shape": SIZES["tiny"], **own}
    return Layout(strategy=strategy, world_size=world_size, workload=workload, **whole)


REFUSED = {
    "no rank": (layout(StrategyName.DDP, 0), ["at least 1", "world size 0"]),
    "no sequence": (layout(StrategyName.DDP, 2, sequences=0), ["at least 1", "sequences 0"]),
    "no token": (layout(StrategyName.DDP, 2, sequence_length=0), ["at least 1", "sequence length 0"]),
    "negative micro-batch": (layout(StrategyName.DDP, 2, micro_batch=-1), ["at least 1", "micro-batch -1"]),
    "all that is not positive": (
        layout(StrategyName.DDP, -1, micro_batch=0),
        ["at least 1", "world size -1, micro-batch 0"],
    ),
    "experts where there are none": (layout(StrategyName.EP, 2), ["this size has none", "such as tiny_moe, a3b"]),
    "captured on CPUs": (
        layout(StrategyName.DDP, 2, mode=Mode.CUDAGRAPH),
        ["a CUDA graph is captured on a GPU", "use compile, or link native"],
    ),
    "single on 2 ranks": (layout(StrategyName.SINGLE, 2), ["on 1 rank, not 2", "use `ddp`"]),
    "ddp on 1 rank": (layout(StrategyName.DDP, 1), ["`ddp` over dp 1", "at least 2 ranks"]),
    "fsdp2 on 1 rank": (layout(StrategyName.FSDP2, 1), ["`fsdp2` over dp 1", "at least 2 ranks"]),
    "micro-batch too large": (
        layout(StrategyName.DDP, 2, micro_batch=3),
        ["8 sequences", "data degree 2 x micro-batch 3 = 6", "a micro-batch that divides 8 / 2 = 4"],
    ),
    "batch smaller than the ranks' micro-batches": (
        layout(StrategyName.FSDP2, 2, sequences=2),
        ["2 sequences", "data degree 2 x micro-batch 2 = 4", "a micro-batch that divides 2 / 2 = 1"],
    ),
    "ranks that do not divide the batch": (
        layout(StrategyName.DDP, 3),
        ["8 sequences", "data degree 3 x micro-batch 2 = 6", "a number of sequences that data degree 3 divides"],
    ),
    "hsdp on 2 ranks": (layout(StrategyName.HSDP, 2), ["dp_replicate 1 x dp_shard 2", "at least 4 ranks, 2 an axis"]),
    "degrees that do not multiply": (
        layout(StrategyName.HSDP, 4, degrees=(2, 3)),
        ["one degree for each of dp_replicate, dp_shard", "the world size 4, not 2 x 3"],
    ),
    "one degree for two axes": (layout(StrategyName.CP_USP, 4, degrees=(4,)), ["each of ring, ulysses", "not 4"]),
    "tp over too many ranks": (
        layout(StrategyName.TP, 4),
        ["kv heads 2 do not divide by tensor degree 4", "choose a divisor of 2"],
    ),
    "tp over 3 ranks": (
        layout(StrategyName.TP, 3),
        ["heads 4 and kv heads 2 and vocabulary 512 do not divide by tensor degree 3"],
    ),
    "sequence over tp_sp": (
        layout(StrategyName.TP_SP, 2, sequence_length=63),
        ["sequence length 63 do not divide by tensor degree 2"],
    ),
    "zigzag": (
        layout(StrategyName.CP_RING, 2, sequence_length=62),
        ["the sequence length 62 to divide by 2 x ring 2 x ulysses 1 = 4"],
    ),
    "sequence over ulysses": (
        layout(StrategyName.CP_ULYSSES, 2, sequence_length=63),
        ["sequence length 63 do not divide by ulysses degree 2"],
    ),
    "heads over ulysses": (
        layout(StrategyName.CP_ULYSSES, 8),
        ["4 heads do not divide by ulysses degree 8", "choose a divisor of 4"],
    ),
    "kv heads over ulysses": (
        layout(StrategyName.CP_ULYSSES, 4, shape=msgspec.structs.replace(SIZES["tiny"], num_kv_heads=3)),
        ["3 kv heads can be neither cut nor repeated over ulysses degree 4"],
    ),
    "more stages than layers": (
        layout(StrategyName.PP_ZBV, 4, micro_batch=1),
        ["4 layers cannot fill 4 ranks x 2 stages = 8", "at most 2 ranks"],
    ),
    "1f1b with too few microbatches": (
        layout(StrategyName.PP_1F1B, 4, micro_batch=4),
        ["2 microbatches are too few for 1F1B on 4 stages", "at least 4"],
    ),
    "interleaving with a broken round": (
        layout(StrategyName.PP_INTERLEAVED, 2, sequences=5, micro_batch=1),
        ["5 microbatches do not fall into 2 equal rounds", "a multiple of 2"],
    ),
    "dualpipev with too few microbatches": (
        layout(StrategyName.PP_DUALPIPEV, 2, micro_batch=4),
        ["2 microbatches are too few for DualPipeV on 4 stages"],
    ),
    "zero bubble compiled": (
        layout(StrategyName.PP_ZBV, 2, mode=Mode.COMPILE),
        ["wrong gradients without a word", "use eager, or `pp_interleaved`"],
    ),
    "async ddp": (
        layout(StrategyName.DDP, 2, options=Options(async_tp=True)),
        ["async TP splits the products of `tp_sp`, not of `ddp`"],
    ),
    "async eager": (
        layout(StrategyName.TP_SP, 2, options=Options(async_tp=True)),
        ["does nothing in eager mode", "use mode compile"],
    ),
    "async without peers": (
        layout(StrategyName.TP_SP, 2, mode=Mode.COMPILE, link=LinkProfile.NO_P2P, options=Options(async_tp=True)),
        ["link no_p2p switches off", "use link native"],
    ),
    "negative clip": (layout(StrategyName.DDP, 2, options=Options(clip_norm=-1.0)), ["norm -1", "a positive one"]),
}


ALLOWED = {
    "hsdp 2 x 2": layout(StrategyName.HSDP, 4),
    "hsdp 4 x 2": layout(StrategyName.HSDP, 8, micro_batch=1, degrees=(4, 2)),
    "kv heads repeated over ulysses": layout(StrategyName.CP_ULYSSES, 4),
    "usp 2 x 2": layout(StrategyName.CP_USP, 4),
    "zbv on as many stages as layers": layout(StrategyName.PP_ZBV, 2),
    "interleaving with fewer microbatches than ranks": layout(StrategyName.PP_INTERLEAVED, 2, micro_batch=8),
    "async on a CPU": layout(StrategyName.TP_SP, 2, mode=Mode.COMPILE, options=Options(async_tp=True)),
}


@pytest.mark.parametrize("case", ALLOWED)
def test_what_can_be_cut_is_not_refused(case):
    assert refusal(ALLOWED[case]) is None


@pytest.mark.parametrize(("degree", "is_refused"), [(2, False), (4, False), (3, True), (16, True)])
def test_ulysses_cuts_8_heads_and_repeats_2_kv_heads(degree, is_refused):
    shape = msgspec.structs.replace(SIZES["tiny"], num_heads=8, num_kv_heads=2)
    refused = refusal(layout(StrategyName.CP_ULYSSES, degree, shape=shape, sequence_length=48))
    assert (refused is not None) is is_refused


@pytest.mark.parametrize("of", [*smoke(), *node()], ids=lambda of: of.id)
def test_no_cell_of_the_matrices_is_refused(of):
    assert refusal(of.layout) is None


@pytest.mark.parametrize("case", REFUSED)
def test_refusal_says_the_numbers_and_the_cure(case):
    refused, parts = REFUSED[case]
    message = refusal(refused)
    assert message is not None
    assert [part for part in parts if part not in message] == []


def test_every_rule_refuses_something():
    silent = [
        rule.__name__
        for rule in RULES
        if not any(rule(refused) for refused, _ in REFUSED.values() if has_axes(refused))
    ]
    assert silent == ["_positive", "_degrees"]
    assert RULES[0](REFUSED["no rank"][0])
    assert RULES[2](REFUSED["hsdp on 2 ranks"][0])


def has_axes(cut: Layout) -> bool:
    """The later rules divide by degrees: they may only be asked when the first ones have nothing to say."""
    return RULES[0](cut) is None and RULES[2](cut) is None


def test_first_rule_is_said_first():
    message = refusal(layout(StrategyName.SINGLE, 2, micro_batch=0))
    assert message is not None
    assert "micro-batch 0" in message
    assert "unsharded" not in message
