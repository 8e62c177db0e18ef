"""Room perf/facts/gpus.py: the GPUs that a process sees, and their state; a driver that does not tell fails nothing."""

import time
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from perf.facts import gpus
from perf.facts.gpus import Gpu, GpuWatch, select_gpus, settle
from perf.facts.measurement import disturbances, measure
from tests.factory import PLAN, cell, run_record

GPUS = [
    Gpu(name="NVIDIA H200", uuid=f"GPU-{letters}-{number:04d}", memory_gib=141, power_limit_w=700)
    for number, letters in enumerate(("aaaa1111", "aaaa2222", "bbbb3333", "cccc4444"))
]
SLICES = [
    Gpu(name="NVIDIA H200 MIG 1g.18gb", uuid=f"MIG-{letters}-0000", memory_gib=18, power_limit_w=None, is_mig=True)
    for letters in ("cccc3333", "dddd4444")
]


@pytest.mark.parametrize(
    ("visible", "chosen"),
    [
        (None, [0, 1, 2, 3]),
        ("", []),
        ("1", [1]),
        ("2,3", [2, 3]),
        ("3, 0", [3, 0]),
        ("GPU-bbbb", [2]),
        ("GPU-aaaa1111-0000,GPU-cccc", [0, 3]),
        ("GPU-aaaa2,0", [1, 0]),
        ("GPU-aaaa", []),
        ("GPU-ffff", []),
        ("MIG-cccc3333", [4]),
        ("MIG-cccc3333-0000,1", [4, 1]),
        ("MIG-", []),
        ("0,0", [0]),
        ("4", []),
        ("-1", []),
        ("1,7,2", [1]),
        ("1,,2", [1]),
        ("0,GPU-ffff,1", [0]),
        ("NoDevFiles", []),
    ],
)
def test_visible_devices_are_chosen_as_cuda_does(visible, chosen):
    assert select_gpus(GPUS, visible, SLICES) == tuple([*GPUS, *SLICES][index] for index in chosen)


def test_nothing_is_chosen_from_no_gpus():
    assert [select_gpus([], visible) for visible in (None, "", "0", "GPU-")] == [()] * 4


class Driver(SimpleNamespace):
    """Stands in for NVML with two GPUs; the second one does not tell its power limit."""

    NVMLError = gpus.pynvml.NVMLError
    NOT_SUPPORTED = gpus.pynvml.NVML_ERROR_NOT_SUPPORTED
    is_open = False
    asked_about_nothing = False

    def __getattr__(self, name):
        """Every other question: the driver does not know."""
        if not name.startswith("nvml"):
            raise AttributeError(name)

        def ask(*arguments):
            self.asked_about_nothing |= None in arguments
            raise self.NVMLError(self.NOT_SUPPORTED)

        return ask

    def nvmlInit(self):  # noqa: N802
        self.is_open = True

    def nvmlShutdown(self):  # noqa: N802
        self.is_open = False

    def nvmlDeviceGetCount(self):  # noqa: N802
        return 2

    def nvmlDeviceGetHandleByIndex(self, index):  # noqa: N802
        return index

    def nvmlDeviceGetName(self, handle):  # noqa: N802
        return "NVIDIA H200"

    def nvmlDeviceGetUUID(self, handle):  # noqa: N802
        return f"GPU-{handle}"

    def nvmlDeviceGetMemoryInfo(self, handle):  # noqa: N802
        return SimpleNamespace(total=150_754_820_096, used=0)

    def nvmlDeviceGetPowerManagementLimit(self, handle):  # noqa: N802
        if handle == 1:
            raise self.NVMLError(self.NOT_SUPPORTED)
        return 699_990


def test_gpus_are_read_from_the_driver_which_is_closed_again(monkeypatch):
    driver = Driver()
    monkeypatch.setattr(gpus, "pynvml", driver)
    assert gpus.visible_gpus(None) == (
        Gpu(name="NVIDIA H200", uuid="GPU-0", memory_gib=140, power_limit_w=700),
        Gpu(name="NVIDIA H200", uuid="GPU-1", memory_gib=140, power_limit_w=None),
    )
    assert [gpu.uuid for gpu in gpus.visible_gpus("1")] == ["GPU-1"]
    assert not driver.is_open


@pytest.mark.parametrize("lost", ["nvmlDeviceGetHandleByIndex", "nvmlDeviceGetName", "nvmlDeviceGetUUID"])
def test_gpu_that_does_not_answer_is_left_out(monkeypatch, lost):
    driver = Driver()
    answer = getattr(driver, lost)

    def ask(index):
        if index == 0:
            raise Driver.NVMLError(gpus.pynvml.NVML_ERROR_GPU_IS_LOST)
        return answer(index)

    setattr(driver, lost, ask)
    monkeypatch.setattr(gpus, "pynvml", driver)
    assert [gpu.uuid for gpu in gpus.visible_gpus(None)] == ["GPU-1"]
    assert not driver.is_open


@pytest.mark.parametrize(
    ("error", "lost"), [(gpus.pynvml.NVML_ERROR_GPU_IS_LOST, 1), (gpus.pynvml.NVML_ERROR_NO_PERMISSION, 0)]
)
def test_lost_gpus_are_counted_and_those_of_other_containers_are_not(monkeypatch, error, lost):
    def handle(index):
        if index == 0:
            raise Driver.NVMLError(error)
        return index

    driver = Driver(nvmlDeviceGetHandleByIndex=handle, NVML_ERROR_NO_PERMISSION=gpus.pynvml.NVML_ERROR_NO_PERMISSION)
    monkeypatch.setattr(gpus, "pynvml", driver)
    assert gpus.num_lost() == lost
    assert not driver.is_open
    monkeypatch.setattr(gpus, "pynvml", Driver(nvmlInit=lambda: (_ for _ in ()).throw(Driver.NVMLError(1))))
    assert gpus.num_lost() == 0


