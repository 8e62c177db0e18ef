"""Room perf/facts/findings.py: each way in which a node can be ill is said."""

import pytest
from msgspec.structs import replace

from perf.facts import findings as room
from perf.facts.findings import Severity, findings, shared_memory_free_bytes
from perf.facts.gpu_health import GpuHealth
from tests.factory import gpu_use
from tests.nodes import GIB, gpu_health

UNKNOWN = GpuHealth(uuid="GPU-0", name="NVIDIA H200")


def told(*gpus, uses=(), shared_memory=64 * GIB):
    return [(finding.severity, finding.text) for finding in findings(gpus, uses, shared_memory)]


def test_healthy_node_has_nothing_to_say():
    assert told(gpu_health(0), gpu_health(1), uses=(gpu_use("GPU-0", used_bytes=GIB),)) == []
    assert told(gpu_health(uncorrected_ecc_errors=None, remap_pending=None)) == [], "one counter that is told will do"
    assert told(gpu_health(clock_reasons=("idle", "software power cap"))) == [], "a power cap is normal under load"


@pytest.mark.parametrize(
    ("changes", "severity", "says"),
    [
        ({"foreign_pids": (4711, 4712)}, "fault", "not alone, used by process 4711, 4712"),
        ({"clock_reasons": ("idle", "hardware slowdown")}, "fault", "throttled: hardware slowdown"),
        ({"clock_reasons": ("software thermal slowdown",)}, "fault", "throttled: software thermal slowdown"),
        ({"clock_reasons": ("hardware thermal slowdown",)}, "fault", "throttled: hardware thermal slowdown"),
        ({"clock_reasons": ("hardware power brake",)}, "fault", "throttled: hardware power brake"),
        ({"uncorrected_ecc_errors": 3}, "fault", "3 uncorrected ECC errors"),
        ({"remap_pending": True}, "fault", "waits to be replaced: reset the GPU"),
        ({"retirement_pending": True}, "fault", "waits to be replaced: reset the GPU"),
        ({"remap_failed": True}, "fault", "could not be replaced"),
        ({"clock_reasons": ("clocks set by the user",)}, "warning", "clocks set by the user"),
        ({"power_limit_w": 500}, "warning", "power limit 500 W, default 700 W"),
        ({"used_bytes": 30 * GIB}, "warning", "30.0 GiB in use, by no process that can be seen"),
        ({"foreign_pids": None}, "unknown", "whether others use it cannot be read"),
        ({"clock_reasons": None}, "unknown", "whether it is throttled cannot be read"),
        (
            {"uncorrected_ecc_errors": None, "remap_pending": None, "remap_failed": None},
            "unknown",
            "ECC errors and remapped rows cannot be read",
        ),
    ],
)
def test_gpu_that_is_bad_in_one_way_has_that_finding_with_its_name(changes, severity, says):
    ((found, text),) = told(gpu_health(0), gpu_health(1, **changes))
    assert found == Severity(severity)
    assert text.startswith("GPU 1 (GPU-1): ")
    assert says in text


def test_throttling_under_load_counts_and_is_said_once():
    use = replace(gpu_use("GPU-0", used_bytes=GIB), throttled=("hardware thermal slowdown", "hardware power brake"))
    resting = gpu_health(clock_reasons=("hardware thermal slowdown",))
    ((severity, text),) = told(resting, uses=(use,))
    assert severity is Severity.FAULT
    assert "throttled: hardware thermal slowdown, hardware power brake;" in text


def test_gpu_of_which_nothing_is_known_is_unknown_in_all_and_at_fault_in_nothing():
    assert [severity for severity, _ in told(UNKNOWN)] == [Severity.UNKNOWN] * 3


def test_shared_memory_below_a_gibibyte_is_a_warning_with_the_cure():
    assert told(shared_memory=GIB) == []
    ((severity, text),) = told(shared_memory=64 * 2**20)
    assert severity is Severity.WARNING
    assert "/dev/shm has 64 MiB free, less than 1024" in text
    assert "--shm-size" in text
    assert told(shared_memory=0)[0][0] is Severity.WARNING
    assert told(shared_memory=None) == [(Severity.UNKNOWN, "/dev/shm cannot be read")]


def test_shared_memory_is_what_the_file_system_has_free(monkeypatch, tmp_path):
    monkeypatch.setattr(room, "SHARED_MEMORY", str(tmp_path))
    assert shared_memory_free_bytes() > 0
    monkeypatch.setattr(room, "SHARED_MEMORY", str(tmp_path / "missing"))
    assert shared_memory_free_bytes() is None


def test_lost_gpus_are_a_warning_with_what_to_do():
    (finding,) = findings((), (), 64 * GIB, 2)
    assert finding.severity is Severity.WARNING
    assert finding.text.startswith("GPUs of this node that do not answer the driver: 2; ")
    assert "dmesg" in finding.text
