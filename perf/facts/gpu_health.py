"""What the driver says of GPUs at rest: strangers on them, clocks, power limits, and memory that has failed.

No torch. What the driver does not tell is None, which reads "unknown"; nothing here ever fails.
"""

from typing import Any

import pynvml

from perf.facts.gpus import POWER_CAP, THROTTLES, Gpu, is_open, processes, tell
from strategies.value import Value

USER_CLOCKS = "clocks set by the user"
CLOCK_REASONS = {0x01: "idle", 0x02: USER_CLOCKS, 0x10: "sync boost", 0x100: "display clocks"} | POWER_CAP | THROTTLES
"""Bits of the driver's reasons why clocks are not higher."""


class GpuHealth(Value, frozen=True, kw_only=True):
    """One GPU before anything of ours runs on it."""

    uuid: str
    name: str
    power_limit_w: int | None = None
    default_power_limit_w: int | None = None
    sm_clock_mhz: int | None = None
    max_sm_clock_mhz: int | None = None
    temperature_c: int | None = None
    used_bytes: int | None = None
    clock_reasons: tuple[str, ...] | None = None
    """Why the clocks are not higher."""
    foreign_pids: tuple[int, ...] | None = None
    uncorrected_ecc_errors: int | None = None
    """Since the driver was loaded."""
    remapped_rows: int | None = None
    """Rows of memory that uncorrected errors have cost so far."""
    remap_pending: bool | None = None
    """Rows wait for a reset of the GPU to be replaced."""
    remap_failed: bool | None = None
    """A row could not be replaced."""
    retirement_pending: bool | None = None
    """As `remap_pending`, on GPUs older than A100, which retire pages."""

    @property
    def memory_is_known(self) -> bool:
        """Whether the driver told anything of failed memory."""
        told = (self.uncorrected_ecc_errors, self.remap_pending, self.remap_failed, self.retirement_pending)
        return any(value is not None for value in told)


def health_of(gpus: tuple[Gpu, ...]) -> tuple[GpuHealth, ...]:
    """The GPUs as they are now; all unknown without a driver."""
    if not gpus or not is_open():
        return tuple(GpuHealth(uuid=gpu.uuid, name=gpu.name) for gpu in gpus)
    found = tuple(_health(gpu) for gpu in gpus)
    tell(pynvml.nvmlShutdown)
    return found


def driver_version() -> str | None:
    """Of the NVIDIA driver; None without one."""
    if not is_open():
        return None
    version = tell(pynvml.nvmlSystemGetDriverVersion)
    tell(pynvml.nvmlShutdown)
    return version.decode() if isinstance(version, bytes) else version


def _health(gpu: Gpu) -> GpuHealth:
    handle = tell(lambda: pynvml.nvmlDeviceGetHandleByUUID(gpu.uuid))
    if handle is None:
        return GpuHealth(uuid=gpu.uuid, name=gpu.name)
    memory = tell(lambda: pynvml.nvmlDeviceGetMemoryInfo(handle))
    reasons = tell(lambda: pynvml.nvmlDeviceGetCurrentClocksEventReasons(handle))
    retirement = tell(lambda: pynvml.nvmlDeviceGetRetiredPagesPendingStatus(handle))
    return GpuHealth(
        uuid=gpu.uuid,
        name=gpu.name,
        power_limit_w=gpu.power_limit_w,
        default_power_limit_w=_watts(tell(lambda: pynvml.nvmlDeviceGetPowerManagementDefaultLimit(handle))),
        sm_clock_mhz=tell(lambda: pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM)),
        max_sm_clock_mhz=tell(lambda: pynvml.nvmlDeviceGetMaxClockInfo(handle, pynvml.NVML_CLOCK_SM)),
        temperature_c=tell(lambda: pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU)),
        used_bytes=None if memory is None else memory.used,
        clock_reasons=None if reasons is None else tuple(name for bit, name in CLOCK_REASONS.items() if reasons & bit),
        foreign_pids=processes(gpu.uuid),
        uncorrected_ecc_errors=_uncorrected(handle),
        retirement_pending=None if retirement is None else bool(retirement),
        **_remapping(handle),
    )


def _uncorrected(handle: Any) -> int | None:
    return tell(
        lambda: pynvml.nvmlDeviceGetTotalEccErrors(
            handle, pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC
        )
    )


def _remapping(handle: Any) -> dict[str, Any]:
    """Row remapping, as GPUs since A100 have it."""
    rows = tell(lambda: pynvml.nvmlDeviceGetRemappedRows(handle))
    if rows is None:
        return {}
    _, uncorrected, pending, failed = rows
    return {"remapped_rows": uncorrected, "remap_pending": bool(pending), "remap_failed": bool(failed)}


def _watts(milliwatts: int | None) -> int | None:
    return None if milliwatts is None else round(milliwatts / 1000)
