"""Room strategies/spec.py: the arithmetic of model shapes, and every reason to refuse a layout."""

import math

import msgspec
import numpy as np
import pytest

from strategies.spec import RULES, SIZES, Layout, StrategyName, Workload, default_workload, refusal


def layout(strategy: StrategyName, world_size: int, size: str = "tiny", **changes: int) -> Layout:
    workload = msgspec.structs.replace(default_workload(size), **changes)
    return Layout(strategy=strategy, shape=SIZES[size], world_size=world_size, workload=workload)


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
        (s.intermediate_size, s.hidden_size),  # gate_proj
        (s.intermediate_size, s.hidden_size),  # up_proj
        (s.hidden_size, s.intermediate_size),  # down_proj
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


def test_default_workloads():
    big, tiny = default_workload("0.6b"), default_workload("tiny")
    assert (big.tokens_per_step, big.compute_dtype) == (32_768, "bfloat16")
    assert (tiny.tokens_per_step, tiny.compute_dtype) == (512, "float32")


@pytest.mark.parametrize(
    ("strategy", "world_size", "data_degree", "num_micro_batches"),
    [
        (StrategyName.SINGLE, 1, 1, 4),
        (StrategyName.DDP, 2, 2, 2),
        (StrategyName.FSDP2, 2, 2, 2),
        (StrategyName.DDP, 4, 4, 1),
    ],
)
def test_data_degree_and_gradient_accumulation(strategy, world_size, data_degree, num_micro_batches):
    cut = layout(strategy, world_size)
    assert (cut.data_degree, cut.num_micro_batches) == (data_degree, num_micro_batches)
    assert refusal(cut) is None
    assert cut.data_degree * cut.num_micro_batches * cut.workload.micro_batch == cut.workload.sequences


REFUSED = {
    "no rank": (layout(StrategyName.DDP, 0), ["at least 1", "world size 0"]),
    "no sequence": (layout(StrategyName.DDP, 2, sequences=0), ["at least 1", "sequences 0"]),
    "no token": (layout(StrategyName.DDP, 2, sequence_length=0), ["at least 1", "sequence length 0"]),
    "negative micro-batch": (layout(StrategyName.DDP, 2, micro_batch=-1), ["at least 1", "micro-batch -1"]),
    "all that is not positive": (
        layout(StrategyName.DDP, -1, micro_batch=0),
        ["at least 1", "world size -1, micro-batch 0"],
    ),
    "single on 2 ranks": (layout(StrategyName.SINGLE, 2), ["on 1 rank, not 2", "use `ddp`"]),
    "ddp on 1 rank": (layout(StrategyName.DDP, 1), ["`ddp` over 1 rank", "use `single` or at least 2 ranks"]),
    "fsdp2 on 1 rank": (layout(StrategyName.FSDP2, 1), ["`fsdp2` over 1 rank", "use `single` or at least 2 ranks"]),
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
}


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
        if not any(rule(refused) for refused, _ in REFUSED.values() if positive(refused))
    ]
    assert silent == ["_positive"]
    assert RULES[0](REFUSED["no rank"][0])


def positive(cut: Layout) -> bool:
    """The later rules divide: they may only be asked when the first one has nothing to say."""
    return RULES[0](cut) is None


def test_first_rule_is_said_first():
    message = refusal(layout(StrategyName.SINGLE, 2, micro_batch=0))
    assert message is not None
    assert "micro-batch 0" in message
    assert "unsharded" not in message


def test_values_cannot_be_changed_and_refuse_unknown_keys_and_wrong_types():
    workload = default_workload("tiny")
    with pytest.raises(AttributeError):
        workload.seed = 1
    builtins = msgspec.to_builtins(workload)
    assert msgspec.convert(builtins, Workload) == workload
    for change in ({"sequence": 8}, {"sequences": "8"}, {"compute_dtype": "float16"}):
        with pytest.raises(msgspec.ValidationError, match=next(iter(change))):
            msgspec.convert(builtins | change, Workload)
