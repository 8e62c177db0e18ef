"""Where a pipeline is cut: decoder layers into stages by their cost, and stages onto ranks. No torch."""

import itertools

from strategies.shapes import ModelShape
from strategies.spec import STAGES_PER_RANK, StrategyName

V_SHAPED = frozenset({StrategyName.PP_ZBV, StrategyName.PP_DUALPIPEV})
"""Schedules that place the stages in a V: down over the ranks and up again."""


def cut(shape: ModelShape, num_stages: int, *, sequence_length: int = 0) -> tuple[range, ...]:
    """The decoder layers of each stage: contiguous, each exactly once, at least one a stage.

    The costliest stage is as cheap as it can be, for it sets the pace of all; among such cuts the most even one. Layers
    are all alike and only the last stage has something beside them, the head, so every size of the last stage is tried
    and the other layers are spread evenly. Layers left over go to later stages: early ones keep more microbatches.

    Args:
        sequence_length: tokens of a sequence, for the products of attention; 0 counts the weights' products alone.

    Raises:
        ValueError: fewer layers than stages.
    """
    if not 1 <= num_stages <= shape.num_layers:
        raise ValueError(f"{shape.num_layers} layers cannot fill {num_stages} stages; choose at most one a layer")
    layer, head = layer_cost(shape, sequence_length), head_cost(shape)
    sizes = min(
        ((*_spread(shape.num_layers - last, num_stages - 1), last) for last in _last_sizes(shape, num_stages)),
        key=lambda sizes: _unevenness(sizes, layer, head),
    )
    borders = [sum(sizes[:stage]) for stage in range(num_stages + 1)]
    return tuple(range(first, end) for first, end in itertools.pairwise(borders))


def layer_cost(shape: ModelShape, sequence_length: int) -> int:
    """Multiply-adds of a decoder layer's products for one token, forward: its matrices, and causal attention.

    A token attends to half a sequence on average, once for the scores and once for the values.
    """
    query, key_value = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    intermediate = shape.intermediate_size * max(1, shape.experts_per_token)
    matrices = shape.hidden_size * (2 * query + 2 * key_value + 3 * intermediate + shape.num_experts)
    return matrices + sequence_length * query


def head_cost(shape: ModelShape) -> int:
    """Multiply-adds of the head for one token, forward.

    Head and layers alike are multiplied three times a step (forward, and twice in backward), which cancels; looking up
    embeddings multiplies nothing.
    """
    return shape.vocab_size * shape.hidden_size


def stages_of_rank(schedule: StrategyName, rank: int, degree: int) -> tuple[int, ...]:
    """Global indices of the stages that a rank of the pipeline holds, ascending.

    In a V, rank r holds stages r and 2 x degree - 1 - r; else every degree-th one from r on.
    """
    if schedule in V_SHAPED:
        return (rank, 2 * degree - 1 - rank)
    return tuple(range(rank, degree * STAGES_PER_RANK[schedule], degree))


def _last_sizes(shape: ModelShape, num_stages: int) -> range:
    """Numbers of layers that the last stage can have."""
    return (
        range(1, shape.num_layers - num_stages + 2) if num_stages > 1 else range(shape.num_layers, shape.num_layers + 1)
    )


def _spread(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """As even as it goes, the larger ones last."""
    return tuple(
        num_layers * (stage + 1) // num_stages - num_layers * stage // num_stages for stage in range(num_stages)
    )


def _unevenness(sizes: tuple[int, ...], layer: int, head: int) -> tuple[int, int]:
    costs = [*(size * layer for size in sizes[:-1]), sizes[-1] * layer + head]
    return max(costs), sum(cost * cost for cost in costs)
