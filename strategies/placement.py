"""Which rank stands where in a layout, who shares what with whom, what each holds: for any number of ranks. No torch.

Ranks are numbered along the axes of `product.MESH_AXES`, the innermost, `tp`, fastest. So neighbours share a tensor,
then come the positions of a sequence, then the stages; ranks that only share gradients are furthest apart.
"""

import itertools
import math

from strategies.layout import Layout
from strategies.spec import CONTEXT_AXES, DATA_AXES, StrategyName
from strategies.stages import cut, stages_of_rank
from strategies.value import Value


class Holding(Value, frozen=True, kw_only=True):
    """What one rank holds of the model and sees of the batch."""

    rank: int
    coordinates: dict[str, int]
    """Axis -> place along it."""
    layers: tuple[int, ...]
    """Decoder layers of its stages; fully sharded, a part of each."""
    has_embedding: bool
    has_head: bool
    query_heads: range
    key_heads: range
    vocabulary: range
    """Rows of the embedding and the head."""
    sequences: range
    """Of the global batch."""
    positions: tuple[range, ...]
    """Of each sequence, in the rank's order."""
    experts: range
    """Of each layer; none where the model has none."""
    shards: int
    """Ranks over which its parameters, gradients and moments are cut once more, all but those of the experts."""
    expert_shards: int
    """The same of its experts, where they are spread: with the ranks that hold the same ones."""


def coordinates(layout: Layout, rank: int) -> dict[str, int]:
    """Axis -> this rank's place along it."""
    found, rest = {}, rank
    for axis, degree in reversed(layout.axes.items()):
        rest, found[axis] = divmod(rest, degree)
    return {axis: found[axis] for axis in layout.axes}


def groups(layout: Layout, *axes: str) -> tuple[tuple[int, ...], ...]:
    """The groups of ranks that differ along these axes alone, each in rank order, sorted by their first ranks.

    Raises:
        ValueError: the layout has no such axis.
    """
    if unknown := [axis for axis in axes if axis not in layout.axes]:
        raise ValueError(f"`{layout.strategy}` has no axis {unknown[0]}; it has {', '.join(layout.axes)}")
    found: dict[tuple[int, ...], list[int]] = {}
    for rank in range(layout.world_size):
        place = coordinates(layout, rank)
        found.setdefault(tuple(at for axis, at in place.items() if axis not in axes), []).append(rank)
    return tuple(tuple(ranks) for ranks in found.values())


def holding(layout: Layout, rank: int) -> Holding:
    """What a rank of a layout holds that no rule refuses."""
    shape, workload, at = layout.shape, layout.workload, coordinates(layout, rank)
    tensor = (at.get("tp", 0), layout.degree("tp"))
    pipeline = layout.part("pipeline")
    stages = stages_of_rank(pipeline, at["pp"], layout.degree("pp")) if pipeline else (0,)
    layers = cut(shape, layout.num_stages, sequence_length=workload.sequence_length)
    data = 0
    for axis, degree in layout.axes.items():
        data = data * degree + at[axis] if axis in DATA_AXES else data
    return Holding(
        rank=rank,
        coordinates=at,
        layers=tuple(itertools.chain.from_iterable(layers[stage] for stage in stages)),
        has_embedding=0 in stages,
        has_head=layout.num_stages - 1 in stages,
        query_heads=_piece(shape.num_heads, *tensor),
        key_heads=_piece(shape.num_kv_heads, *tensor),
        vocabulary=_piece(shape.vocab_size, *tensor),
        sequences=_piece(workload.sequences, data, layout.data_degree),
        positions=_positions(layout, at),
        experts=_piece(shape.num_experts, at.get("ep", 0), layout.degree("ep")),
        shards=_num_shards(layout, {"dp", "dp_shard", "ep"} | CONTEXT_AXES),
        expert_shards=_num_shards(layout, {"dp", "dp_shard"} | CONTEXT_AXES),
    )


def _positions(layout: Layout, at: dict[str, int]) -> tuple[range, ...]:
    """As `context_index` has them: of the two chunks of a ring's zigzag, or of the whole, a Ulysses rank's piece."""
    length, ring, ulysses = layout.workload.sequence_length, layout.degree("ring"), layout.degree("ulysses")
    chunks = [range(length)]
    if ring > 1:
        chunks = [_piece(length, index, 2 * ring) for index in (at["ring"], 2 * ring - 1 - at["ring"])]
    piece, found, begun = _piece(sum(map(len, chunks)), at.get("ulysses", 0), ulysses), [], 0
    for chunk in chunks:
        mine = chunk[max(0, piece.start - begun) : max(0, piece.stop - begun)]
        found += [mine] if mine else []
        begun += len(chunk)
    return tuple(found)


def _num_shards(layout: Layout, axes: set[str]) -> int:
    data = layout.part("data")
    # What is no expert is replicated over the ranks of `ep`, unless a data part shards it.
    if data in {StrategyName.SINGLE, StrategyName.DDP, StrategyName.ZERO1} or (data is None and "ep" in layout.axes):
        return 1
    return math.prod(degree for axis, degree in layout.axes.items() if axis in axes)


def _piece(whole: int, index: int, count: int) -> range:
    """One of `count` equal pieces."""
    size = whole // count
    return range(index * size, (index + 1) * size)
