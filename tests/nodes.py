"""Records of nodes as a test needs them: two healthy H200s unless a test says otherwise."""

from msgspec.structs import replace

from perf.facts.findings import findings
from perf.facts.gpu_health import GpuHealth
from perf.facts.gpus import Gpu
from perf.facts.hardware import Machine
from perf.facts.rates import ON_CPU, ON_GPUS, Ceilings, Rate
from perf.judge.baseline import RecordedCeilings
from perf.judge.preflight import Preflight
from tests.factory import CPU, SOFTWARE, gpu_use, origin

H200S = Machine(device="NVIDIA H200", count=2, memory_gib=140, power_limit_w=700, link="nv18")
GIB = 2**30


def rate(median: float | None, slowest_rank: int | None = None) -> Rate:
    return Rate(median=median, n=20, spread=0.01, slowest_rank=slowest_rank)


def ceilings(**changes: object) -> Ceilings:
    """Of two GPUs: 793 TFLOP/s, 251 k launches/s, 352 and 20 GB/s, 380 GB/s."""
    whole = Ceilings(
        protocol=ON_GPUS,
        num_ranks=2,
        devices=("NVIDIA H200",) * 2,
        gemm_flop_per_s=rate(793e12, 1),
        launches_per_s=rate(251e3, 0),
        all_reduce_bytes_per_s=rate(352e9),
        small_all_reduce_bytes_per_s=rate(20e9),
        p2p_bytes_per_s=rate(380e9),
    )
    return replace(whole, **changes)


def cpu_ceilings(**changes: object) -> Ceilings:
    whole = ceilings(
        protocol=ON_CPU,
        devices=("cpu",) * 2,
        gemm_flop_per_s=rate(100e9, 1),
        launches_per_s=rate(500e3, 0),
        all_reduce_bytes_per_s=rate(1.2e9),
        small_all_reduce_bytes_per_s=None,
        p2p_bytes_per_s=rate(1.9e9),
    )
    return replace(whole, **changes)


def gpu_health(number: int = 0, **changes: object) -> GpuHealth:
    """A healthy, idle GPU."""
    whole = GpuHealth(
        uuid=f"GPU-{number}",
        name="NVIDIA H200",
        power_limit_w=700,
        default_power_limit_w=700,
        sm_clock_mhz=345,
        max_sm_clock_mhz=1980,
        temperature_c=30,
        used_bytes=600 * 2**20,
        clock_reasons=("idle",),
        foreign_pids=(),
        uncorrected_ecc_errors=0,
        remapped_rows=0,
        remap_pending=False,
        remap_failed=False,
        retirement_pending=None,
    )
    return replace(whole, **changes)


def preflight(**changes: object) -> Preflight:
    """Of the two GPUs; findings are those of the parts."""
    whole = Preflight(
        measured_at="2026-11-29T02:00:00+00:00",
        took_s=4.0,
        server_start_up_s=6.0,
        machine=H200S,
        host="node1",
        cpu="Test CPU",
        cpu_cores=64,
        software=SOFTWARE,
        driver="580.10",
        commit="c0ffee",
        dirty=False,
        variables={},
        ceilings=ceilings(),
        failure=None,
        gpus=(gpu_health(0), gpu_health(1)),
        uses=(gpu_use("GPU-0", used_bytes=2 * GIB), gpu_use("GPU-1", used_bytes=2 * GIB)),
        shared_memory_free_bytes=64 * GIB,
        findings=(),
    )
    whole = replace(whole, **changes)
    return replace(whole, findings=tuple(findings(whole.gpus, whole.uses, whole.shared_memory_free_bytes)))


def cpu_preflight(**changes: object) -> Preflight:
    return preflight(**({"machine": CPU, "ceilings": cpu_ceilings(), "driver": None, "gpus": (), "uses": ()} | changes))


def recorded(of: Ceilings | None = None, *, machine: Machine = H200S, **changes: object) -> RecordedCeilings:
    whole = RecordedCeilings(machine=machine, origin=origin(), driver="580.10", ceilings=of or ceilings())
    return replace(whole, **changes)


VISIBLE = tuple(
    Gpu(name="NVIDIA H200", uuid=f"GPU-{number}", memory_gib=140, power_limit_w=700, num_nvlinks=18)
    for number in range(2)
)
"""The GPUs of `preflight`, as the driver lists them."""
DRIVERS_WORDS = tuple(name for name in GpuHealth.__struct_fields__ if name not in ("uuid", "name"))
"""What is None where the driver does not tell it."""