def test_memory_that_is_not_told_is_none(monkeypatch):
    """Of GPUs that share the host's memory the driver tells none."""
    driver = Driver(nvmlDeviceGetMemoryInfo=lambda _: (_ for _ in ()).throw(Driver.NVMLError(Driver.NOT_SUPPORTED)))
    monkeypatch.setattr(gpus, "pynvml", driver)
    assert [gpu.memory_gib for gpu in gpus.visible_gpus(None)] == [0, 0]


def test_no_driver_means_no_gpus(monkeypatch):
    driver = Driver(nvmlInit=lambda: (_ for _ in ()).throw(Driver.NVMLError(1)))
    monkeypatch.setattr(gpus, "pynvml", driver)
    assert gpus.visible_gpus(None) == ()


class BusyDriver(Driver):
    """Two GPUs at work: one hot, with a stranger on it."""

    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0

    def __init__(self):
        super().__init__()
        self.clocks = iter([1980, 1200, 1980] * 100)

    def nvmlDeviceGetHandleByUUID(self, uuid):  # noqa: N802
        return int(uuid[-1])

    def nvmlDeviceGetClockInfo(self, handle, kind):  # noqa: N802
        return next(self.clocks) if (handle, kind) == (0, 1) else 3201

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle):  # noqa: N802
        return 0x40 | 0x04 if handle == 0 else 0x04

    def nvmlDeviceGetMemoryInfo(self, handle):  # noqa: N802
        return SimpleNamespace(total=100, used=60 + handle)

    def nvmlDeviceGetComputeRunningProcesses(self, handle):  # noqa: N802
        return [SimpleNamespace(pid=4711)] if handle == 0 else []


def watched(monkeypatch, driver):
    monkeypatch.setattr(gpus, "pynvml", driver)
    monkeypatch.setattr(gpus, "SAMPLE_S", 0.005)
    pair = tuple(Gpu(name="NVIDIA H200", uuid=f"GPU-{n}", memory_gib=141, power_limit_w=700) for n in (0, 1))
    with GpuWatch(pair) as watch:
        time.sleep(0.1)
    assert not driver.is_open
    return watch.uses()


def test_watch_keeps_the_extremes_and_tells_throttling_from_a_power_cap(monkeypatch):
    hot, cool = watched(monkeypatch, BusyDriver())
    assert hot.sm_clock_mhz == (1200, 1980)
    assert (hot.throttled, hot.power_capped) == (("hardware thermal slowdown",), True)
    assert (cool.throttled, cool.power_capped) == ((), True)
    assert (hot.foreign_pids, cool.foreign_pids) == ((4711,), ())
    assert (hot.used_bytes, cool.used_bytes, hot.total_bytes) == (60, 61, 100)
    assert hot.temperature_c is None


class LosingDriver(BusyDriver):
    """The first GPU falls off the bus; the library may crash when it is asked about no handle."""

    def nvmlDeviceGetHandleByUUID(self, uuid):  # noqa: N802
        if uuid == "GPU-0":
            raise self.NVMLError(gpus.pynvml.NVML_ERROR_GPU_IS_LOST)
        return 1


def test_lost_gpu_is_unknown_and_nothing_more_is_asked_about_it(monkeypatch):
    driver = LosingDriver()
    lost, kept = watched(monkeypatch, driver)
    assert (lost.sm_clock_mhz, lost.power_capped, lost.used_bytes, lost.foreign_pids) == (None, None, None, None)
    assert kept.used_bytes == 61
    assert not driver.asked_about_nothing


def test_driver_that_tells_nothing_is_unknown_and_no_fault(monkeypatch):
    (use, _) = watched(monkeypatch, Driver())
    unknown = (use.sm_clock_mhz, use.temperature_c, use.power_w, use.power_capped, use.foreign_pids)
    assert unknown == (None,) * 5
    assert use.throttled == ()


def test_no_gpus_are_not_watched():
    with GpuWatch(()) as watch:
        pass
    assert watch.uses() == ()
    settle(())


def test_settling_waits_for_the_last_process_to_leave_but_not_for_ever(monkeypatch):
    driver = BusyDriver()
    monkeypatch.setattr(gpus, "pynvml", driver)
    one = (Gpu(name="NVIDIA H200", uuid="GPU-0", memory_gib=141, power_limit_w=700),)
    settle(one, within_s=0.3)
    left = iter([[SimpleNamespace(pid=1)], []])
    driver.nvmlDeviceGetComputeRunningProcesses = lambda _: next(left)
    settle(one, within_s=30)
    assert next(left, "asked twice") == "asked twice"


def test_throttled_or_shared_gpu_makes_the_run_invalid(monkeypatch):
    uses = watched(monkeypatch, BusyDriver())
    run = replace(run_record(), gpus=uses)
    first, second = disturbances(measure(cell(), PLAN, [run]))
    assert "GPU-0 was throttled: hardware thermal slowdown" in first
    assert "GPU-0 was not alone, used by process 4711" in second
