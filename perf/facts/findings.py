"""What is to be said of a node's state: faults, warnings, and what could not be read. No torch."""

import os
from collections.abc import Iterator
from enum import StrEnum

from perf.facts.gpu_health import USER_CLOCKS, GpuHealth
from perf.facts.gpus import THROTTLES, GpuUse
from strategies.value import Value

SHARED_MEMORY = "/dev/shm"  # noqa: S108 - asked how full it is, not written to
LEAST_SHARED_BYTES = 2**30
"""NCCL and gloo put their buffers there, some MiB for each pair of ranks; data loaders take more."""
IDLE_BYTES = 2 * 2**30
"""More memory than this on a GPU without processes belongs to one that cannot be seen from here."""


class Severity(StrEnum):
    """How bad a finding is."""

    FAULT = "fault"
    """What is measured on this node now would be its state."""
    WARNING = "warning"
    """Worth knowing; nothing is refused for it."""
    UNKNOWN = "unknown"
    """Could not be read: neither good nor bad."""


class Finding(Value, frozen=True, kw_only=True):
    """One thing to say about a node."""

    severity: Severity
    text: str


def shared_memory_free_bytes() -> int | None:
    """Of /dev/shm; None where there is none."""
    try:
        state = os.statvfs(SHARED_MEMORY)
    except OSError:
        return None
    return state.f_bavail * state.f_frsize


def findings(
    gpus: tuple[GpuHealth, ...], uses: tuple[GpuUse, ...], shared_memory: int | None, num_lost: int = 0
) -> Iterator[Finding]:
    """What is to be said of a node's state. `uses` may be empty; `shared_memory` is in bytes, None: unknown."""
    if num_lost:
        yield Finding(
            severity=Severity.WARNING,
            text=f"GPUs of this node that do not answer the driver: {num_lost}; the kernel's log says why "
            "(`dmesg | grep -i xid`); reset them, or restart the node",
        )
    throttled = {use.uuid: use.throttled for use in uses}
    for index, gpu in enumerate(gpus):
        for severity, text in (*_at_rest(gpu, throttled.get(gpu.uuid, ())), *_memory(gpu)):
            yield Finding(severity=severity, text=f"GPU {index} ({gpu.uuid}): {text}")
    if shared_memory is None:
        yield Finding(severity=Severity.UNKNOWN, text=f"{SHARED_MEMORY} cannot be read")
    elif shared_memory < LEAST_SHARED_BYTES:
        yield Finding(
            severity=Severity.WARNING,
            text=f"{SHARED_MEMORY} has {shared_memory / 2**20:.0f} MiB free, less than "
            f"{LEAST_SHARED_BYTES / 2**20:.0f}: ranks may fail to talk; in a container, give it --shm-size=8g or more",
        )


def _at_rest(gpu: GpuHealth, throttled: tuple[str, ...]) -> Iterator[tuple[Severity, str]]:
    if gpu.foreign_pids:
        pids = ", ".join(map(str, gpu.foreign_pids))
        yield Severity.FAULT, f"not alone, used by process {pids}; wait for it or choose others"
    elif gpu.foreign_pids is None:
        yield Severity.UNKNOWN, "whether others use it cannot be read"
    elif gpu.used_bytes is not None and gpu.used_bytes > IDLE_BYTES:
        yield Severity.WARNING, f"{gpu.used_bytes / 2**30:.1f} GiB in use, by no process that can be seen from here"
    resting = [name for name in gpu.clock_reasons or () if name in THROTTLES.values()]
    if reasons := list(dict.fromkeys([*resting, *throttled])):
        yield Severity.FAULT, f"throttled: {', '.join(reasons)}; look at its cooling and power supply"
    elif gpu.clock_reasons is None:
        yield Severity.UNKNOWN, "whether it is throttled cannot be read"
    if USER_CLOCKS in (gpu.clock_reasons or ()):
        yield Severity.WARNING, f"{USER_CLOCKS}: it runs below what it could; `nvidia-smi -rgc -rac` undoes it"
    limit_w, default_w = gpu.power_limit_w, gpu.default_power_limit_w
    if limit_w is not None and default_w is not None and limit_w != default_w:
        yield Severity.WARNING, f"power limit {limit_w} W, default {default_w} W; it is a machine of its own"


def _memory(gpu: GpuHealth) -> Iterator[tuple[Severity, str]]:
    """Failed memory: what the kernel logs as XID 48, 63, 64, 94 and 95, as far as the driver's counters tell."""
    if gpu.uncorrected_ecc_errors:
        yield Severity.FAULT, f"{gpu.uncorrected_ecc_errors} uncorrected ECC errors since the driver was loaded"
    if gpu.remap_pending or gpu.retirement_pending:
        yield Severity.FAULT, "failed memory waits to be replaced: reset the GPU"
    if gpu.remap_failed:
        yield Severity.FAULT, "failed memory could not be replaced: the GPU needs service"
    if not gpu.memory_is_known:
        yield Severity.UNKNOWN, "ECC errors and remapped rows cannot be read; XID errors stand in the kernel's log"
