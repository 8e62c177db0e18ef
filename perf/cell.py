"""A cell: one point of the matrix, and how often it is sampled."""

from pathlib import Path

from strategies.spec import SIZES, Layout, LinkProfile, Mode, ModelShape, StrategyName, Value, Workload


class SamplingPlan(Value, frozen=True, kw_only=True):
    """How much evidence one cell gives."""

    warmup_steps: int = 5
    timed_steps: int = 10
    runs: int = 3
    """Fresh process groups. The run is the unit of evidence, never the step."""
    checkpoint: str | None = None
    """Folder of local safetensors to start from; None: seeded weights."""

    def __post_init__(self) -> None:
        if min(self.warmup_steps, self.runs) < 1 or self.timed_steps < 0:
            raise ValueError(f"a plan needs at least 1 warm-up step and 1 run, got {self}")


class Recipe(Value, frozen=True, kw_only=True):
    """What two measurements must share to be comparable."""

    workload: Workload
    warmup_steps: int
    timed_steps: int
    weights: str
    """`seeded`, or the name of a checkpoint's folder."""

    def differences(self, other: "Recipe") -> list[str]:
        """Each differing field as `name: self -> other`."""
        mine, theirs = _flat(self), _flat(other)
        return [f"{name}: {mine[name]} -> {theirs[name]}" for name in mine if mine[name] != theirs[name]]


class Cell(Value, frozen=True, kw_only=True):
    """strategy x size x mode x world size x link profile, with its workload."""

    strategy: StrategyName
    size: str
    mode: Mode
    world_size: int
    link: LinkProfile
    workload: Workload

    def __post_init__(self) -> None:
        if self.size not in SIZES:
            raise ValueError(f"unknown size {self.size!r}; known: {', '.join(SIZES)}")

    @property
    def id(self) -> str:
        """The cell's name on every machine; also its file name without suffix."""
        return f"{self.strategy}-{self.size}-{self.mode}-w{self.world_size}-{self.link}"

    @property
    def device_kind(self) -> str:
        """`cpu` or `cuda`."""
        return "cpu" if self.link is LinkProfile.GLOO else "cuda"

    @property
    def shape(self) -> ModelShape:
        return SIZES[self.size]

    @property
    def layout(self) -> Layout:
        return Layout(strategy=self.strategy, shape=self.shape, world_size=self.world_size, workload=self.workload)

    def recipe(self, plan: SamplingPlan) -> Recipe:
        return Recipe(
            workload=self.workload,
            warmup_steps=plan.warmup_steps,
            timed_steps=plan.timed_steps,
            weights="seeded" if plan.checkpoint is None else Path(plan.checkpoint).name,
        )


def _flat(recipe: Recipe) -> dict[str, object]:
    fields: dict[str, object] = {name: getattr(recipe, name) for name in recipe.__struct_fields__ if name != "workload"}
    return {name: getattr(recipe.workload, name) for name in recipe.workload.__struct_fields__} | fields
