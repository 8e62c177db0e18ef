"""The instruments of a rank: the step clock, the memory peaks, what torch.compile did."""

import resource
import statistics
import sys
import time
from types import TracebackType
from typing import Self

import torch
from torch._dynamo.utils import counters

from perf.facts.record import CompileState, MemoryPeaks


class StepClock:
    """Marks the borders of steps; the time between two marks is a step, data and all.

    On a GPU the marks are events in the current stream: nothing waits for the device while steps are being timed.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._host_marks: list[float] = []
        self._device_marks: list[torch.cuda.Event] = []

    def mark(self) -> None:
        if self._on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._device_marks.append(event)
        else:
            self._host_marks.append(time.perf_counter())

    def intervals_s(self) -> tuple[float, ...]:
        """Seconds between successive marks. On a GPU waits for the device once."""
        if self._on_gpu:
            torch.cuda.synchronize()
            pairs = zip(self._device_marks, self._device_marks[1:], strict=False)
            return tuple(first.elapsed_time(second) / 1e3 for first, second in pairs)
        return tuple(second - first for first, second in zip(self._host_marks, self._host_marks[1:], strict=False))


class IssueProbe:
    """Times how long the host takes to issue a step to a GPU that has nothing to do.

    The host runs ahead of a busy GPU by some thousand launches at most, so a step that is issued in much less than the
    step time is bound by the GPU; one that is not may be bound by either.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._begun_s = 0.0
        self.time_s: float | None = None

    def __enter__(self) -> Self:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._begun_s = time.perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._device.type == "cuda":
            self.time_s = time.perf_counter() - self._begun_s


class ExtraWork:
    """Work that makes a step so many seconds longer.

    On a GPU these are matrix products: one at its power limit that only idled would gain clock for the rest of the step
    (of 5 % idle time, 4 % were left of a compiled step on an H200). A CPU sleeps.
    """

    SIDE = 4096

    def __init__(self, device: torch.device, seconds: float) -> None:
        self._device = device
        self._seconds = seconds
        self._num_products = 0
        if device.type == "cuda" and seconds:
            self._num_products = max(1, round(seconds / self._product_s()))  # a fault that does nothing proves nothing

    def do(self) -> None:
        if self._device.type == "cuda":
            self._multiply(self._num_products)
        elif self._seconds:
            time.sleep(self._seconds)

    def _multiply(self, num_products: int) -> None:
        if not num_products:
            return
        # Made anew each time, after a step has freed its gradients: held, it would add to the peak.
        factor = torch.randn(self.SIDE, self.SIDE, device=self._device, dtype=torch.bfloat16)
        product = torch.empty_like(factor)
        for _ in range(num_products):
            torch.mm(factor, factor, out=product)

    def _product_s(self) -> float:
        """Time of one product."""
        num_products, clock = 50, StepClock(self._device)
        self._multiply(num_products)
        clock.mark()
        self._multiply(num_products)
        clock.mark()
        return clock.intervals_s()[0] / num_products


def reset_memory_peaks(device: torch.device) -> None:
    """Forgets what warm-up and compiling needed: peaks count from here."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def memory_peaks(device: torch.device) -> MemoryPeaks:
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    if device.type != "cuda":
        return MemoryPeaks(allocated_bytes=None, reserved_bytes=None, resident_bytes=resident, allocator_retries=None)
    return MemoryPeaks(
        allocated_bytes=torch.cuda.max_memory_allocated(device),
        reserved_bytes=torch.cuda.max_memory_reserved(device),
        resident_bytes=resident,
        allocator_retries=torch.cuda.memory_stats(device)["num_alloc_retries"],
    )


class CompileProbe:
    """Counts what torch.compile has done since the process began, and since warm-up ended."""

    def __init__(self) -> None:
        self._warm_graphs = 0

    def warm(self) -> None:
        self._warm_graphs = _graphs()

    def state(self) -> CompileState:
        return CompileState(
            graphs=_graphs(),
            graph_breaks=sum(counters["graph_break"].values()),
            recompiles_after_warmup=_graphs() - self._warm_graphs,
        )


def compiling_s(warmup_times_s: tuple[float, ...], step_times_s: tuple[float, ...]) -> float:
    """Seconds of warm-up beyond what that many ordinary steps take."""
    if not step_times_s:
        return sum(warmup_times_s)
    return max(0.0, sum(warmup_times_s) - len(warmup_times_s) * statistics.median(step_times_s))


def _graphs() -> int:
    return int(counters["stats"]["unique_graphs"])
