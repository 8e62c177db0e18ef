"""A profiled run: warm as a timed one, then a few steps under torch's profiler, and where the time of these went.

The child's side, as perf.measure.worker; perf.measure.evidence asks for it. The profiler makes a step longer, by a lot
where the host issues many small ops: compare its times with those of another profiled run, never of a timed one.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import FileStore  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile, record_function

from perf.facts import jsonfile
from perf.facts.job import OPENING_STEPS, PROFILED_STEPS, TraceJob
from perf.measure.comms import Ledger
from perf.measure.evidence import RankTrace
from perf.measure.probes import ExtraWork, IssueProbe, StepClock
from perf.measure.server import RankContext
from perf.measure.timeline import timeline
from perf.measure.trace_events import FORWARD_BACKWARD_MARK, OPTIMIZER_MARK, STEP_MARK, WAIT_MARK, read_trace
from perf.measure.worker import Run
from strategies.batch import Batch
from strategies.sharded import Sharded


def trace_rank(payload: dict[str, Any], context: RankContext) -> None:
    """Entry point of the server: one rank's whole profiled run."""
    task = jsonfile.convert(payload, TraceJob, source="job")
    TracedRun(task, context).measure(FileStore(str(context.store), context.world_size))


class TracedRun(Run):
    """One rank of a profiled run. The last of its plan's timed steps are profiled, those before are not."""

    def __init__(self, task: TraceJob, context: RankContext) -> None:
        super().__init__(task.job, context)
        self._trace = Path(task.folder) / f"{task.name}-rank{context.rank}.json.gz"

    def _steps(self, sharded: Sharded, batches: list[list[Batch]]) -> RankTrace:
        plan, losses = self._job.plan, list[Tensor]()
        mark_parts(sharded)
        ledger = Ledger(sharded.mesh, sharded.averaged)
        _, warmup_times_s = self._warm_up(sharded, batches, losses, IssueProbe(self._device), ledger)
        extra_work = ExtraWork(self._device, self._planted.extra_s(warmup_times_s[-1]))
        clock = StepClock(self._device)

        def step(number: int) -> None:
            self._one_step(number, sharded, batches[number], losses, clock, extra_work=extra_work)

        first = plan.warmup_steps
        first_profiled = first + plan.timed_steps - OPENING_STEPS - PROFILED_STEPS
        self._settle(sharded, batches, losses, clock, extra_work)
        for number in range(first, first_profiled):
            step(number)
        plain_times_s = clock.intervals_s()[self._job.cell.settling_steps(plan) :]
        dist.barrier()
        on_gpu = self._device.type == "cuda"
        activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * on_gpu]
        with marked_waits(), profile(activities=activities) as profiler:
            for number in range(first_profiled, first + plan.timed_steps):
                with record_function(STEP_MARK):
                    step(number)
            if on_gpu:
                torch.cuda.synchronize()
        if self._captured is not None:
            self._captured.free()
        self._trace.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(self._trace))
        found = timeline(read_trace(self._trace), on_gpu=on_gpu, opening_steps=OPENING_STEPS)
        return RankTrace(
            rank=self._context.rank,
            device=torch.cuda.get_device_name(self._device) if on_gpu else "cpu",
            plain_step_times_s=plain_times_s,
            steps=found.steps,
            ops=found.ops,
            trace=self._trace.name,
            trace_bytes=self._trace.stat().st_size,
        )


def mark_parts(sharded: Sharded) -> None:
    """Marks the two parts of every step that is made from now on."""
    for name, mark in (("forward_backward", FORWARD_BACKWARD_MARK), ("step", OPTIMIZER_MARK)):
        setattr(sharded, name, _marked(mark, getattr(sharded, name)))


@contextmanager
def marked_waits() -> Iterator[None]:
    """Marks where Python waits for a collective: torch has no op for it, only around what it calls for that."""
    wait = dist.Work.wait
    dist.Work.wait = _marked(WAIT_MARK, wait)  # type: ignore[method-assign]
    try:
        yield
    finally:
        dist.Work.wait = wait  # type: ignore[method-assign]


def _marked(mark: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def marked(*args: Any, **kwargs: Any) -> Any:
        with record_function(mark):
            return function(*args, **kwargs)

    return marked
