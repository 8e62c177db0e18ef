"""Every reason to refuse a layout, in one table: asked before any process starts, answered with numbers and cure.

No torch.
"""

import math
from collections.abc import Callable

from strategies.layout import Layout
from strategies.product import is_product
from strategies.shapes import SIZES
from strategies.spec import AXES, ZERO_BUBBLE, LinkProfile, Mode, StrategyName


def _positive(layout: Layout) -> str | None:
    workload = layout.workload
    numbers = {
        "world size": layout.world_size,
        "sequences": workload.sequences,
        "sequence length": workload.sequence_length,
        "micro-batch": workload.micro_batch,
    }
    bad = [f"{name} {number}" for name, number in numbers.items() if number < 1]
    return f"must be at least 1: {', '.join(bad)}" if bad else None


def _single_rank(layout: Layout) -> str | None:
    if layout.strategy == StrategyName.SINGLE and layout.world_size != 1:
        return f"`single` is the unsharded model on 1 rank, not {layout.world_size}; use `ddp` to replicate it"
    return None


def _degrees(layout: Layout) -> str | None:
    if is_product(layout.strategy):
        return _product_degrees(layout)
    names, degrees = AXES[StrategyName(layout.strategy)], layout.degrees
    if degrees and (len(degrees) != len(names) or math.prod(degrees) != layout.world_size):
        return (
            f"`{layout.strategy}` needs one degree for each of {', '.join(names)}, their product the world size "
            f"{layout.world_size}, not {' x '.join(map(str, degrees))}"
        )
    return None if layout.strategy == StrategyName.SINGLE else _cuts_nothing(layout)


def _product_degrees(layout: Layout) -> str | None:
    if layout.degrees:
        given = " x ".join(map(str, layout.degrees))
        return f"`{layout.strategy}` has its degrees in its name; leave out the degrees {given}"
    axes = layout.axes
    if missing := [f"{part.strategy} 0" for part in layout.parts if part.kind != "data" and 0 in part.degrees]:
        return f"`{layout.strategy}` has {', '.join(missing)}: every part needs at least 2 ranks along each axis"
    if math.prod(axes.values()) != layout.world_size:
        tensor, pipeline, context = (
            layout.degree("tp"),
            layout.degree("pp"),
            layout.degree("ring") * layout.degree("ulysses"),
        )
        experts = layout.degree("ep")
        others = tensor * pipeline * context * experts
        whole = layout.world_size % others == 0
        have = " x ".join(f"{axis} {degree}" for axis, degree in axes.items())
        derived = layout.world_size // others if whole else f"{layout.world_size / others:.3g}"
        cure = "change one of them"
        if whole and layout.part("data") and derived:
            cure = f"name it {derived}" if derived != 1 else "leave it out, or take more ranks"
        return (
            f"`{layout.strategy}` is {have} = {math.prod(axes.values())} ranks, not {layout.world_size}: DP = world / "
            f"(TP x PP x CP{' x EP' * (experts > 1)}) = {layout.world_size} / ({tensor} x {pipeline} x {context}"
            f"{f' x {experts}' * (experts > 1)}) = {derived}; {cure}"
        )
    return _cuts_nothing(layout)


def _cuts_nothing(layout: Layout) -> str | None:
    axes = layout.axes
    if min(axes.values()) >= 2:
        return None
    cut = " x ".join(f"{axis} {degree}" for axis, degree in axes.items())
    return f"`{layout.strategy}` over {cut} cuts nothing along one axis; use at least {2 ** len(axes)} ranks, 2 an axis"


def _batch_divides(layout: Layout) -> str | None:
    workload = layout.workload
    per_forward = layout.data_degree * workload.micro_batch
    if workload.sequences % per_forward:
        per_rank, rest = divmod(workload.sequences, layout.data_degree)
        even = f"choose a micro-batch that divides {workload.sequences} / {layout.data_degree} = {per_rank}"
        uneven = f"choose a number of sequences that data degree {layout.data_degree} divides"
        return (
            f"{workload.sequences} sequences a step do not divide into data degree {layout.data_degree} x micro-batch "
            f"{workload.micro_batch} = {per_forward}; {uneven if rest else even}"
        )
    return None


def _tensor_divides(layout: Layout) -> str | None:
    degree, shape = layout.degree("tp"), layout.shape
    numbers = {
        "heads": shape.num_heads,
        "kv heads": shape.num_kv_heads,
        "intermediate size": shape.intermediate_size,
        "vocabulary": shape.vocab_size,
    }
    if layout.part("tensor") is StrategyName.TP_SP:
        # Of what a context part leaves to a rank; where that is no whole number, another rule says so.
        context = layout.degree("ring") * layout.degree("ulysses")
        numbers["sequence length" if context == 1 else "positions of a rank"] = (
            layout.workload.sequence_length // context
        )
    return _undivided(numbers, degree, "tensor degree")


def _sequence_divides(layout: Layout) -> str | None:
    ring, ulysses, length = layout.degree("ring"), layout.degree("ulysses"), layout.workload.sequence_length
    if ring > 1 and length % (2 * ring * ulysses):
        return (
            f"a zigzag needs the sequence length {length} to divide by 2 x ring {ring} x ulysses {ulysses} = "
            f"{2 * ring * ulysses}; choose a multiple of it"
        )
    return _undivided({"sequence length": length}, ulysses, "ulysses degree")


