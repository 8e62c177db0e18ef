"""What the ranks of a node reach: matrix products, launches, links. Runs in ranks, forked by perf.measure.server.

All ranks work at once, as those of a training step do: on a node they share power, heat and the host's cores.
"""

import gc
import math
import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import FileStore  # type: ignore[attr-defined]

from perf.facts import jsonfile
from perf.facts.rates import CeilingJob, Protocol, RankTimes
from perf.measure.probes import StepClock
from perf.measure.server import RankContext
from strategies.registry import device_of

GEMM_S = 0.3
"""Seconds of products that are timed; about a third as many go before, in which a GPU finds its clock."""
LEAST_PRODUCTS, MOST_PRODUCTS = 5, 1000
LAUNCH_REPEATS = 20
LINK_REPEATS = 20
SMALL_REPEATS = 50
LINK_WARM_UP = 3
HEAD_START_PRODUCTS = 20
"""Queued before small all-reduces, so that the GPU never waits for the host to issue one."""
TINY = 2.0**-100
"""A sum over ranks grows with every repeat in place: from here it stays finite in float32."""


def measure_rank(payload: dict[str, Any], context: RankContext) -> None:
    """Entry point of the server: measures a `CeilingJob` on this rank, and writes its `RankTimes`."""
    job = jsonfile.convert(payload, CeilingJob, source="ceilings")
    bench = RankBench(job.protocol, context)
    bench.join(job.deadline_s)
    times = bench.measure()
    jsonfile.write(context.folder / f"record-{context.rank}.json", times)
    context.report("recorded")
    if dist.is_initialized():
        dist.destroy_process_group()


class RankBench:
    """One rank with its device, and its neighbours if it has any."""

    def __init__(self, protocol: Protocol, context: RankContext) -> None:
        self._protocol = protocol
        self._context = context
        self._device = device_of(protocol.device_kind, int(os.environ["LOCAL_RANK"]))
        self._on_gpu = self._device.type == "cuda"
        torch.set_num_threads(1)
        if self._on_gpu:
            torch.cuda.set_device(self._device)
        side, dtype = protocol.gemm_side, getattr(torch, protocol.gemm_dtype)
        # Random: of zeros, a GPU at its power limit multiplies more in a second than it ever does of weights.
        torch.manual_seed(context.rank)
        self._left, self._right = (torch.randn(side, side, device=self._device, dtype=dtype) for _ in range(2))
        self._product = torch.empty_like(self._left)

    def join(self, deadline_s: float) -> None:
        """The process group, where there are several ranks."""
        if self._context.world_size == 1:
            return
        dist.init_process_group(
            "nccl" if self._on_gpu else "gloo",
            # Longer than the parent's deadline: the parent knows which rank did not answer, a group's own does not.
            timeout=timedelta(seconds=deadline_s + 60),
            store=FileStore(str(self._context.store), self._context.world_size),
            rank=self._context.rank,
            world_size=self._context.world_size,
            device_id=self._device if self._on_gpu else None,
        )
        self._context.report("group")

    def measure(self) -> RankTimes:
        gc.collect()
        gc.disable()
        gemm_times_s = self._gemm()
        launch_times_s = self._launches()
        linked, small = self._context.world_size > 1, self._protocol.small_payload_bytes
        return RankTimes(
            rank=self._context.rank,
            device=torch.cuda.get_device_name(self._device) if self._on_gpu else "cpu",
            gemm_times_s=gemm_times_s,
            launch_times_s=launch_times_s,
            all_reduce_times_s=self._all_reduce(self._protocol.payload_bytes, LINK_REPEATS) if linked else (),
            small_all_reduce_times_s=self._all_reduce(small, SMALL_REPEATS) if linked and small is not None else (),
            p2p_times_s=self._p2p() if linked else (),
        )

    def _gemm(self) -> tuple[float, ...]:
        """Seconds of each product."""
        self._context.report("gemm")
        self._multiply()  # loads the kernel
        self._meet()
        pilot_s = sorted(_timed(self._device, self._multiply, 3))[1]
        num_products = min(MOST_PRODUCTS, max(LEAST_PRODUCTS, math.ceil(GEMM_S / max(pilot_s, 1e-9))))
        for _ in range(num_products // 3):
            self._multiply()
        return _timed(self._device, self._multiply, num_products)

    def _launches(self) -> tuple[float, ...]:
        """Seconds that the host takes to issue one kernel which does next to nothing; on a CPU, to do it."""
        self._context.report("launches")
        number, num_launches = torch.ones(1, device=self._device), self._protocol.launches
        times = []
        self._meet()
        for _ in range(1 + LAUNCH_REPEATS):
            self._wait()
            begun_s = time.perf_counter()
            for _ in range(num_launches):
                number.add_(1.0)
            times.append((time.perf_counter() - begun_s) / num_launches)
        self._wait()
        return tuple(times[1:])

    def _all_reduce(self, payload_bytes: int, repeats: int) -> tuple[float, ...]:
        """Seconds of each sum over all ranks, in place."""
        self._context.report(f"all_reduce of {payload_bytes} bytes")
        payload = self._payload(payload_bytes).mul_(TINY)
        for _ in range(LINK_WARM_UP):
            dist.all_reduce(payload)
        self._meet()
        if self._on_gpu and payload_bytes == self._protocol.small_payload_bytes:
            for _ in range(HEAD_START_PRODUCTS):
                self._multiply()
        dist.all_reduce(payload)  # takes what the ranks are apart, so that the first timed one does not
        return _timed(self._device, lambda: dist.all_reduce(payload), repeats)

    def _p2p(self) -> tuple[float, ...]:
        """Seconds of sending to the next rank of a ring while receiving from the one before."""
        self._context.report("p2p")
        rank, num_ranks = self._context.rank, self._context.world_size
        outgoing = self._payload(self._protocol.payload_bytes)
        incoming = torch.empty_like(outgoing)

        def exchange() -> None:
            works = dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, outgoing, (rank + 1) % num_ranks),
                    dist.P2POp(dist.irecv, incoming, (rank - 1) % num_ranks),
                ]
            )
            for work in works:
                work.wait()

        for _ in range(LINK_WARM_UP):
            exchange()
        self._meet()
        exchange()
        return _timed(self._device, exchange, LINK_REPEATS)

    def _payload(self, payload_bytes: int) -> Tensor:
        """Random float32 of so many bytes."""
        return torch.randn(payload_bytes // 4, device=self._device)

    def _multiply(self) -> None:
        torch.mm(self._left, self._right, out=self._product)

    def _meet(self) -> None:
        """Until every rank is here and its device has nothing to do."""
        if dist.is_initialized():
            dist.barrier()
        self._wait()

    def _wait(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize(self._device)


def _timed(device: torch.device, work: Callable[[], object], repeats: int) -> tuple[float, ...]:
    """Seconds of each repeat: the device's on a GPU, which is not waited for between them."""
    clock = StepClock(device)
    clock.mark()
    for _ in range(repeats):
        work()
        clock.mark()
    return clock.intervals_s()
