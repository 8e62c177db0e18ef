"""A cell: one point of the matrix, and how often it is sampled."""

import re
from pathlib import Path

import msgspec

from strategies.layout import Layout, check_strategy
from strategies.product import is_product
from strategies.shapes import SIZES, ModelShape
from strategies.spec import AXES, STEPS_BEFORE_CAPTURE, LinkProfile, Mode, Options, StrategyName, Workload
from strategies.value import Value

REPLAYS_BEFORE_PAUSE = 3
"""The first loads the graph's kernels, the issuing of the second is timed, the third is an ordinary step."""
STEPS_BEFORE_PAUSE, SETTLING_STEPS = 5, 5
"""The host pauses once before the timed steps, to read the clock and collect garbage: after so many steps, where none
is captured. A GPU runs dry there, and what it does next is not what it does at work: of a warm-up that is longer, as
many as the second number settle between the pause and the timed steps."""


class SamplingPlan(Value, frozen=True, kw_only=True):
    """How much evidence one cell gives."""

    warmup_steps: int = 5
    timed_steps: int = 10
    runs: int = 3
    """Fresh process groups. The run is the unit of evidence, never the step."""
    checkpoint: str | None = None
    """Folder of local safetensors to start from; None: seeded weights."""

    def __post_init__(self) -> None:
        for name, value, least in (
            ("warm-up steps", self.warmup_steps, 1),
            ("timed steps", self.timed_steps, 0),
            ("runs", self.runs, 1),
        ):
            if value < least:
                raise ValueError(f"{value} {name}: a plan needs at least {least}")

    def __str__(self) -> str:
        weights = f" from {self.checkpoint}" if self.checkpoint else ""
        return f"{self.runs} runs of {self.warmup_steps} + {self.timed_steps} steps{weights}"


class Recipe(Value, frozen=True, kw_only=True):
    """What two measurements must share to be comparable."""

    workload: Workload
    warmup_steps: int
    timed_steps: int
    weights: str
    """`seeded`, or the name of a checkpoint's folder."""
    options: Options = Options()
    variables: tuple[tuple[str, str], ...] = ()

    def differences(self, other: "Recipe") -> list[str]:
        """Each differing field as `name: self -> other`."""
        mine, theirs = _flat(self), _flat(other)
        return [f"{name}: {mine[name]} -> {theirs[name]}" for name in mine if mine[name] != theirs[name]]


class Cell(Value, frozen=True, kw_only=True):
    """strategy x size x mode x world size x link profile, with its workload."""

    strategy: str
    """A `StrategyName`, or a product of some, such as `dp2.tp2.pp2`."""
    size: str
    mode: Mode
    world_size: int
    link: LinkProfile
    workload: Workload
    options: Options = Options()
    degrees: tuple[int, ...] = ()
    """Ranks along each axis of a strategy that has several, outermost first; (): as even as they come."""
    variables: tuple[tuple[str, str], ...] = ()
    """Environment variables of its ranks, such as NCCL's, with their values."""
    label: str = ""
    """Ends the cell's name; needed where two cells differ in their workload or variables alone."""

    def __post_init__(self) -> None:
        check_strategy(self.strategy)
        if self.size not in SIZES:
            raise ValueError(f"unknown size {self.size!r}; known: {', '.join(SIZES)}")
        if self.variables and not self.label:
            names = ", ".join(name for name, _ in self.variables)
            raise ValueError(f"a cell with variables ({names}) needs a label that names it")
        if not re.fullmatch(r"[a-z0-9_.+]*", self.label):
            raise ValueError(f"label {self.label!r}: only small letters, digits and _ . + are allowed in a cell's name")

    @property
    def id(self) -> str:
        """The cell's name on every machine; also its file name without suffix."""
        ranks = self._degrees or str(self.world_size)
        return "-".join([self.strategy, self.size, self.mode, f"w{ranks}", self.link, *self._labels])

    @property
    def variant(self) -> str:
        """The strategy with all that tells it from others of its name, for people: `hsdp 2x2 ac`."""
        return " ".join(part for part in (str(self.strategy), self._degrees, *self._labels) if part)

    @property
    def _degrees(self) -> str:
        """Of a strategy that cuts along several axes; a product has them in its name."""
        if is_product(self.strategy) or len(AXES[StrategyName(self.strategy)]) == 1:
            return ""
        # As given, also where they do not fit: the refusal says so, under this name.
        return "x".join(map(str, self.degrees or self.layout.axes.values()))

    @property
    def _labels(self) -> list[str]:
        return [label for label in (self.options.label, self.label) if label]

    @property
    def device_kind(self) -> str:
        """`cpu` or `cuda`."""
        return "cpu" if self.link is LinkProfile.GLOO else "cuda"

    def plan(self, plan: SamplingPlan) -> SamplingPlan:
        """A test run's plan as it holds for this cell: a step is captured late, and a GPU settles."""
        if self.device_kind == "cpu":
            return plan
        least = self._steps_before_pause + SETTLING_STEPS
        return msgspec.structs.replace(plan, warmup_steps=max(plan.warmup_steps, least))

    def settling_steps(self, plan: SamplingPlan) -> int:
        """The last steps of the warm-up, from its pause to the first timed step."""
        return min(SETTLING_STEPS, max(0, plan.warmup_steps - self._steps_before_pause))

    def probed_step(self, plan: SamplingPlan) -> int:
        """The step whose issuing is timed, for which the host waits for the GPU: the last but one before the pause."""
        return plan.warmup_steps - self.settling_steps(plan) - 2

    @property
    def _steps_before_pause(self) -> int:
        captured = self.mode is Mode.CUDAGRAPH
        return STEPS_BEFORE_CAPTURE + REPLAYS_BEFORE_PAUSE if captured else STEPS_BEFORE_PAUSE

    @property
    def shape(self) -> ModelShape:
        return SIZES[self.size]

    @property
    def layout(self) -> Layout:
        return Layout(
            strategy=self.strategy,
            shape=self.shape,
            world_size=self.world_size,
            workload=self.workload,
            mode=self.mode,
            link=self.link,
            options=self.options,
            degrees=self.degrees,
        )

    def recipe(self, plan: SamplingPlan) -> Recipe:
        return Recipe(
            workload=self.workload,
            warmup_steps=plan.warmup_steps,
            timed_steps=plan.timed_steps,
            weights="seeded" if plan.checkpoint is None else Path(plan.checkpoint).name,
            options=self.options,
            variables=self.variables,
        )


def _flat(recipe: Recipe) -> dict[str, object]:
    parts = (recipe.workload, recipe.options)
    fields = {name: getattr(recipe, name) for name in recipe.__struct_fields__ if name not in ("workload", "options")}
    return {name: getattr(part, name) for part in parts for name in part.__struct_fields__} | fields
