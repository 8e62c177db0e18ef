"""Room strategies/stages.py: every layer is in one stage, and no stage costs more than it must."""

import itertools

import msgspec
import pytest

from strategies.shapes import SIZES
from strategies.spec import STAGES_PER_RANK
from strategies.stages import V_SHAPED, cut, head_cost, layer_cost, stages_of_rank

LENGTH = 2048


def costs(shape, sizes):
    layers = [size * layer_cost(shape, LENGTH) for size in sizes]
    return [*layers[:-1], layers[-1] + head_cost(shape)]


def even(num_layers, num_stages):
    return [num_layers // num_stages + (stage < num_layers % num_stages) for stage in range(num_stages)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("num_layers", "num_stages"),
    [(1, 1), (2, 2), (4, 1), (5, 2), (5, 4), (7, 4), (28, 2), (28, 8), (28, 16), (30, 4), (36, 8), (36, 36)],
)
def test_every_layer_is_in_one_stage_and_the_costliest_stage_is_no_worse_than_of_an_even_cut(
    size, num_layers, num_stages
):
    shape = msgspec.structs.replace(SIZES[size], num_layers=num_layers)
    stages = cut(shape, num_stages, sequence_length=LENGTH)
    assert [layer for stage in stages for layer in stage] == list(range(num_layers))
    assert all(len(stage) >= 1 for stage in stages)
    assert len(stages) == num_stages
    assert max(costs(shape, map(len, stages))) <= max(costs(shape, even(num_layers, num_stages)))


@pytest.mark.parametrize("num_stages", [2, 3, 4])
@pytest.mark.parametrize("num_layers", [4, 5, 9])
def test_no_other_cut_has_a_cheaper_costliest_stage(num_layers, num_stages):
    shape = msgspec.structs.replace(SIZES["0.6b"], num_layers=num_layers)
    others = [
        max(costs(shape, sizes))
        for sizes in itertools.product(range(1, num_layers + 1), repeat=num_stages)
        if sum(sizes) == num_layers
    ]
    assert max(costs(shape, map(len, cut(shape, num_stages, sequence_length=LENGTH)))) == min(others)


def test_head_of_the_smallest_model_weighs_as_much_as_eight_layers():
    shape = SIZES["0.6b"]
    assert (shape.vocab_size, shape.hidden_size) == (151_936, 1024)
    assert head_cost(shape) / layer_cost(shape, LENGTH) == pytest.approx(7.8, abs=0.05)
    assert [len(stage) for stage in cut(shape, 2, sequence_length=LENGTH)] == [18, 10]
    assert [len(stage) for stage in cut(shape, 8, sequence_length=LENGTH)] == [3, 4, 4, 4, 4, 4, 4, 1]


def test_layer_costs_its_matrices_and_the_half_of_all_pairs_of_tokens():
    shape = SIZES["tiny"]
    matrices = shape.num_parameters - shape.vocab_size * shape.hidden_size - shape.hidden_size
    norms = 2 * shape.hidden_size + 2 * shape.head_dim
    assert layer_cost(shape, 0) == matrices / shape.num_layers - norms
    pairs = 2 * LENGTH**2 / 2  # scores and values, causal
    assert layer_cost(shape, LENGTH) - layer_cost(shape, 0) == pairs * shape.num_heads * shape.head_dim / LENGTH


@pytest.mark.parametrize("num_stages", [0, 5])
def test_fewer_layers_than_stages_are_refused(num_stages):
    with pytest.raises(ValueError, match=f"4 layers cannot fill {num_stages} stages; choose at most one a layer"):
        cut(SIZES["tiny"], num_stages)


@pytest.mark.parametrize("degree", [2, 4, 8])
@pytest.mark.parametrize("strategy", STAGES_PER_RANK)
def test_every_stage_is_on_one_rank(strategy, degree):
    placed = [stages_of_rank(strategy, rank, degree) for rank in range(degree)]
    assert sorted(itertools.chain(*placed)) == list(range(degree * STAGES_PER_RANK[strategy]))
    last = 0 if strategy in V_SHAPED else degree - 1
    assert placed[last][-1] == degree * STAGES_PER_RANK[strategy] - 1
