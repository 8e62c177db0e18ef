"""NVIDIA's management library: which GPUs there are, how they are linked, what state they are in while a run goes on.

No torch. What the driver does not tell is None, which reads "unknown"; nothing here ever fails a run.
"""

import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

import pynvml

from strategies.value import Value

T = TypeVar("T")
SAMPLE_S = 0.5
MAX_NVLINKS = 18
# Bits of the driver's reasons to lower clocks. The first ones mean that the GPU could not do its work.
THROTTLES = {
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
}
POWER_CAP = {0x04: "software power cap"}
"""Normal under load at the power limit: recorded, no fault."""


class Gpu(Value, frozen=True, kw_only=True):
    """One GPU, or one MIG slice of one."""

    name: str
    uuid: str
    memory_gib: int
    """0 where the driver does not say, as on GPUs that share the host's memory."""
    power_limit_w: int | None
    num_nvlinks: int | None = None
    """Active NVLinks; None when the driver does not say."""
    is_mig: bool = False


class GpuUse(Value, frozen=True, kw_only=True):
    """One GPU over one run, sampled twice a second or, in a preflight, ten times."""

    uuid: str
    sm_clock_mhz: tuple[int, int] | None
    """Lowest and highest."""
    memory_clock_mhz: int | None
    temperature_c: int | None
    """Highest."""
    power_w: int | None
    """Highest."""
    throttled: tuple[str, ...]
    """Reasons for which the GPU could not do its work."""
    power_capped: bool | None
    used_bytes: int | None
    """Highest of the driver's own count: contexts, NCCL and all."""
    total_bytes: int | None
    foreign_pids: tuple[int, ...] | None
    """Processes that used the GPU before the run began."""


def visible_gpus(visible: str | None) -> tuple[Gpu, ...]:
    """The GPUs that a CUDA_VISIBLE_DEVICES value names (None: not set, all of them); () without a driver.

    One that does not answer is left out.
    """
    if not is_open():
        return ()
    try:
        count = tell(pynvml.nvmlDeviceGetCount) or 0
        handles = _answers(partial(pynvml.nvmlDeviceGetHandleByIndex, index) for index in range(count))
        gpus = _answers(partial(_gpu, handle) for handle in handles)
        slices = _answers(partial(_gpu, part, is_mig=True) for handle in handles for part in _mig_slices(handle))
    finally:
        tell(pynvml.nvmlShutdown)
    return select_gpus(gpus, visible, slices)


def num_lost() -> int:
    """GPUs that the driver counts and cannot reach; not those that it keeps from this container."""
    if not is_open():
        return 0
    lost = 0
    for index in range(tell(pynvml.nvmlDeviceGetCount) or 0):
        try:
            pynvml.nvmlDeviceGetHandleByIndex(index)
        except pynvml.NVMLError as error:
            lost += error.value != pynvml.NVML_ERROR_NO_PERMISSION
    tell(pynvml.nvmlShutdown)
    return lost


def select_gpus(gpus: list[Gpu], visible: str | None, slices: list[Gpu] | None = None) -> tuple[Gpu, ...]:
    """The GPUs that CUDA would show, in its order.

    Indices name whole GPUs; beginnings of UUIDs name GPUs or, as `MIG-...`, slices. CUDA stops at the first name that
    it does not know or has met before.
    """
    if visible is None:
        return tuple(gpus)
    chosen: list[Gpu] = []
    for name in (part.strip() for part in visible.split(",")):
        if name.isdigit():
            matching = [gpus[int(name)]] if int(name) < len(gpus) else []
        else:
            matching = [gpu for gpu in [*gpus, *(slices or [])] if name and gpu.uuid.startswith(name)]
        if len(matching) != 1 or matching[0] in chosen:
            break
        chosen += matching
    return tuple(chosen)


