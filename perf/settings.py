"""What a user asks of a test run, read from the options of pytest."""

from pathlib import Path

from perf.facts.cell import SamplingPlan
from perf.facts.fault import Fault
from perf.facts.outcome import Outcome
from perf.judge.rule import Override
from perf.measure.connection import ROOT
from perf.measure.reference import Reference
from strategies.value import Value

BASELINES = ROOT / "baselines"
STATE = ROOT / ".shardmark"
"""What this checkout remembers for itself: compile caches and local provisional baselines. Ignored by git."""
LOCAL_BASELINES = STATE / "baselines"


class Settings(Value, frozen=True, kw_only=True):
    """The options of a test run."""

    matrix: str
    plan: SamplingPlan
    baselines: Path
    state: Path
    deadline_s: float
    """Of one run, from the request to the last record."""
    preset: str = "default"
    overrides: tuple[Override, ...] = ()
    reference: Reference | None = None
    """A build to measure beside this one."""
    candidate: Reference | None = None
    """The build to measure, in a comparison with the reference; None: this checkout."""
    variables: tuple[tuple[str, str], ...] = ()
    """Of the candidate alone, in a comparison with the reference."""
    side_by_side: bool = False
    """Whether every cell is compared with the reference, or only a suspicious one."""
    pairs: int | None = None
    time_budget_s: float | None = None
    evidence: frozenset[Outcome] = frozenset({Outcome.REGRESSED})
    """A cell that ends so is run once more under a profiler."""
    in_order: bool = False
    """Whether cells are measured in the order of the matrix, or in a random one."""
    keep_provisional: bool = False
    """Record a local provisional baseline for a cell that has none."""
    fault: Fault | None = None
    commit: str | None = None

    @property
    def beside(self) -> str:
        """Which cells of which build are compared with which, in words; empty: none are."""
        if self.reference is None:
            return ""
        cells = "every cell" if self.side_by_side else "suspicious cells"
        build = "this checkout" if self.candidate is None else self.candidate.said
        variables = "".join(f" with {name}={value}" for name, value in self.variables)
        return f"{cells} of {build}{variables} beside {self.reference.said or 'itself without'}"
