"""Products of strategies, each along an axis of its own, and their names: `dp2.tp2.pp2`. No torch.

A product is written as parts with their ranks, joined by dots: data, tensor, pipeline, context, expert. The part of the
data axis may leave its number to be derived: DP = world / (TP x PP x CP x EP).
"""

import math
import re

from strategies.spec import AXES, CONTEXT_AXES, StrategyName
from strategies.value import Value

TOKENS = {
    "dp": StrategyName.DDP,
    "fsdp": StrategyName.FSDP2,
    "hsdp": StrategyName.HSDP,
    "tp": StrategyName.TP,
    "tp_sp": StrategyName.TP_SP,
    "pp": StrategyName.PP_1F1B,
    "pp_gpipe": StrategyName.PP_GPIPE,
    "pp_interleaved": StrategyName.PP_INTERLEAVED,
    "pp_interleaved_zb": StrategyName.PP_INTERLEAVED_ZB,
    "pp_zbv": StrategyName.PP_ZBV,
    "pp_dualpipev": StrategyName.PP_DUALPIPEV,
    "ulysses": StrategyName.CP_ULYSSES,
    "ring": StrategyName.CP_RING,
    "usp": StrategyName.CP_USP,
    "ep": StrategyName.EP,
}
"""How a part is written in a product; its number of ranks follows, of `hsdp` and `usp` two of them: `hsdp2x2`."""
MESH_AXES = ("dp", "dp_replicate", "dp_shard", "ep", "pp", "ring", "ulysses", "tp")
"""Outermost first: neighbouring ranks share a tensor, those that are furthest apart share nothing but the gradients.

So with 8 ranks `dp2.tp2.pp2` has the tensor groups (0, 1), (2, 3), (4, 5), (6, 7), and ranks 0 to 3 hold one replica:
0 and 1 its first stage, 2 and 3 its second.
"""


class Part(Value, frozen=True, kw_only=True):
    """One strategy of a product."""

    strategy: StrategyName
    degrees: tuple[int, ...]
    """Ranks along each of its axes, outermost first; (): whatever the other parts leave."""

    @property
    def kind(self) -> str:
        """`data`, `tensor`, `pipeline`, `context` or `expert`: a product has one part of each at most."""
        axis = AXES[self.strategy][0]
        others = {"tp": "tensor", "pp": "pipeline", "ep": "expert"}
        return others.get(axis, "context" if axis in CONTEXT_AXES else "data")


KINDS = ("data", "tensor", "pipeline", "context", "expert")
"""In the order in which a product is written."""


def is_product(name: str) -> bool:
    """Whether a strategy's name is a product's."""
    return "." in name


def parts_of(name: str) -> tuple[Part, ...]:
    """The parts of a product, in their order.

    Raises:
        ValueError: an unknown part, two of a kind, another order, or a number of ranks missing.
    """
    parts = tuple(_part(text, name) for text in name.split("."))
    kinds = [part.kind for part in parts]
    if twice := sorted({kind for kind in kinds if kinds.count(kind) > 1}):
        raise ValueError(f"strategy {name!r} has two parts for the {twice[0]} axis; a product has one of each kind")
    ordered = ".".join(text for _, text in sorted(zip(map(KINDS.index, kinds), name.split("."), strict=True)))
    if ordered != name:
        raise ValueError(f"strategy {name!r} is written {ordered!r}: {', '.join(KINDS)}")
    return parts


def derived(parts: tuple[Part, ...], world_size: int) -> tuple[Part, ...]:
    """The parts with the number that was left out, by division; 0 where there is nothing to divide."""
    others = math.prod(math.prod(part.degrees) for part in parts)
    degrees = (world_size // others,) if others else (0,)
    return tuple(Part(strategy=part.strategy, degrees=part.degrees or degrees) for part in parts)


def _part(text: str, name: str) -> Part:
    # The longest first: `pp_interleaved_zb2` is not `pp_interleaved` and something.
    for token in sorted(TOKENS, key=len, reverse=True):
        rest = text.removeprefix(token)
        if rest == text or not re.fullmatch(r"(\d+(x\d+)*)?", rest):
            continue
        strategy = TOKENS[token]
        degrees = tuple(int(number) for number in rest.split("x")) if rest else ()
        wanted = len(AXES[strategy])
        derivable = not rest and AXES[strategy] == ("dp",)
        if len(degrees) != wanted and not derivable:
            example = token + "x".join(["2"] * wanted)
            raise ValueError(f"part {text!r} of strategy {name!r} needs its ranks along {wanted} axes, as {example!r}")
        return Part(strategy=strategy, degrees=degrees)
    raise ValueError(f"unknown part {text!r} of strategy {name!r}; known, each with its ranks: {', '.join(TOKENS)}")