class GpuWatch:
    """Samples the GPUs of a run from a thread of this process, from before its ranks start until they are gone.

    Args:
        every_s: seconds between samples; None: `SAMPLE_S`, which is too seldom for what lasts a second.
    """

    def __init__(self, gpus: tuple[Gpu, ...], every_s: float | None = None) -> None:
        self._gpus = gpus
        self._every_s = SAMPLE_S if every_s is None else every_s
        self._samples: dict[str, list[dict[str, Any]]] = {gpu.uuid: [] for gpu in gpus}
        self._foreign: dict[str, tuple[int, ...] | None] = {}
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        if self._gpus and is_open():
            self._foreign = {gpu.uuid: processes(gpu.uuid) for gpu in self._gpus}
            self._thread = threading.Thread(target=self._watch, daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            tell(pynvml.nvmlShutdown)

    def uses(self) -> tuple[GpuUse, ...]:
        """What was seen, one for each GPU; call it after the run."""
        return tuple(_use(gpu.uuid, self._samples[gpu.uuid], self._foreign.get(gpu.uuid)) for gpu in self._gpus)

    def _watch(self) -> None:
        while not self._stop.wait(self._every_s):
            for gpu in self._gpus:
                sample = _sample(gpu.uuid)
                if sample is not None:
                    self._samples[gpu.uuid].append(sample)


def settle(gpus: tuple[Gpu, ...], within_s: float = 20.0) -> None:
    """Waits until what earlier runs held is free again: the driver gives memory back a moment after a process is gone.

    What is still held after `within_s` belongs to somebody else, and the run's own record of the GPUs will say so.
    """
    if not gpus or not is_open():
        return
    deadline = time.monotonic() + within_s
    while any(processes(gpu.uuid) for gpu in gpus) and time.monotonic() < deadline:
        time.sleep(0.2)
    tell(pynvml.nvmlShutdown)


def is_open() -> bool:
    """Opens the library; whether there is a driver behind it."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return False
    return True


def _use(uuid: str, samples: list[dict[str, Any]], foreign_pids: tuple[int, ...] | None) -> GpuUse:
    def told(name: str) -> list[int]:
        return [sample[name] for sample in samples if sample[name] is not None]

    def highest(name: str) -> int | None:
        return max(told(name), default=None)

    reasons, clocks = told("reasons"), told("sm_clock_mhz")
    return GpuUse(
        uuid=uuid,
        sm_clock_mhz=(min(clocks), max(clocks)) if clocks else None,
        memory_clock_mhz=highest("memory_clock_mhz"),
        temperature_c=highest("temperature_c"),
        power_w=highest("power_w"),
        throttled=tuple(name for bit, name in THROTTLES.items() if any(reason & bit for reason in reasons)),
        power_capped=any(reason & bit for bit in POWER_CAP for reason in reasons) if reasons else None,
        used_bytes=highest("used_bytes"),
        total_bytes=highest("total_bytes"),
        foreign_pids=foreign_pids,
    )


def _sample(uuid: str) -> dict[str, Any] | None:
    """None for a GPU that the driver has lost, or never knew: asked about no handle, the library itself can crash."""
    handle = tell(lambda: pynvml.nvmlDeviceGetHandleByUUID(uuid))
    if handle is None:
        return None
    memory = tell(lambda: pynvml.nvmlDeviceGetMemoryInfo(handle))
    power_mw = tell(lambda: pynvml.nvmlDeviceGetPowerUsage(handle))
    return {
        "sm_clock_mhz": tell(lambda: pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM)),
        "memory_clock_mhz": tell(lambda: pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_MEM)),
        "temperature_c": tell(lambda: pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU)),
        "power_w": None if power_mw is None else round(power_mw / 1000),
        "reasons": tell(lambda: pynvml.nvmlDeviceGetCurrentClocksEventReasons(handle)),
        "used_bytes": None if memory is None else memory.used,
        "total_bytes": None if memory is None else memory.total,
    }


def processes(uuid: str) -> tuple[int, ...] | None:
    """Ids of the processes that compute on a GPU. Only while the library is open."""

    def ask() -> tuple[int, ...]:
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        return tuple(process.pid for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle))

    return tell(ask)


def _gpu(handle: Any, *, is_mig: bool = False) -> Gpu:
    power_limit_mw = tell(lambda: pynvml.nvmlDeviceGetPowerManagementLimit(handle))
    memory = tell(lambda: pynvml.nvmlDeviceGetMemoryInfo(handle))
    return Gpu(
        name=pynvml.nvmlDeviceGetName(handle),
        uuid=pynvml.nvmlDeviceGetUUID(handle),
        memory_gib=0 if memory is None else round(memory.total / 2**30),
        power_limit_w=None if power_limit_mw is None else round(power_limit_mw / 1000),
        num_nvlinks=_num_nvlinks(handle),
        is_mig=is_mig,
    )


def _num_nvlinks(handle: Any) -> int | None:
    states = [tell(partial(pynvml.nvmlDeviceGetNvLinkState, handle, link)) for link in range(MAX_NVLINKS)]
    return None if all(state is None for state in states) else sum(state == 1 for state in states)


def _mig_slices(handle: Any) -> list[Any]:
    count = tell(lambda: pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)) or 0
    return _answers(partial(pynvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, index) for index in range(count))


def _answers(questions: Iterable[Callable[[], T]]) -> list[T]:
    """Those that the driver has an answer to."""
    return [answer for ask in questions if (answer := tell(ask)) is not None]


def tell(ask: Callable[[], T]) -> T | None:
    """The driver's answer, or None where it, or an older library in front of it, has none."""
    try:
        return ask()
    except (pynvml.NVMLError, AttributeError):
        return None
