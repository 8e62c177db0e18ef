"""What the ranks of a run are asked to do: crosses from the pytest process, which has no torch, to the ranks."""

from perf.cell import Cell, SamplingPlan
from perf.fault import Fault
from strategies.value import Value

ENTRY = "perf.worker:run_rank"


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