def _heads_for_ulysses(layout: Layout) -> str | None:
    degree, tensor = layout.degree("ulysses"), layout.degree("tp")
    heads, kv_heads = layout.shape.num_heads // tensor, layout.shape.num_kv_heads // tensor
    each = f" of a tensor degree of {tensor}" if tensor > 1 else ""
    if heads % degree:
        return f"{heads} heads{each} do not divide by ulysses degree {degree}; choose a divisor of {heads}"
    if kv_heads % degree and degree % kv_heads:
        return (
            f"{kv_heads} kv heads{each} can be neither cut nor repeated over ulysses degree {degree}; choose a divisor "
            f"or a multiple of {kv_heads}"
        )
    return None


def _experts(layout: Layout) -> str | None:
    degree, shape = layout.degree("ep"), layout.shape
    if shape.has_experts and layout.part("tensor") is not None:
        tensor = layout.part("tensor")
        return f"`{tensor}` does not cut the {shape.num_experts} experts of this size; use `ep` or `fsdp2`"
    if layout.part("expert") is None:
        return None
    if not shape.has_experts:
        sizes = ", ".join(size for size, known in SIZES.items() if known.has_experts)
        return (
            f"`{layout.strategy}` spreads experts over ranks, and this size has none; use one that has, such as {sizes}"
        )
    if others := [kind for kind in ("tensor", "pipeline", "context") if layout.part(kind) is not None]:
        combined = f"`ep` is combined with a data part alone, not with the {others[0]} part of"
        return f"{combined} `{layout.strategy}`; leave one out"
    return _undivided({"experts": shape.num_experts}, degree, "expert degree")


def _layers_for_stages(layout: Layout) -> str | None:
    if layout.shape.num_layers < layout.num_stages:
        per_rank = layout.num_stages // layout.degree("pp")
        return (
            f"{layout.shape.num_layers} layers cannot fill {layout.degree('pp')} ranks x {per_rank} stages = "
            f"{layout.num_stages}; choose at most {layout.shape.num_layers // per_rank} ranks"
        )
    return None


def _microbatches_for_schedule(layout: Layout) -> str | None:
    """What torch.distributed.pipelining's schedules ask for; GPipe and ZBV take any number."""
    degree, count = layout.degree("pp"), layout.num_micro_batches
    match layout.part("pipeline"):
        case StrategyName.PP_1F1B:
            if count < degree:
                return _too_few(count, degree, f"1F1B on {degree} stages")
        case StrategyName.PP_INTERLEAVED | StrategyName.PP_INTERLEAVED_ZB:
            rounds = max(1, count // degree)
            if count % rounds:
                return f"{count} microbatches do not fall into {rounds} equal rounds; choose a multiple of {degree}"
        case StrategyName.PP_DUALPIPEV:
            if count < layout.num_stages:
                return _too_few(count, layout.num_stages, f"DualPipeV on {layout.num_stages} stages")
        case _:
            pass
    return None


def _zero_bubble_compiled(layout: Layout) -> str | None:
    if layout.part("pipeline") in ZERO_BUBBLE and layout.compiled:
        return (
            f"`{layout.strategy}` runs each backward in two parts; compiled layers then give wrong gradients without a "
            "word (or raise on donated buffers); use eager, or `pp_interleaved`"
        )
    return None


def _asynchronous(layout: Layout) -> str | None:
    if not layout.options.async_tp:
        return None
    if layout.part("tensor") is not StrategyName.TP_SP:
        return f"async TP splits the products of `tp_sp`, not of `{layout.strategy}`"
    if not layout.compiled:
        return "async TP is a pass of the compiler and does nothing in eager mode; use mode compile"
    if layout.link is LinkProfile.NO_P2P:
        return "async TP reads the memory of its peers, which link no_p2p switches off; use link native"
    return None


def _captured(layout: Layout) -> str | None:
    if layout.mode is not Mode.CUDAGRAPH:
        return None
    if layout.part("expert") is not None:
        return (
            "the host waits in every layer of `ep` for the router's choice, which a CUDA graph cannot hold; use compile"
        )
    if layout.link is LinkProfile.GLOO:
        return "a CUDA graph is captured on a GPU, and ranks on gloo run on CPUs; use compile, or link native"
    return None


def _clip(layout: Layout) -> str | None:
    norm = layout.options.clip_norm
    return (
        None if norm is None or norm > 0 else f"gradients cannot be clipped to the norm {norm:g}; give a positive one"
    )


def _undivided(numbers: dict[str, int], degree: int, name: str) -> str | None:
    bad = [f"{what} {number}" for what, number in numbers.items() if number % degree]
    if not bad:
        return None
    common = math.gcd(*numbers.values())
    return f"{' and '.join(bad)} do not divide by {name} {degree}; choose a divisor of {common}"


def _too_few(count: int, least: int, what: str) -> str:
    return f"{count} microbatches are too few for {what}; choose a micro-batch that makes at least {least}"


RULES: tuple[Callable[[Layout], str | None], ...] = (
    _positive,
    _single_rank,
    _degrees,
    _batch_divides,
    _tensor_divides,
    _sequence_divides,
    _heads_for_ulysses,
    _experts,
    _layers_for_stages,
    _microbatches_for_schedule,
    _zero_bubble_compiled,
    _asynchronous,
    _captured,
    _clip,
)
"""Every reason to refuse a layout, in the order in which they are said; each returns a message or None."""


def refusal(layout: Layout) -> str | None:
    """Why this layout cannot be run, with the numbers and the cure, or None when it can."""
    return next((message for rule in RULES if (message := rule(layout))), None)
