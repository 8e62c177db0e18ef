"""Room strategies/placement.py: who stands where and holds what, on paper for 4,096 ranks, and as torch has it."""

import itertools

import msgspec
import pytest

from strategies.context_index import contiguous_index, usp_index, zigzag_index
from strategies.layout import Layout, default_workload
from strategies.placement import coordinates, groups, holding
from strategies.rules import refusal
from strategies.shapes import SIZES
from strategies.spec import StrategyName
from tests.product_ranks import Place

LARGE = {
    "dp4.tp4": 16,
    "fsdp2.tp2.pp4": 16,
    "fsdp8.tp4.pp2.ring2": 128,
    "hsdp4x8.tp8.pp2.ulysses2": 1024,
    "fsdp64.tp8.pp4.ring2": 4096,
}


def layout(strategy: str, world_size: int, size: str = "4b", **changes: int) -> Layout:
    workload = msgspec.structs.replace(default_workload(size, strategy, world_size), **changes)
    return Layout(strategy=strategy, shape=SIZES[size], world_size=world_size, workload=workload)


@pytest.mark.parametrize(
    ("strategy", "axis", "expected"),
    [
        # Four replicas of a pipeline of two ranks; of two ranks that share each matrix; two of both.
        ("dp4.pp2", "pp", ((0, 1), (2, 3), (4, 5), (6, 7))),
        ("dp4.tp2", "tp", ((0, 1), (2, 3), (4, 5), (6, 7))),
        ("dp2.tp2.pp2", "tp", ((0, 1), (2, 3), (4, 5), (6, 7))),
        ("dp2.tp2.pp2", "pp", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("dp2.tp2.pp2", "dp", ((0, 4), (1, 5), (2, 6), (3, 7))),
    ],
)
def test_groups_of_eight_ranks(strategy, axis, expected):
    assert groups(layout(strategy, 8), axis) == expected


def test_stages_of_two_replicas_with_two_ranks_a_stage():
    """Ranks 0 and 1 hold the first stage of a replica, 2 and 3 its second; 4 to 7 the other replica."""
    of = layout("dp2.tp2.pp2", 8, "0.6b")
    held = [holding(of, rank) for rank in range(8)]
    assert [(rank.has_embedding, rank.has_head) for rank in held] == [
        (True, False),
        (True, False),
        (False, True),
        (False, True),
    ] * 2
    assert held[0].layers == held[1].layers == held[4].layers
    assert sorted(held[0].layers + held[2].layers) == list(range(of.shape.num_layers))
    assert [rank.sequences for rank in held] == [range(8)] * 4 + [range(8, 16)] * 4


def test_degree_that_the_name_leaves_out_is_derived():
    assert layout("dp.tp2.pp2", 8).axes == {"dp": 2, "pp": 2, "tp": 2}
    assert "6 / (2 x 2 x 1) = 1.5" in refusal(layout("dp.tp2.pp2", 6))
    assert "= 24 / (2 x 2 x 1) = 6; name it 6" in refusal(layout("dp2.tp2.pp2", 24))


@pytest.mark.parametrize(("strategy", "world_size"), LARGE.items())
def test_every_layer_head_row_sequence_and_position_is_held_as_often_as_it_should(strategy, world_size):
    of = layout(strategy, world_size, sequences=512, micro_batch=1)
    assert refusal(of) is None
    held = [holding(of, rank) for rank in range(world_size)]
    per_stage_axis = world_size // of.degree("pp")
    assert all(sum(layer in one.layers for one in held) == per_stage_axis for layer in range(of.shape.num_layers))
    for part, whole, copies in (
        ("query_heads", of.shape.num_heads, world_size // of.degree("tp")),
        ("vocabulary", of.shape.vocab_size, world_size // of.degree("tp")),
        ("sequences", 512, world_size // of.data_degree),
    ):
        pieces = {getattr(one, part) for one in held}
        assert sorted(itertools.chain.from_iterable(pieces)) == list(range(whole))
        assert all(sum(getattr(one, part) == piece for one in held) == copies for piece in pieces)
    positions = {one.positions for one in held}
    assert sorted(itertools.chain.from_iterable(itertools.chain.from_iterable(positions))) == list(range(2048))
    for axis in of.axes:
        shared = groups(of, axis)
        assert sorted(itertools.chain.from_iterable(shared)) == list(range(world_size))
        assert {len(ranks) for ranks in shared} == {of.degree(axis)}


@pytest.mark.parametrize(
    ("strategy", "world_size", "degrees"),
    [
        ("tp2.ring4", 8, ()),
        ("tp2.ulysses4", 8, ()),
        (StrategyName.CP_USP, 8, (2, 4)),
        (StrategyName.CP_USP, 6, (3, 2)),
        (StrategyName.CP_USP, 6, (2, 3)),
    ],
)
def test_positions_are_those_that_the_ranks_index(strategy, world_size, degrees):
    of = msgspec.structs.replace(layout(strategy, world_size, "tiny", sequence_length=48), degrees=degrees)
    for rank in range(world_size):
        at = coordinates(of, rank)
        if of.degree("ring") == 1:
            index = contiguous_index(48, of.degree("ulysses"), at["ulysses"])
        elif of.degree("ulysses") == 1:
            index = zigzag_index(48, of.degree("ring"), at["ring"])
        else:
            index = usp_index(48, of.degree("ring"), at["ring"], of.degree("ulysses"), at["ulysses"])
        assert list(itertools.chain.from_iterable(holding(of, rank).positions)) == index.tolist()


def test_unknown_axis_is_refused():
    with pytest.raises(ValueError, match=r"`dp2.tp2` has no axis ring; it has dp, tp"):
        groups(layout("dp2.tp2", 4), "ring")


@pytest.mark.parametrize("strategy", ["dp2.tp2.pp2", "hsdp2x2.ring2"])
def test_ranks_stand_where_torchs_mesh_has_them(launcher, strategy):
    of = layout(strategy, 8, "tiny")
    places, _ = launcher.run("tests.product_ranks:stand", of, world_size=8, record=Place, deadline_s=60.0)
    for rank, place in enumerate(places):
        assert place.coordinates == coordinates(of, rank)
        for axis, ranks in place.groups.items():
            assert ranks in groups(of, axis)


def test_experts_are_spread_and_all_else_is_sharded_over_all_data_ranks():
    """Of 8 ranks of `fsdp4.ep2` neighbours hold other experts; four share the shards of one expert."""
    held = [holding(layout("fsdp4.ep2", 8, "tiny_moe"), rank) for rank in range(8)]
    assert [one.experts for one in held] == [range(4), range(4, 8)] * 4
    assert {(one.shards, one.expert_shards) for one in held} == {(8, 4)}
    assert {(one.shards, one.expert_shards) for one in (holding(layout("dp4.ep2", 8, "tiny_moe"), 0),)} == {(1, 1)}
    alone = holding(layout("ep", 2, "tiny_moe"), 1)
    assert (alone.experts, alone.shards, alone.expert_shards) == (range(4, 8), 1, 1)
    assert holding(layout("fsdp2.tp2", 4), 0).experts == range(0)
