"""The child's side of a run: build, warm up, time the steps, audit one more, write the record of this rank.

Forked by perf.measure.server; also runnable under torchrun, the road to more than one node:

    torchrun --nproc-per-node 2 -m perf.measure.worker JOB.json FOLDER
"""

import gc
import json
import math
import os
import sys
import time
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import FileStore, Store  # type: ignore[attr-defined]

from perf.facts import jsonfile
from perf.facts.fault import Planted
from perf.facts.job import Job
from perf.facts.provenance import imported
from perf.facts.record import Marks, RankRecord
from perf.measure.comms import Ledger
from perf.measure.probes import CompileProbe, ExtraWork, IssueProbe, StepClock, memory_peaks, reset_memory_peaks
from perf.measure.server import RankContext
from strategies.batch import Batch, synthetic_batch
from strategies.captured import CapturedStep
from strategies.registry import build, device_of
from strategies.sharded import BuildConfig, Sharded, train_step
from strategies.spec import STEPS_BEFORE_CAPTURE, Mode
from strategies.value import Value


def run_rank(payload: dict[str, Any], context: RankContext) -> None:
    """Entry point of the server: one rank's whole run."""
    job = jsonfile.convert(payload, Job, source="job")
    store = FileStore(str(context.store), context.world_size)
    Run(job, context).measure(store)


