"""Room strategies/product.py: products are named in one way, and compute what the unsharded model computes."""

import math

import pytest

from strategies.layout import Layout, check_strategy, default_workload
from strategies.product import TOKENS, derived, parts_of
from strategies.rules import refusal
from strategies.shapes import SIZES
from strategies.spec import ComputeDtype, LossKind, Mode, Options, StrategyName
from tests.equivalence import Case
from tests.test_equivalence import distances, faults

PRODUCTS = [
    "dp2.tp2",
    "dp2.pp2",
    "tp2.pp2",
    "tp2.ring2",
    "fsdp2.ring2",
    "pp2.ring2",
    "hsdp2x2.tp2",
    "dp2.tp2.pp2",
    "dp2.tp2.ring2",
    "fsdp2.tp_sp2",
    "fsdp2.pp_zbv2",
    "tp_sp2.pp_interleaved_zb2",
    "tp_sp2.ulysses2",
    "pp_dualpipev2.ulysses2",
    "fsdp2.ep2",
]
"""On four and eight ranks: each pair of kinds, data, tensor, pipeline and context, and three at once."""
MORE = [
    "dp2.ep2",
    "dp2.pp_gpipe2",
    "dp2.pp_interleaved2",
    "dp2.pp_interleaved_zb2",
    "dp2.pp_zbv2",
    "dp2.pp_dualpipev2",
    "dp2.ring2",
    "dp2.tp_sp2",
    "dp2.ulysses2",
    "fsdp2.pp2",
    "fsdp2.pp_interleaved_zb2",
    "fsdp2.tp2",
    "fsdp2.tp_sp2.pp_interleaved2",
    "fsdp2.ulysses2",
    "fsdp2.usp2x2",
    "hsdp2x2.ep2",
    "hsdp2x2.pp2",
    "hsdp2x2.ring2",
    "tp_sp2.pp2",
    "tp_sp2.pp_zbv2",
    "tp_sp2.ring2",
    "pp_zbv2.ring2",
    "tp2.pp2.ring2",
]
ALL_OPTIONS = Options(activation_checkpointing=True, optimizer_state=ComputeDtype.BFLOAT16, clip_norm=0.5)


def case(product: str, **settings: object) -> Case:
    """On heads enough for two cuts; one layer more than stages, so that they are cut unevenly."""
    world_size = math.prod(math.prod(part.degrees) for part in parts_of(product))
    changes = {"num_layers": 5, "num_heads": 8, "num_kv_heads": 4, "vocab_size": 100}
    whole = {"world_size": world_size, "changes": changes, "sequences": 16, "micro_batch": 2, **settings}
    return Case(strategy=product, **whole)


@pytest.mark.usefixtures("sound_collectives")
@pytest.mark.parametrize("product", PRODUCTS)
def test_product_equals_unsharded_model(launcher, product):
    of = case(product)
    assert refusal(of.layout) is None
    assert not faults(distances(launcher, of), of)


@pytest.mark.usefixtures("sound_collectives")
@pytest.mark.parametrize("product", ["dp2.tp2", "fsdp2.pp_zbv2", "dp2.tp2.pp2"])
def test_product_equals_unsharded_model_under_all_options(launcher, product):
    of = case(product, options=ALL_OPTIONS, loss=LossKind.CHUNKED, masked_sequences=(12, 13, 14, 15), packed=True)
    assert not faults(distances(launcher, of), of)


@pytest.mark.long
@pytest.mark.usefixtures("sound_collectives")
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("product", [*PRODUCTS, *MORE])
def test_every_product_equals_unsharded_model_under_all_options(launcher, product, tied):
    changes = case(product).changes | {"tied_embeddings": tied}
    of = case(product, options=ALL_OPTIONS, loss=LossKind.CHUNKED, changes=changes)
    assert not faults(distances(launcher, of), of)


@pytest.mark.long
@pytest.mark.usefixtures("sound_collectives")
@pytest.mark.parametrize("options", [Options(), Options(async_tp=True)], ids=["plain", "async"])
@pytest.mark.parametrize("product", [*PRODUCTS, *MORE])
def test_compiled_product_equals_unsharded_model(launcher, product, options):
    of = case(product, mode=Mode.COMPILE, dtype="float32", loss=LossKind.CHUNKED, options=options)
    if reason := refusal(of.layout):
        assert "wrong gradients" in reason or "async TP splits" in reason
        return
    assert not faults(distances(launcher, of), of)


