"""The events of a profiler's trace, and the adapter that reads them from the file that torch exports.

Times are whole nanoseconds, the profiler's own resolution, so that the parts of a step add up to it exactly.
"""

import gzip
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec

from perf.measure.intervals import Interval

STEP_MARK = "step"
FORWARD_BACKWARD_MARK = "forward and backward"
OPTIMIZER_MARK = "optimizer"
WAIT_MARK = "wait for a collective"
"""Names of the annotations that a profiled run makes; the first one spans a whole step."""


class Kind(StrEnum):
    """What an event is."""

    STEP = "step"
    """A step, as the main thread of the host saw it."""
    OPTIMIZER = "optimizer"
    """The optimizer's part of it, on the same thread."""
    OP = "op"
    """An op on a thread of the host, with what it calls inside of it."""
    TRANSFER = "transfer"
    """A collective of gloo, from when it was begun until it was done."""
    LAUNCH = "launch"
    """A call of the CUDA runtime or driver."""
    KERNEL = "kernel"
    """Work on a GPU: a kernel, a copy, a fill."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One span of a trace."""

    name: str
    kind: Kind
    stream: int
    """Of a kernel; of an event of the host, its thread."""
    start_ns: int
    duration_ns: int
    correlation: int | None = None
    """What a launch and its kernels have in common; all kernels of a replayed graph have that of its one launch."""

    @property
    def end_ns(self) -> int:
        return self.start_ns + self.duration_ns

    @property
    def span(self) -> Interval:
        return self.start_ns, self.end_ns


class _Arguments(msgspec.Struct):
    """Of an entry of a trace; other keys are skipped."""

    stream: Any = None
    correlation: Any = None


class _Entry(msgspec.Struct):
    """An entry of a trace in the format of Chrome."""

    ph: str
    name: str = ""
    cat: str = ""
    tid: Any = None
    ts: float = 0.0
    """Microseconds."""
    dur: float = 0.0
    args: _Arguments = msgspec.field(default_factory=_Arguments)


class _Trace(msgspec.Struct):
    traceEvents: list[_Entry]


_CATEGORIES = {
    "kernel": Kind.KERNEL,
    "gpu_memcpy": Kind.KERNEL,
    "gpu_memset": Kind.KERNEL,
    "cuda_runtime": Kind.LAUNCH,
    "cuda_driver": Kind.LAUNCH,
    "cpu_op": Kind.OP,
}
"""Names that torch's profiler gives to groups of entries."""


def read_trace(path: Path) -> list[Event]:
    """The events of a gzipped trace as torch's profiler exports it; their times count from the first one."""
    with gzip.open(path) as file:
        trace = msgspec.json.decode(file.read(), type=_Trace)
    entries = [(entry, kind) for entry in trace.traceEvents if entry.ph == "X" and (kind := _kind(entry))]
    origin_us = min((entry.ts for entry, _ in entries), default=0.0)
    return [
        Event(
            name=entry.name,
            kind=kind,
            stream=int(entry.tid if entry.args.stream is None or kind is not Kind.KERNEL else entry.args.stream),
            start_ns=round((entry.ts - origin_us) * 1000),
            duration_ns=round(entry.dur * 1000),
            correlation=entry.args.correlation,
        )
        for entry, kind in entries
    ]


def _kind(entry: _Entry) -> Kind | None:
    if entry.cat != "user_annotation":
        return _CATEGORIES.get(entry.cat)
    if entry.name.startswith("gloo:"):
        return Kind.TRANSFER
    return {STEP_MARK: Kind.STEP, OPTIMIZER_MARK: Kind.OPTIMIZER, WAIT_MARK: Kind.OP}.get(entry.name)
