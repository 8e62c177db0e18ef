"""What was seen: the records of a rank and of a run, raw and as written, with the environment they come from."""

from typing import ClassVar

from perf.facts.cell import Cell, SamplingPlan
from perf.facts.fault import Fault
from perf.facts.gpus import GpuUse
from perf.facts.hardware import Machine
from perf.facts.provenance import Imported
from strategies.value import Value


class Software(Value, frozen=True, kw_only=True):
    """Versions that the ranks imported."""

    torch: str
    transformers: str
    python: str
    cuda: str | None = None
    nccl: str | None = None


class Environment(Value, frozen=True, kw_only=True):
    """Where and on what code a run was made. Recorded and shown; only the machine decides which baseline applies."""

    machine: Machine
    host: str
    cpu: str
    cpu_cores: int
    software: Software
    commit: str | None
    """Of the measured source tree; None when unknown."""
    dirty: bool | None
    """Whether that tree had uncommitted changes, other than of baselines."""
    digest: str | None = None
    """Of all sources of its `strategies`, and of what measures them: tells uncommitted changes from others."""
    variables: dict[str, str]
    """Environment variables that change how torch runs."""


class Marks(Value, frozen=True, kw_only=True):
    """Seconds from the launch request to each station of a rank."""

    entered_s: float
    group_ready_s: float
    built_s: float
    first_step_s: float
    warm_s: float
    """The pause of the warm-up; what follows, its settling steps included, is measuring."""
    timed_s: float
    finished_s: float


class LedgerEntry(Value, frozen=True, kw_only=True):
    """All collectives of one kind that one rank issued in one step."""

    op: str
    axis: str
    dtype: str
    count: int
    bytes: int
    """Payload that this rank passes in, summed over the calls."""


class MemoryPeaks(Value, frozen=True, kw_only=True):
    """Peaks after warm-up. The allocator's are None on a CPU, which has no allocator statistics."""

    allocated_bytes: int | None
    reserved_bytes: int | None
    resident_bytes: int
    """Largest resident size of the process over its life (the operating system's number)."""
    allocator_retries: int | None


class CompileState(Value, frozen=True, kw_only=True):
    """What torch.compile did in this rank."""

    graphs: int
    graph_breaks: int
    recompiles_after_warmup: int


class RankRecord(Value, frozen=True, kw_only=True):
    """Everything that one rank measured in one run."""

    SCHEMA_VERSION: ClassVar[int] = 1
    schema_version: int = 1
    rank: int
    device: str
    num_threads: int
    marks: Marks
    warmup_times_s: tuple[float, ...]
    step_times_s: tuple[float, ...]
    """Timed steps only, in order."""
    losses: tuple[float | None, ...]
    """This rank's share of the loss of every step, warm-up included, before its update; None: not finite."""
    start_gradient_norm: float | None
    end_gradient_norm: float | None
    """Global norms of the first step and of the audit step after the timed ones; None when not finite."""
    tokens_per_step: int
    """Tokens that this rank stands for: the sum over ranks is the global batch."""
    num_parameters: int
    """Elements that only this rank stands for: the sum over ranks is the model's count."""
    memory: MemoryPeaks
    ledger: tuple[LedgerEntry, ...]
    arrivals_s: tuple[float, ...]
    """System-wide monotonic time at which this rank reached each collective of the audit step."""
    compile: CompileState
    attention: tuple[str, ...] = ()
    """Attention kernels that the audit step was dispatched to, such as `flash_attention`."""
    imported: Imported | None = None
    """Which code this rank ran; only in a comparison of builds."""
    replays: int = 0
    """Steps, warm-up included, that were replays of a CUDA graph."""
    issue_time_s: float | None = None
    """Time the host took to issue one step to an idle GPU; None on a CPU. Near the step time: bound by launches."""


class RunRecord(Value, frozen=True, kw_only=True):
    """One run: a fresh process group, all its ranks."""

    SCHEMA_VERSION: ClassVar[int] = 1
    schema_version: int = 1
    cell: Cell
    plan: SamplingPlan
    index: int
    """Which repeat of the cell, from 0. Runs of both arms that were neighbours in time share it."""
    arm: str | None = None
    """`candidate` or `reference` in a comparison of builds."""
    started_at: str
    """UTC, ISO 8601."""
    wall_s: float
    """From the launch request until every process was gone."""
    server_start_up_s: float = 0.0
    """Seconds that the server's imports took before this run; 0 when it was running already."""
    priming_s: float = 0.0
    """Seconds of the unmeasured run that warmed the compile caches before this one; 0 when there was none."""
    environment: Environment
    ranks: tuple[RankRecord, ...]
    gpus: tuple[GpuUse, ...] = ()
    """State of the GPUs over the run; empty on a CPU."""
    teardown_hang: bool = False
    """All ranks had measured, but their processes did not end and were killed."""
    fault: Fault | None = None
    """A planted fault: such a run can never become a baseline."""

    @property
    def step_times_s(self) -> tuple[float, ...]:
        """Per timed step, the slowest rank's time. Steps that not all ranks have are left to `gaps` to report."""
        return tuple(max(times) for times in zip(*(rank.step_times_s for rank in self.ranks), strict=False))

    @property
    def losses(self) -> tuple[float | None, ...]:
        """Global mean loss of every step: the sum of the ranks' shares, None where a share was not finite."""
        steps = zip(*(rank.losses for rank in self.ranks), strict=False)
        return tuple(None if None in shares else sum(s for s in shares if s is not None) for shares in steps)

    @property
    def issue_time_s(self) -> float | None:
        """Of the slowest rank; None when a rank has none."""
        times = [rank.issue_time_s for rank in self.ranks if rank.issue_time_s is not None]
        return max(times) if times and len(times) == len(self.ranks) else None

    @property
    def start_up_s(self) -> float:
        """From the request to the start of the first step, slowest rank."""
        return max(rank.marks.built_s for rank in self.ranks)

    @property
    def measuring_s(self) -> float:
        return max(rank.marks.timed_s - rank.marks.warm_s for rank in self.ranks)

    @property
    def warm_up_s(self) -> float:
        """Warm-up steps; in compile mode this holds the compiling."""
        return max(rank.marks.warm_s - rank.marks.built_s for rank in self.ranks)
