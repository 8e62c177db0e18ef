"""What the ranks of a run are asked to do: crosses from the pytest process, which has no torch, to the ranks."""

from perf.facts.cell import Cell, SamplingPlan
from perf.facts.fault import Fault
from strategies.value import Value

ENTRY = "perf.measure.worker:run_rank"
TRACE_ENTRY = "perf.measure.tracing:trace_rank"
PLAIN_STEPS = 3
"""Steps of a profiled run before the profiler starts: they tell what it costs."""
OPENING_STEPS = 1
"""Profiled steps that do not count: ranks start the profiler at different times, on devices that have nothing to do."""
PROFILED_STEPS = 3
"""Profiled steps that count; the shortest is told."""


class Job(Value, frozen=True, kw_only=True):
    """One run, as every rank of it is told."""

    cell: Cell
    plan: SamplingPlan
    requested_at_s: float
    """System-wide monotonic time of the request: start-up counts from here."""
    deadline_s: float
    fault: Fault | None = None
    proves_imports: bool = False
    """Whether each rank records which code it has imported: in a comparison of builds."""


class TraceJob(Value, frozen=True, kw_only=True):
    """A run that is profiled."""

    job: Job
    """Of its plan's timed steps the last `OPENING_STEPS` + `PROFILED_STEPS` are profiled."""
    folder: str
    """Where each rank leaves its trace: a run's own folder is gone when the run is."""
    name: str
    """What the traces' names begin with, such as `candidate`."""
