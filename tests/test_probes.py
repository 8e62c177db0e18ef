"""Room perf/measure/probes.py: the step clock's intervals, the memory peaks of a device, and what torch.compile did."""

from types import SimpleNamespace

import pytest
import torch

from perf.measure import probes as room
from perf.measure.probes import (
    CompileProbe,
    ExtraWork,
    IssueProbe,
    StepClock,
    compiling_s,
    memory_peaks,
    reset_memory_peaks,
)
from tests.equivalence import CPU

GPU = torch.device("cuda", 0)
MIB = 2**20


class FakeEvent:
    """A CUDA event whose moments, in milliseconds, follow a script."""

    moments: list[float] = []  # noqa: RUF012 - set by the test

    def __init__(self, *, enable_timing):
        assert enable_timing

    def record(self):
        self.at_ms = self.moments.pop(0)

    def elapsed_time(self, later):
        return later.at_ms - self.at_ms

    def synchronize(self):
        waits.append("event")


waits: list[str] = []


# Importing torch's compiler warns of torch's own old habits; which, depends on the version.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture
def gpu(monkeypatch):
    """A GPU as far as the step clock can tell; `waits` lists who waited for it."""
    waits.clear()
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waits.append("all"))


@pytest.fixture
def compiler():
    """torch.compile as in a fresh process, before and after the test."""
    torch._dynamo.reset()
    room.counters.clear()
    yield
    torch._dynamo.reset()
    room.counters.clear()


def test_issue_time_is_the_hosts_alone_and_begins_with_an_idle_gpu(monkeypatch):
    order = []
    readings = iter([5.0, 5.25])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: order.append("idle"))
    monkeypatch.setattr(room, "time", SimpleNamespace(perf_counter=lambda: order.append("read") or next(readings)))
    with (probe := IssueProbe(GPU)):
        order.append("step")
    assert order == ["idle", "read", "step", "read"]
    assert probe.time_s == 0.25


def test_issue_time_of_a_cpu_is_unknown():
    with (probe := IssueProbe(CPU)):
        pass
    assert probe.time_s is None


@pytest.mark.parametrize(
    ("marks", "intervals"),
    [([], ()), ([5.0], ()), ([5.0, 5.5], (0.5,)), ([5.0, 5.5, 7.5, 7.75], (0.5, 2.0, 0.25))],
)
def test_intervals_are_the_times_between_successive_marks(monkeypatch, marks, intervals):
    readings = iter(marks)
    monkeypatch.setattr(room, "time", SimpleNamespace(perf_counter=lambda: next(readings)))
    clock = StepClock(CPU)
    for _ in marks:
        clock.mark()
    assert clock.intervals_s() == intervals
    assert clock.intervals_s() == intervals


def test_extra_work_on_a_cpu_takes_its_seconds():
    clock = StepClock(CPU)
    clock.mark()
    ExtraWork(CPU, 0.05).do()
    clock.mark()
    assert 0.05 <= clock.intervals_s()[0] < 0.5


def test_intervals_on_a_gpu_are_seconds_between_events_and_only_reading_them_waits(gpu, monkeypatch):
    monkeypatch.setattr(FakeEvent, "moments", [1000.0, 1500.0, 3500.0])
    clock = StepClock(GPU)
    for _ in range(3):
        clock.mark()
    assert waits == []
    assert clock.intervals_s() == (0.5, 2.0)
    assert waits == ["all"]


def test_memory_peaks_of_a_cpu_have_no_allocator_values():
    before = memory_peaks(CPU)
    assert (before.allocated_bytes, before.reserved_bytes, before.allocator_retries) == (None, None, None)
    torch.ones((before.resident_bytes + 64 * MIB) // 4)  # more than the process ever needed
    assert memory_peaks(CPU).resident_bytes > before.resident_bytes + 32 * MIB


def test_memory_peaks_of_a_gpu_are_the_allocators(monkeypatch):
    resets = []
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 100 if device == GPU else 0)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 200 if device == GPU else 0)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: {"num_alloc_retries": 3 if device == GPU else 0})
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", resets.append)
    peaks = memory_peaks(GPU)
    assert (peaks.allocated_bytes, peaks.reserved_bytes, peaks.allocator_retries) == (100, 200, 3)
    reset_memory_peaks(CPU)
    assert resets == []
    reset_memory_peaks(GPU)
    assert resets == [GPU]


def test_compile_probe_counts_graphs_breaks_and_recompiles_after_warm_up(compiler):
    @torch.compile(backend="eager", dynamic=False)
    def double(x):
        return 2 * x

    @torch.compile(backend="eager", dynamic=False)
    def broken(x):
        x = x + 1
        torch._dynamo.graph_break()
        return x * 2

    probe = CompileProbe()
    assert (probe.state().graphs, probe.state().graph_breaks) == (0, 0)
    double(torch.ones(2))
    probe.warm()
    double(torch.zeros(2))
    assert (probe.state().graphs, probe.state().recompiles_after_warmup) == (1, 0)
    double(torch.ones(3))
    double(torch.ones(4))
    assert (probe.state().graphs, probe.state().recompiles_after_warmup) == (3, 2)
    assert probe.state().graph_breaks == 0
    broken(torch.ones(2))
    assert (probe.state().graphs, probe.state().graph_breaks) == (5, 1)


@pytest.mark.parametrize(
    ("warmup_times_s", "step_times_s", "seconds"),
    [
        ((30.0, 3.0, 1.0), (1.0, 1.0, 5.0), 31.0),  # median step 1 s: 34 s less 3 x 1 s
        ((1.0, 1.0), (1.0, 1.0), 0.0),
        ((0.5, 0.5), (1.0,), 0.0),  # never negative
        ((30.0, 2.0), (), 32.0),  # a run that only compiles
    ],
)
def test_compiling_is_warm_up_beyond_ordinary_steps(warmup_times_s, step_times_s, seconds):
    assert compiling_s(warmup_times_s, step_times_s) == seconds
