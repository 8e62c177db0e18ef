"""A profiled run of a build: how it is made, and its record. No torch: the ranks' side is perf.measure.tracing."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from perf.facts.cell import Cell, SamplingPlan
from perf.facts.fault import Fault
from perf.facts.job import OPENING_STEPS, PLAIN_STEPS, PROFILED_STEPS, TRACE_ENTRY, Job, TraceJob
from perf.facts.record import Software
from perf.measure.launch import Launcher
from perf.measure.timeline import OpTime, StepSplit
from strategies.value import Value


class RankTrace(Value, frozen=True, kw_only=True):
    """What the profiler saw on one rank."""

    rank: int
    device: str
    plain_step_times_s: tuple[float, ...]
    """Of the steps just before the profiler started."""
    steps: tuple[StepSplit, ...]
    ops: tuple[OpTime, ...]
    """Of the shortest step, most time first: on a GPU its kernels, on a CPU the ops of the thread that makes it."""
    trace: str
    """File name of the trace, beside the record."""
    trace_bytes: int

    @property
    def shortest(self) -> StepSplit:
        """The step that tells most: what the profiler and the host add to some steps makes these longer.

        Steps of `pp_1f1b` took 386, 398 and 248 ms under the profiler, and 232 ms without. A step of no length is one
        whose kernels the profiler lost. Another rank's shortest step may be another one.
        """
        found = (step for step in self.steps if step.step_time_s > 0)
        return min(found, key=lambda step: step.step_time_s, default=self.steps[0])


class Evidence(Value, frozen=True, kw_only=True):
    """One profiled run of a cell."""

    SCHEMA_VERSION: ClassVar[int] = 1
    schema_version: int = 1
    cell: Cell
    software: Software
    ranks: tuple[RankTrace, ...]
    fault: Fault | None = None

    @property
    def critical(self) -> RankTrace:
        """The rank that waits least: what makes it slow makes the others wait."""
        return min(self.ranks, key=lambda rank: rank.shortest.exposed_communication_s)

    @property
    def tells_optimizer(self) -> bool:
        return all(step.optimizer_s is not None for rank in self.ranks for step in rank.steps)


def collect(
    launcher: Launcher,
    cell: Cell,
    plan: SamplingPlan,
    variables: dict[str, str],
    folder: Path,
    name: str,
    *,
    fault: Fault | None = None,
    deadline_s: float = 600.0,
    on_event: Callable[[dict[str, Any]], None] = lambda _: None,
) -> Evidence:
    """One profiled run of a cell by the build that `launcher` serves; its traces are left in `folder`.

    Args:
        plan: of the test run; its warm-up and its weights hold here too.
        variables: of the cell's ranks, as its timed runs have them.
        name: of the arm, `candidate` or `reference`: traces are called `<name>-rank<rank>.json.gz`.
        fault: what was planted in the timed runs.

    Raises:
        LaunchError: the run failed, as runs do; also where the served build is too old to have `perf.measure.tracing`.
        ValueError: the served build writes records of another kind.
    """
    steps = PLAIN_STEPS + OPENING_STEPS + PROFILED_STEPS
    plan = msgspec.structs.replace(cell.plan(plan), timed_steps=steps, runs=1)
    launcher.start()
    job = Job(cell=cell, plan=plan, requested_at_s=time.monotonic(), deadline_s=deadline_s, fault=fault)
    ranks, _ = launcher.run(
        TRACE_ENTRY,
        TraceJob(job=job, folder=str(folder.resolve()), name=name),
        world_size=cell.world_size,
        record=RankTrace,
        deadline_s=deadline_s,
        variables=variables,
        on_event=on_event,
    )
    return Evidence(cell=cell, software=launcher.start().software, ranks=tuple(ranks), fault=fault)