class Run:
    """One rank of one run."""

    def __init__(self, job: Job, context: RankContext) -> None:
        self._job = job
        self._context = context
        self._device = device_of(job.cell.device_kind, int(os.environ["LOCAL_RANK"]))
        self._planted = Planted(job.fault, context.rank)
        self._captured: CapturedStep | None = None
        self._marks: list[float] = []
        self._mark()

    def measure(self, store: Store | None) -> None:
        """Everything from the process group to the record. `store` None: rendezvous by torchrun's variables."""
        torch.set_num_threads(1)
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        if self._job.cell.mode is Mode.CUDAGRAPH:
            torch.cuda.set_stream(torch.cuda.Stream())
        self._join(store)
        sharded = self._build()
        batches = self._batches(sharded)
        record = self._steps(sharded, batches)
        jsonfile.write(self._context.folder / f"record-{self._context.rank}.json", record)
        self._context.report("recorded")
        self._planted.after_record()
        dist.destroy_process_group()

    def _join(self, store: Store | None) -> None:
        # Longer than the parent's deadline: the parent knows which rank did not answer, a group's own timeout does not.
        timeout = timedelta(seconds=self._job.deadline_s + 60)
        backend = "gloo" if self._device.type == "cpu" else "nccl"
        dist.init_process_group(
            backend,
            timeout=timeout,
            store=store,
            rank=self._context.rank,
            world_size=self._context.world_size,
            device_id=None if self._device.type == "cpu" else self._device,
        )
        self._context.report("group")
        self._mark()

    def _build(self) -> Sharded:
        checkpoint = self._job.plan.checkpoint
        config = BuildConfig(
            layout=self._job.cell.layout,
            device=self._device,
            checkpoint=Path(checkpoint) if checkpoint else None,
        )
        sharded = build(config)
        self._planted.before_first_step(sharded)
        self._context.report("built")
        self._mark()
        return sharded

    def _batches(self, sharded: Sharded) -> list[list[Batch]]:
        """This rank's micro-batches of every step, on the device before the first one is timed."""
        cell, plan = self._job.cell, self._job.plan
        steps = range(plan.warmup_steps + plan.timed_steps + 1)
        return [
            sharded.micro_batches(synthetic_batch(cell.shape, cell.workload, step=step, device=self._device))
            for step in steps
        ]

    def _steps(self, sharded: Sharded, batches: list[list[Batch]]) -> Value:
        """The steps of the run, and its record."""
        plan, compile_probe = self._job.plan, CompileProbe()
        losses: list[Tensor] = []
        issue_probe, ledger = IssueProbe(self._device), Ledger(sharded.mesh, sharded.averaged)
        start_norm, warmup_times_s = self._warm_up(sharded, batches, losses, issue_probe, ledger)
        extra_work = ExtraWork(self._device, self._planted.extra_s(warmup_times_s[-1]))
        self._mark()
        clock = StepClock(self._device)
        self._settle(sharded, batches, losses, clock, extra_work)
        compile_probe.warm()
        if self._captured is None:
            reset_memory_peaks(self._device)
        for step in range(plan.warmup_steps, plan.warmup_steps + self._planted.timed_steps(plan.timed_steps)):
            self._one_step(step, sharded, batches[step], losses, clock, extra_work=extra_work)
        times_s, num_settling = clock.intervals_s(), self._job.cell.settling_steps(plan)
        memory, compiled = memory_peaks(self._device), compile_probe.state()
        self._mark()
        end_norm = self._audit(sharded, batches[-1], ledger)
        self._mark()
        return RankRecord(
            rank=self._context.rank,
            device=torch.cuda.get_device_name(self._device) if self._device.type == "cuda" else "cpu",
            num_threads=torch.get_num_threads(),
            marks=Marks(**dict(zip(Marks.__struct_fields__, self._marks, strict=True))),
            warmup_times_s=warmup_times_s + times_s[:num_settling],
            step_times_s=times_s[num_settling:],
            losses=() if self._planted.losses_lost() else tuple(_finite(loss) for loss in losses),
            start_gradient_norm=_finite(start_norm),
            end_gradient_norm=_finite(end_norm),
            tokens_per_step=sum(batch.ids_BS.numel() for batch in batches[0]) if sharded.counts_tokens else 0,
            num_parameters=sharded.owned_numel(),
            memory=memory,
            ledger=ledger.entries(),
            arrivals_s=tuple(ledger.arrivals_s),
            compile=compiled,
            attention=tuple(sorted(ledger.attention)),
            imported=imported() if self._job.proves_imports else None,
            replays=self._captured.num_replays if self._captured else 0,
            issue_time_s=issue_probe.time_s,
        )

    def _warm_up(
        self,
        sharded: Sharded,
        batches: list[list[Batch]],
        losses: list[Tensor],
        issue_probe: IssueProbe,
        ledger: Ledger,
    ) -> tuple[Tensor, tuple[float, ...]]:
        """The steps before the pause, with the capture where the mode has one.

        Returns:
            The gradient norm of the first step, and the seconds that each took.
        """
        cell, plan = self._job.cell, self._job.plan
        num_steps, probed_step = plan.warmup_steps - cell.settling_steps(plan), cell.probed_step(plan)
        clock = StepClock(self._device)
        clock.mark()
        start_norm = self._first_step(sharded, batches[0], losses, clock)
        self._mark()
        for step in range(1, num_steps):
            if step == STEPS_BEFORE_CAPTURE and cell.mode is Mode.CUDAGRAPH:
                self._capture(sharded, batches[step], ledger)
            # Not the last one: its time is taken for an ordinary step's.
            with issue_probe if step == probed_step else nullcontext():
                self._one_step(step, sharded, batches[step], losses, clock)
        return start_norm, clock.intervals_s()

    def _settle(
        self,
        sharded: Sharded,
        batches: list[list[Batch]],
        losses: list[Tensor],
        clock: StepClock,
        extra_work: ExtraWork,
    ) -> None:
        """The pause, and the steps that follow it: as the timed ones, so that these find the GPU at work."""
        gc.collect()
        gc.disable()  # a collection in the middle of a step is noise of the interpreter, not of the strategy
        dist.barrier()
        clock.mark()
        num_steps = self._job.plan.warmup_steps
        for step in range(num_steps - self._job.cell.settling_steps(self._job.plan), num_steps):
            self._one_step(step, sharded, batches[step], losses, clock, extra_work=extra_work)

    def _first_step(self, sharded: Sharded, batch: list[Batch], losses: list[Tensor], clock: StepClock) -> Tensor:
        """The first step, with the global gradient norm that it starts from."""
        self._planted.in_step(0, sharded)
        losses.append(sharded.forward_backward(batch))
        norm = sharded.gradient_norm()
        sharded.step()
        clock.mark()
        self._context.report("step 0", step=0)
        return norm

    def _one_step(
        self,
        step: int,
        sharded: Sharded,
        batch: list[Batch],
        losses: list[Tensor],
        clock: StepClock,
        *,
        extra_work: ExtraWork | None = None,
    ) -> None:
        self._planted.in_step(step, sharded)
        losses.append(train_step(sharded, batch) if self._captured is None else self._captured(batch))
        if extra_work is not None:
            extra_work.do()
        clock.mark()
        self._context.report(f"step {step}", step=step)

    def _capture(self, sharded: Sharded, batch: list[Batch], ledger: Ledger) -> None:
        """Makes the step a CUDA graph. Its memory and collectives are those of the capture: replays ask for none."""
        dist.barrier()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        reset_memory_peaks(self._device)
        with ledger:
            self._captured = CapturedStep(sharded, batch)
        self._context.report("captured")

    def _audit(self, sharded: Sharded, batch: list[Batch], ledger: Ledger) -> Tensor:
        """One more step, not timed: its collectives are counted, if they were not, its gradient norm is returned."""
        dist.barrier()
        if self._captured is not None:
            self._captured.free()
        counted = ledger if self._captured is None else nullcontext()
        with counted:
            self._planted.in_step(self._job.plan.warmup_steps + self._job.plan.timed_steps, sharded)
            sharded.forward_backward(batch)
        norm = sharded.gradient_norm()
        with counted:
            sharded.step()
        return norm

    def _mark(self) -> None:
        self._marks.append(time.monotonic() - self._job.requested_at_s)


def _finite(value: Tensor) -> float | None:
    number = float(value)
    return number if math.isfinite(number) else None


def main(job_file: str, folder: str) -> None:
    """Under torchrun: the rank comes from its variables, the record goes to `folder`."""
    job = jsonfile.read(Path(job_file), Job)
    context = RankContext(
        rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]), folder=Path(folder), event_fd=2
    )
    Run(job, context).measure(None)
    print(json.dumps({"rank": context.rank, "record": f"record-{context.rank}.json"}))


if __name__ == "__main__":
    main(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)  # as the server's ranks: the interpreter's shutdown can hang after destroy_process_group
