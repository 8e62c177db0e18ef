"""One strategy on one number of ranks: how many ranks each axis has, and what each kind of cut is. No torch."""

import math

from strategies.product import MESH_AXES, Part, derived, is_product, parts_of
from strategies.shapes import SIZES, ModelShape
from strategies.spec import (
    AXES,
    DATA_AXES,
    STAGES_PER_RANK,
    ComputeDtype,
    LinkProfile,
    LossKind,
    Mode,
    Options,
    StrategyName,
    Workload,
)
from strategies.value import Value

MICRO_BATCHES = {"0.6b": 8, "1.7b": 8, "4b": 4, "7b": 2, "8b": 2, "a3b": 4}
"""Sequences of 2048 that one forward sees. Small models want large ones: their step is bound by kernel launches."""

LEARNING_RATES = {"4b": 1e-5, "7b": 1e-5, "8b": 1e-5}
"""Of fresh weights that nothing warms up; 1e-4 for other sizes. There, 7b leapt from a loss of 12.7 to 24.0, and equal
runs on an H200 were 0.5 % apart after 15 steps and 5 % after 17: nothing could have told a wrong one from a right one.
At 1e-5 the loss falls to 11.9, and runs, compiled or eager, are 0.02 % apart."""


def check_strategy(name: str) -> None:
    """Raises ValueError, with the known names, unless this is a strategy or a product of some."""
    if is_product(name):
        parts_of(name)
    elif name not in tuple(StrategyName):
        known = ", ".join(StrategyName)
        raise ValueError(f"unknown strategy {name!r}; known: {known}, and products such as dp2.tp2.pp2")


def parts_on(strategy: str, world_size: int, degrees: tuple[int, ...] = ()) -> tuple[Part, ...]:
    """The parts of a strategy or product with the ranks of each. `degrees`: of a strategy alone, () as even as can be.

    Raises ValueError for a name that is none.
    """
    check_strategy(strategy)
    if is_product(strategy):
        return derived(parts_of(strategy), world_size)
    alone = StrategyName(strategy)
    return (Part(strategy=alone, degrees=degrees or _even_degrees(world_size, len(AXES[alone]))),)


def default_workload(size: str, strategy: str = StrategyName.SINGLE, world_size: int = 1) -> Workload:
    """The workload of a size: 16 x 2048 = 32,768 tokens in bfloat16 on GPUs, a small float32 one for `tiny`.

    Only the micro-batch depends on the strategy. A pipeline is cut into two microbatches for each of its ranks: with
    four, a compiled step of 0.6b on two H200s took 406 ms, of which the host needed all to issue it. A rank that does a
    part of the work on each sequence takes as many sequences more. `tiny` watches the code and not the speed: it keeps
    several forwards a step, so that accumulation is a part of what its cells prove.

    Raises:
        ValueError: no such size or strategy.
    """
    if size not in SIZES:
        raise ValueError(f"unknown size {size!r}; known: {', '.join(SIZES)}")
    is_tiny = size.startswith("tiny")
    sequences, length, micro_batch = (8, 64, 2) if is_tiny else (16, 2048, MICRO_BATCHES[size])
    # Numbers that do not fit are refused, with their reason, where the layout is asked.
    ranks = {part.kind: max(1, math.prod(part.degrees)) for part in parts_on(strategy, max(1, world_size))}
    of_a_rank = max(1, sequences // (ranks.get("data", 1) * ranks.get("expert", 1)))
    if "pipeline" in ranks:
        micro_batch = max(1, of_a_rank // ((4 if is_tiny else 2) * ranks["pipeline"]))
    else:
        shared = ranks.get("context", 1) * (1 if is_tiny else ranks.get("tensor", 1))
        micro_batch = min(micro_batch * shared, of_a_rank)
    return Workload(
        sequences=sequences,
        sequence_length=length,
        micro_batch=micro_batch,
        compute_dtype=ComputeDtype.FLOAT32 if is_tiny else ComputeDtype.BFLOAT16,
        learning_rate=1e-3 if is_tiny else LEARNING_RATES.get(size, 1e-4),
        loss=LossKind.FULL if is_tiny else LossKind.CHUNKED,
    )


class Layout(Value, frozen=True, kw_only=True):
    """One strategy on one number of ranks: everything that decides whether the step can be cut."""

    strategy: str
    """A `StrategyName`, or a product of some."""
    shape: ModelShape
    world_size: int
    workload: Workload
    mode: Mode = Mode.EAGER
    link: LinkProfile = LinkProfile.GLOO
    options: Options = Options()
    degrees: tuple[int, ...] = ()
    """Ranks along each axis of a strategy alone, outermost first; (): as even as they come."""

    @property
    def parts(self) -> tuple[Part, ...]:
        """The strategies that are combined; one, unless this is a product."""
        return parts_on(self.strategy, self.world_size, self.degrees)

    def part(self, kind: str) -> StrategyName | None:
        """What cuts along the `data`, `tensor`, `pipeline`, `context` or `expert` axis, or None."""
        return next((part.strategy for part in self.parts if part.kind == kind), None)

    @property
    def axes(self) -> dict[str, int]:
        """Axis of the device mesh -> its degree, outermost first."""
        degrees = {
            axis: degree for part in self.parts for axis, degree in zip(AXES[part.strategy], part.degrees, strict=True)
        }
        return {axis: degrees[axis] for axis in MESH_AXES if axis in degrees}

    def degree(self, axis: str) -> int:
        """Ranks along an axis; 1 where the strategy has no such axis."""
        return self.axes.get(axis, 1)

    @property
    def data_degree(self) -> int:
        """Ranks that hold different sequences."""
        return math.prod(degree for axis, degree in self.axes.items() if axis in DATA_AXES)

    @property
    def compiled(self) -> bool:
        """Whether torch.compile takes the layers."""
        return self.mode is not Mode.EAGER

    @property
    def num_stages(self) -> int:
        """Pipeline stages over all ranks; 1 without a pipeline."""
        pipeline = self.part("pipeline")
        return self.degree("pp") * STAGES_PER_RANK[pipeline] if pipeline else 1

    @property
    def num_micro_batches(self) -> int:
        """Forwards that one rank makes per step (gradient accumulation), or microbatches of a pipeline."""
        return self.workload.sequences // (self.data_degree * self.workload.micro_batch)


def _even_degrees(world_size: int, num_axes: int) -> tuple[int, ...]:
    """The most even split over two axes, the larger part inside; the whole over one."""
    if num_axes == 1:
        return (world_size,)
    roots = range(1, math.isqrt(max(0, world_size)) + 1)
    outer = max((degree for degree in roots if world_size % degree == 0), default=1)
    return (outer, world_size // outer)
