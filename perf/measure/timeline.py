"""Where the time of profiled steps went: pure functions of a list of events."""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise

from perf.measure.intervals import Interval, length, subtract, union, within
from perf.measure.trace_events import WAIT_MARK, Event, Kind
from strategies.value import Value

_HOST_COMMUNICATION = ("c10d::", "_c10d_functional::", "_c10d_functional_autograd::", WAIT_MARK)


class StepSplit(Value, frozen=True, kw_only=True):
    """The wall time of one step on one rank, in parts that add up to it.

    On a GPU, from the events of its streams. A step lasts from the end of everything that was launched before its mark
    until the end of everything launched before its mark's end: what a CUDA event between two steps would measure.

    - optimizer: the union of the kernels, but NCCL's, that were launched inside of the optimizer's mark.
    - compute: the union of all other kernels, copies and fills but NCCL's, where no kernel of the optimizer runs.
    - exposed communication: where a kernel of NCCL runs and nothing of the two above. It spins until the last rank has
      come: waiting for others is in here.
    - idle: where nothing runs on the device, most often since the host had launched nothing.

    On a CPU, from the thread that makes the steps. A step lasts as long as its mark. At each moment the innermost op
    decides.

    - optimizer: ops begun inside of the optimizer's mark, other than communication.
    - compute: all other ops but communication: c10d's ops and the waits for their results.
    - exposed communication: where such an op is the innermost, or gloo is at work and this thread in no op.
    - idle: neither: the interpreter between two ops, or a thread that sleeps.
    """

    compute_s: float
    exposed_communication_s: float
    optimizer_s: float | None
    """None: the step was a replay of a CUDA graph, whose kernels have one launch, outside of any mark, or has no such
    mark; the optimizer's are in `compute_s` then."""
    idle_s: float

    @property
    def step_time_s(self) -> float:
        return self.compute_s + self.exposed_communication_s + (self.optimizer_s or 0.0) + self.idle_s


class OpTime(Value, frozen=True, kw_only=True):
    """A kernel, or an op of the host, in one step."""

    name: str
    count: float
    """Calls."""
    time_s: float
    """Seconds: of kernels all together, also where they run at the same time; of ops without those inside."""


class Timeline(Value, frozen=True, kw_only=True):
    """What a trace says of its steps."""

    steps: tuple[StepSplit, ...]
    ops: tuple[OpTime, ...]
    """Of the shortest step, most time first."""


def timeline(events: Sequence[Event], *, on_gpu: bool, opening_steps: int) -> Timeline:
    """The steps of a trace and what ran in them.

    Args:
        opening_steps: the first steps, left out: the profiler itself starts in them, and the device was empty before.

    Raises:
        ValueError: a trace of a GPU has no kernels.
    """
    marks = sorted((event for event in events if event.kind is Kind.STEP), key=lambda event: event.start_ns)
    assert len(marks) > opening_steps, f"{len(marks)} steps in the trace"
    return (_on_device if on_gpu else _on_host)(events, marks, opening_steps)


def _on_device(events: Sequence[Event], marks: list[Event], opening_steps: int) -> Timeline:
    kernels = [event for event in events if event.kind is Kind.KERNEL]
    if not kernels:
        raise ValueError(
            "the profiler recorded no kernel on the GPU; end what else profiles it, such as DCGM or Nsight, and try "
            "again"
        )
    launches = {event.correlation: event for event in events if event.kind is Kind.LAUNCH}
    launch_of = [(kernel, launches.get(kernel.correlation)) for kernel in kernels]
    in_optimizer = union(event.span for event in events if event.kind is Kind.OPTIMIZER)
    communication = union(kernel.span for kernel in kernels if _is_nccl(kernel))
    of_optimizer = [
        kernel.span
        for kernel, launch in launch_of
        if not _is_nccl(kernel) and launch is not None and within(in_optimizer, (launch.start_ns, launch.start_ns + 1))
    ]
    optimizer = union(of_optimizer)
    compute = union(kernel.span for kernel in kernels if not _is_nccl(kernel))
    by_graph = any(launch is not None and "GraphLaunch" in launch.name for _, launch in launch_of)
    replayed = by_graph or not in_optimizer
    borders = [_end_of_launched_before(mark.start_ns, launch_of) for mark in marks[opening_steps:]]
    borders.append(_end_of_launched_before(marks[-1].end_ns, launch_of))
    windows = list(pairwise(borders))
    first_ns, end_ns = min(filter(_duration_ns, windows), key=_duration_ns, default=windows[0])
    times = Counter[str]()
    counts = Counter[str]()
    for kernel in kernels:
        if first_ns <= kernel.start_ns < end_ns:
            times[kernel.name] += kernel.duration_ns
            counts[kernel.name] += 1
    splits = tuple(_split(window, compute, optimizer, communication, replayed=replayed) for window in windows)
    return Timeline(steps=splits, ops=_op_times(times, counts))


