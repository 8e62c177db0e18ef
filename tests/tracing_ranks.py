"""What ranks do in the tests of evidence: runs, timed and profiled, of a build whose optimizer's step does more."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import FileStore

from perf.facts import jsonfile
from perf.facts.job import Job, TraceJob
from perf.measure.server import RankContext
from perf.measure.tracing import TracedRun
from perf.measure.worker import Run
from strategies.sharded import Sharded

SIDE, PRODUCTS = 512, 24
SENT = 2**25


def more_work(sharded: Sharded) -> Callable[..., None]:
    """Matrix products that no healthy step has under this name."""
    matrix = torch.ones(1, SIDE, SIDE)

    def multiply(*_: object) -> None:
        for _ in range(PRODUCTS):
            torch.baddbmm(matrix, matrix, matrix)

    return multiply


def more_communication(sharded: Sharded) -> Callable[..., None]:
    """An all-reduce of `SENT` float32 values that a healthy step does without."""
    values, group = torch.zeros(SENT), sharded.mesh.get_group("dp")
    return lambda *_: dist.all_reduce(values, group=group)


class SlowBuild:
    """Of a run: its optimizer's step ends with something more."""

    extra: Callable[[Sharded], Callable[..., None]]

    def _build(self) -> Sharded:
        sharded = super()._build()
        sharded.optimizer.register_step_post_hook(type(self).extra(sharded))
        return sharded


class SlowTraced(SlowBuild, TracedRun):
    extra = staticmethod(more_work)


class TalkativeTraced(SlowBuild, TracedRun):
    extra = staticmethod(more_communication)


class Talkative(SlowBuild, Run):
    extra = staticmethod(more_communication)


def slow_optimizer(payload: dict[str, Any], context: RankContext) -> None:
    """Entry point of the server: as perf.measure.tracing:trace_rank."""
    _measure(SlowTraced(jsonfile.convert(payload, TraceJob, source="job"), context), context)


def extra_collective(payload: dict[str, Any], context: RankContext) -> None:
    """Entry point of the server: as perf.measure.tracing:trace_rank."""
    _measure(TalkativeTraced(jsonfile.convert(payload, TraceJob, source="job"), context), context)


def extra_collective_timed(payload: dict[str, Any], context: RankContext) -> None:
    """Entry point of the server: as perf.measure.worker:run_rank."""
    _measure(Talkative(jsonfile.convert(payload, Job, source="job"), context), context)


def _measure(run: Run, context: RankContext) -> None:
    run.measure(FileStore(str(context.store), context.world_size))
