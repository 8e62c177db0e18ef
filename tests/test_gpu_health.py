"""Room perf/facts/gpu_health.py: what the driver tells of GPUs at rest; the rest is unknown, never a crash."""

from types import SimpleNamespace

import pytest

from perf.facts import gpu_health, gpus
from perf.facts.gpu_health import GpuHealth, driver_version, health_of
from perf.facts.gpus import Gpu
from tests.test_gpus import Driver

PAIR = tuple(Gpu(name="NVIDIA H200", uuid=f"GPU-{n}", memory_gib=141, power_limit_w=500) for n in (0, 1))


class RestingDriver(Driver):
    """The first GPU has everything wrong that can be, the second nothing."""

    NVML_CLOCK_SM, NVML_TEMPERATURE_GPU = 1, 0
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC = 1, 0

    def nvmlDeviceGetHandleByUUID(self, uuid):  # noqa: N802
        return int(uuid[-1])

    def nvmlDeviceGetPowerManagementDefaultLimit(self, handle):  # noqa: N802
        return 699_990

    def nvmlDeviceGetMaxClockInfo(self, handle, kind):  # noqa: N802
        return 1980

    def nvmlDeviceGetMemoryInfo(self, handle):  # noqa: N802
        return SimpleNamespace(total=100, used=60 + handle)

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle):  # noqa: N802
        return 0x1 if handle else 0x02 | 0x04 | 0x40 | 0x8000

    def nvmlDeviceGetComputeRunningProcesses(self, handle):  # noqa: N802
        return [] if handle else [SimpleNamespace(pid=4711)]

    def nvmlDeviceGetTotalEccErrors(self, handle, kind, counter):  # noqa: N802
        assert (kind, counter) == (1, 0), "the uncorrected ones since the driver was loaded"
        return 0 if handle else 3

    def nvmlDeviceGetRemappedRows(self, handle):  # noqa: N802
        return (7, 0, 0, 0) if handle else (7, 2, 1, 0)

    def nvmlSystemGetDriverVersion(self):  # noqa: N802
        return "580.10"


@pytest.fixture
def driver(monkeypatch):
    """Sets the driver of both rooms that ask it."""

    def use(driver):
        for room in (gpus, gpu_health):
            monkeypatch.setattr(room, "pynvml", driver)
        return driver

    return use


def test_health_is_read_from_the_driver_which_is_closed_again(driver):
    resting = driver(RestingDriver())
    ill, well = health_of(PAIR)
    assert (ill.power_limit_w, ill.default_power_limit_w, ill.max_sm_clock_mhz, ill.used_bytes) == (500, 700, 1980, 60)
    assert set(ill.clock_reasons) == {"clocks set by the user", "software power cap", "hardware thermal slowdown"}
    assert ill.foreign_pids == (4711,)
    assert (ill.uncorrected_ecc_errors, ill.remapped_rows, ill.remap_pending, ill.remap_failed) == (3, 2, True, False)
    assert (well.clock_reasons, well.foreign_pids) == (("idle",), ())
    assert (well.uncorrected_ecc_errors, well.remapped_rows, well.remap_pending, well.remap_failed) == (
        0,
        0,
        False,
        False,
    )
    assert (ill.retirement_pending, ill.temperature_c) == (None, None), "what the driver does not tell"
    assert not resting.is_open
    assert driver_version() == "580.10"
    assert not resting.is_open


def test_driver_that_tells_nothing_leaves_all_unknown(driver):
    driver(Driver())
    for health, gpu in zip(health_of(PAIR), PAIR, strict=True):
        assert health == GpuHealth(uuid=gpu.uuid, name=gpu.name)
        assert not health.memory_is_known
    assert driver_version() is None


def test_library_without_a_question_leaves_its_answer_unknown(driver):
    """As an older driver, or an older binding of it."""
    older = driver(RestingDriver())
    older.nvmlDeviceGetRemappedRows = None
    older.nvmlDeviceGetRetiredPagesPendingStatus = lambda _: 1

    def ask(name):
        raise AttributeError(name)

    older.nvmlDeviceGetRemappedRows = ask
    health = health_of(PAIR)[0]
    assert (health.remap_pending, health.remapped_rows, health.retirement_pending) == (None, None, True)
    assert health.memory_is_known


def test_no_driver_and_no_gpus_are_no_crash(driver):
    driver(Driver(nvmlInit=lambda: (_ for _ in ()).throw(Driver.NVMLError(1))))
    assert [health.foreign_pids for health in health_of(PAIR)] == [None, None]
    assert health_of(()) == ()
    assert driver_version() is None