def _end_of_launched_before(moment_ns: int, launch_of: Iterable[tuple[Event, Event | None]]) -> int:
    ends = [kernel.end_ns for kernel, launch in launch_of if launch is not None and launch.start_ns < moment_ns]
    # Before the first kernel ever the device begins with the host.
    return max(ends, default=moment_ns)


def _on_host(events: Sequence[Event], marks: list[Event], opening_steps: int) -> Timeline:
    thread, marks = marks[0].stream, marks[opening_steps:]
    optimizer_marks = union(event.span for event in events if event.kind is Kind.OPTIMIZER)
    ops = [event for event in events if event.kind is Kind.OP and event.stream == thread]
    pieces = innermost(ops)
    compute, optimizer, communication = [], [], [event.span for event in events if event.kind is Kind.TRANSFER]
    for op, piece in pieces:
        if op.name.startswith(_HOST_COMMUNICATION):
            communication.append(piece)
        else:
            compute.append(piece)
            if within(optimizer_marks, (op.start_ns, op.start_ns + 1)):
                optimizer.append(piece)
    unions = union(compute), union(optimizer), union(communication)
    times = Counter[str]()
    first_ns, end_ns = min((mark.span for mark in marks), key=_duration_ns)
    for op, piece in pieces:
        times[op.name] += length(within([piece], (first_ns, end_ns)))
    counts = Counter(op.name for op in ops if first_ns <= op.start_ns < end_ns)
    splits = tuple(_split(mark.span, *unions, replayed=False) for mark in marks)
    return Timeline(steps=splits, ops=_op_times(times, counts))


def _duration_ns(span: Interval) -> int:
    return span[1] - span[0]


def innermost(ops: Iterable[Event]) -> list[tuple[Event, Interval]]:
    """The time that each op of one thread has for itself: disjoint pieces, whose union is that of the ops.

    Each moment belongs to the op begun last of those that run.
    """
    pieces: list[tuple[Event, Interval]] = []
    stack: list[Event] = []
    now = 0

    def go_to(moment: int) -> None:
        nonlocal now
        if stack and now < moment:
            pieces.append((stack[-1], (now, moment)))
        now = max(now, moment)

    for op in sorted(ops, key=lambda event: (event.start_ns, -event.duration_ns)):
        while stack and stack[-1].end_ns <= op.start_ns:
            go_to(stack[-1].end_ns)
            stack.pop()
        go_to(op.start_ns)
        stack.append(op)
    while stack:
        go_to(stack[-1].end_ns)
        stack.pop()
    return pieces


def _split(
    window: Interval,
    compute: list[Interval],
    optimizer: list[Interval],
    communication: list[Interval],
    *,
    replayed: bool,
) -> StepSplit:
    """The parts of one window. `compute` holds the optimizer's time too."""
    busy = within(compute, window)
    of_optimizer = within(optimizer, window)
    exposed = subtract(within(communication, window), busy)
    idle = subtract(subtract([window], busy), exposed)
    return StepSplit(
        compute_s=length(busy if replayed else subtract(busy, of_optimizer)) / 1e9,
        exposed_communication_s=length(exposed) / 1e9,
        optimizer_s=None if replayed else length(of_optimizer) / 1e9,
        idle_s=length(idle) / 1e9,
    )


def _op_times(times_ns: Counter[str], counts: Counter[str]) -> tuple[OpTime, ...]:
    found = (
        OpTime(name=name, count=counts[name], time_s=time_ns / 1e9) for name, time_ns in times_ns.items() if time_ns
    )
    return tuple(sorted(found, key=lambda op: (-op.time_s, op.name)))


def _is_nccl(kernel: Event) -> bool:
    return "nccl" in kernel.name.lower()
