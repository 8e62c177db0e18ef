"""Room strategies/shapes.py: the arithmetic of model shapes."""

import math

import msgspec
import numpy as np
import pytest

from strategies.shapes import SIZES


@pytest.mark.parametrize(
    ("size", "num_parameters"),
    [
        ("tiny", 279_360),
        ("0.6b", 596_049_920),
        ("1.7b", 1_720_574_976),
        ("4b", 4_022_468_096),
        ("8b", 8_190_735_360),
    ],
)
def test_parameter_count_is_that_of_the_released_model(size, num_parameters):
    assert SIZES[size].num_parameters == num_parameters


def test_all_layers_of_the_size_with_experts_are_the_released_model():
    assert msgspec.structs.replace(SIZES["a3b"], num_layers=48).num_parameters == 30_532_122_624


@pytest.mark.parametrize("size", SIZES)
def test_parameter_count_is_the_sum_over_the_weights_of_the_model(size):
    s = SIZES[size]
    layer = [
        (s.num_heads * s.head_dim, s.hidden_size),  # q_proj
        (s.num_kv_heads * s.head_dim, s.hidden_size),  # k_proj
        (s.num_kv_heads * s.head_dim, s.hidden_size),  # v_proj
        (s.hidden_size, s.num_heads * s.head_dim),  # o_proj
        (s.head_dim,),  # q_norm
        (s.head_dim,),  # k_norm
        *[(s.intermediate_size, s.hidden_size)] * (2 * max(1, s.num_experts)),  # gate_proj, up_proj
        *[(s.hidden_size, s.intermediate_size)] * max(1, s.num_experts),  # down_proj
        (s.num_experts, s.hidden_size),  # the router
        (s.hidden_size,),  # input_layernorm
        (s.hidden_size,),  # post_attention_layernorm
    ]
    ends = [(s.vocab_size, s.hidden_size), (s.hidden_size,)]  # embedding, final norm
    head = [] if s.tied_embeddings else [(s.vocab_size, s.hidden_size)]
    assert s.num_parameters == sum(math.prod(shape) for shape in layer * s.num_layers + ends + head)


def test_7b_has_108_gb_of_parameters_gradients_and_moments():
    assert SIZES["7b"].num_parameters == pytest.approx(6.8e9, rel=0.01)
    assert SIZES["7b"].num_parameters * 16 == pytest.approx(108e9, rel=0.01)


@pytest.mark.parametrize("size", ["tiny", "0.6b"])
def test_attention_is_wider_than_the_hidden_size(size):
    assert SIZES[size].num_heads * SIZES[size].head_dim == 2 * SIZES[size].hidden_size


@pytest.mark.parametrize(
    ("size", "tied"), [("tiny", True), ("0.6b", True), ("1.7b", True), ("7b", True), ("8b", False)]
)
def test_tying_of_embeddings(size, tied):
    assert SIZES[size].tied_embeddings is tied


@pytest.mark.parametrize(
    ("size", "expected"), [("0.6b", 12.136), ("1.7b", 12.341), ("7b", 12.750), ("8b", 12.750), ("tiny", 6.251)]
)
def test_expected_start_loss_by_formula(size, expected):
    assert SIZES[size].expected_start_loss == pytest.approx(expected, abs=5e-4)


@pytest.mark.parametrize(("size", "measured"), [("0.6b", 12.12), ("1.7b", 12.33), ("7b", 12.64), ("8b", 12.97)])
def test_start_losses_of_real_models_lie_in_the_band(size, measured):
    assert abs(SIZES[size].expected_start_loss - measured) < 0.3


def test_expected_start_loss_is_the_mean_cross_entropy_of_normal_logits():
    shape = SIZES["tiny"]
    sd = 0.02 * math.sqrt(shape.hidden_size)
    logits_SV = np.random.default_rng(0).normal(0, sd, size=(2000, shape.vocab_size))
    losses_S = np.log(np.exp(logits_SV).sum(axis=1)) - logits_SV[:, 0]
    assert float(losses_S.mean()) == pytest.approx(shape.expected_start_loss, abs=0.02)