MISTAKES = {
    ("dp2.tp2", "gradients twice too large"): "gradients",
    ("dp2.tp2", "head norms not summed"): "gradients",
    ("fsdp2.tp_sp2", "layer norms not summed"): "gradients",
    ("tp2.pp2", "a tied weight's gradients not summed"): "gradients",
    ("dp2.pp2", "gradients divided by the number of microbatches"): "gradients",
    ("dp2.tp2.pp2", "loss counted by every rank"): "loss",
    ("dp2.pp2", "a dropped layer"): "only",
    ("fsdp2.ring2", "gradients of its own positions alone"): "gradients",
    ("tp2.ring2", "attends to its own positions alone"): "logits",
    ("fsdp2.ep2", "experts' gradients averaged"): "gradients",
}


@pytest.mark.usefixtures("sound_collectives")
@pytest.mark.parametrize(("planted", "says"), MISTAKES.items(), ids=[f"{of}: {what}" for of, what in MISTAKES])
def test_mistake_is_found(launcher, planted, says):
    product, mistake = planted
    of = case(product, mistake=mistake)
    found = faults(distances(launcher, of), of)
    assert any(says in fault for fault in found), found


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("dp2.xp2", "unknown part 'xp2' of strategy 'dp2.xp2'; known, each with its ranks: dp, fsdp"),
        ("tp2.dp2", "strategy 'tp2.dp2' is written 'dp2.tp2': data, tensor, pipeline, context, expert"),
        ("dp2.fsdp2", "two parts for the data axis"),
        ("dp2.tp", "part 'tp' of strategy 'dp2.tp' needs its ranks along 1 axes, as 'tp2'"),
        ("hsdp4.tp2", "needs its ranks along 2 axes, as 'hsdp2x2'"),
        ("dp2.tp2x2", "needs its ranks along 1 axes"),
        ("dp2.", "unknown part ''"),
        ("dpp", "unknown strategy 'dpp'; known: single, ddp"),
    ],
)
def test_bad_name_is_refused_with_the_cure(name, says):
    with pytest.raises(ValueError, match="strategy") as caught:
        check_strategy(name)
    assert says in str(caught.value)


@pytest.mark.parametrize("token", TOKENS)
def test_every_part_can_be_written(token):
    ranks = "2x2" if token in ("hsdp", "usp") else "2"
    is_data = token in ("dp", "fsdp", "hsdp")
    name = f"{token}{ranks}.pp4" if is_data else f"dp4.{token}{ranks}"
    (part,) = [part for part in parts_of(name) if part.strategy is TOKENS[token]]
    assert part.degrees == tuple(int(number) for number in ranks.split("x"))


def test_data_degree_may_be_left_out():
    assert derived(parts_of("fsdp.tp2"), 8)[0].degrees == (4,)
    assert default_workload("0.6b", "fsdp.tp2", 8) == default_workload("0.6b", "fsdp4.tp2", 8)


@pytest.mark.parametrize(
    ("strategy", "world_size", "says"),
    [
        ("dp2.tp2", 6, "dp 2 x tp 2 = 4 ranks, not 6: DP = world / (TP x PP x CP) = 6 / (2 x 1 x 1) = 3; name it 3"),
        ("dp.tp2.pp2", 6, "6 / (2 x 2 x 1) = 1.5; change one of them"),
        ("tp2.pp2", 8, "tp 2 = 4 ranks, not 8"),
        ("dp1.tp2", 2, "cuts nothing along one axis"),
        ("dp0.tp2", 2, "leave it out, or take more ranks"),
        ("tp0.pp2", 2, "tp 0: every part needs at least 2 ranks"),
        ("dp.tp0", 2, "tp 0: every part needs at least 2 ranks"),
        ("tp_sp4.ring2", 8, "kv heads 2 do not divide by tensor degree 4"),
    ],
)
def test_product_that_does_not_fit_is_refused_with_the_arithmetic(strategy, world_size, says):
    layout = Layout(
        strategy=strategy,
        shape=SIZES["tiny"],
        world_size=world_size,
        workload=default_workload("tiny", strategy, world_size),
    )
    assert says in refusal(layout)


def test_degrees_beside_a_product_are_refused():
    workload = default_workload("tiny", "dp2.tp2", 4)
    layout = Layout(strategy="dp2.tp2", shape=SIZES["tiny"], world_size=4, workload=workload, degrees=(2, 2))
    assert "has its degrees in its name" in refusal(layout)


def test_parts_are_strategies():
    assert set(TOKENS.values()) == set(StrategyName) - {StrategyName.SINGLE, StrategyName.ZERO1, StrategyName.ZERO2}
