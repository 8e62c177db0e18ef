"""Rooms perf/judge/preflight.py, perf/measure/examination.py: a node for real, and what makes one not comparable."""

import math
import os

import pytest
from msgspec.structs import replace

from perf.facts import jsonfile
from perf.facts.gpus import Gpu
from perf.facts.hardware import Machine, Node, this_node
from perf.facts.rates import KINDS
from perf.judge.preflight import Doubts, Preflight, compare, doubts, invalid
from perf.measure.examination import examine
from perf.measure.launch import Launcher
from tests.factory import CPU, SOFTWARE
from tests.nodes import (
    H200S,
    ceilings,
    cpu_ceilings,
    cpu_preflight,
    gpu_health,
    preflight,
    rate,
    recorded,
)

NAMES = [kind.name for kind in KINDS]
TOLERANCE = {kind.name: kind.tolerance for kind in KINDS}
BARE = Node(cpu="Test CPU", cpu_cores=2, gpus=())


def at(name: str, share: float) -> Preflight:
    """A node that reaches this share of one recorded ceiling, and all of the others."""
    return preflight(ceilings=ceilings(**{name: rate(ceilings().rate(name).median * share)}))


@pytest.fixture(scope="module")
def examined(launcher):
    """This machine, as a CPU."""
    return examine(launcher, replace(this_node(), gpus=()), variables={"NCCL_PLANTED": "1"})


def test_examined_cpu_has_ceilings_and_says_where_and_on_what(examined, launcher):
    assert (examined.failure, invalid(examined)) == (None, [])
    assert examined.machine == replace(this_node(), gpus=()).machine
    assert examined.software == launcher.start().software
    assert (examined.gpus, examined.uses, examined.faults) == ((), (), [])
    assert examined.variables["NCCL_PLANTED"] == "1"
    assert 0 < examined.took_s < 60


def test_preflight_is_read_back_as_it_was_written(examined, tmp_path):
    for number, whole in enumerate((examined, preflight(), preflight(ceilings=None, failure="OOM"))):
        jsonfile.write(tmp_path / f"{number}.json", whole)
        assert jsonfile.read(tmp_path / f"{number}.json", Preflight) == whole


def test_server_that_cannot_start_is_a_preflight_without_ceilings(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')")
    variables = {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    with Launcher(root=tmp_path, variables=variables) as broken:
        found = examine(broken, BARE)
    assert (found.ceilings, found.software) == (None, None)
    assert "REFUSED" in found.failure
    assert invalid(found) == ["nothing was measured"]


def test_ranks_that_fail_leave_the_health_and_the_error(launcher):
    """One GPU more than this machine has."""
    count = len(this_node().gpus) + 1
    gpus = tuple(Gpu(name="NVIDIA H200", uuid=f"GPU-none-{n}", memory_gib=140, power_limit_w=700) for n in range(count))
    found = examine(launcher, replace(BARE, gpus=gpus), deadline_s=60.0)
    assert found.ceilings is None
    assert found.failure
    assert found.software == launcher.start().software
    assert {finding.severity for finding in found.findings} == {"unknown"}
    assert compare(found, recorded(machine=found.machine))[0].startswith("no ceiling was measured: ")


def test_node_that_reaches_its_record_is_comparable():
    assert compare(preflight(), recorded()) == []
    better = preflight(ceilings=ceilings(gemm_flop_per_s=rate(990e12), launches_per_s=rate(1e6)))
    assert compare(better, recorded()) == [], "only lower is bad"


@pytest.mark.parametrize("name", NAMES)
def test_tolerance_is_held_to_the_last_digit(name):
    limit = 1 - TOLERANCE[name]
    assert compare(at(name, limit), recorded()) == []
    (reason,) = compare(at(name, limit - 1e-9), recorded())
    assert f"tolerance {TOLERANCE[name] * 100:g} %" in reason


def test_links_and_products_are_held_tighter_than_what_a_host_issues():
    assert TOLERANCE == {
        "gemm_flop_per_s": 0.05,
        "launches_per_s": 0.20,
        "all_reduce_bytes_per_s": 0.05,
        "small_all_reduce_bytes_per_s": 0.10,
        "p2p_bytes_per_s": 0.05,
    }


def test_slow_host_is_a_doubt_of_host_bound_cells_alone():
    slow = doubts(at("launches_per_s", 0.5), recorded())
    (reason,) = slow.of_host_bound_cells
    assert reason.startswith("launch rate ")
    assert slow.of_cell(is_host_bound=False) == ()
    assert slow.of_cell(is_host_bound=True) == (reason,)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "launches_per_s"])
def test_slow_gpu_or_link_is_a_doubt_of_all_cells(name):
    slow = doubts(at(name, 0.5), recorded())
    assert (len(slow.of_all_cells), slow.of_host_bound_cells) == (1, ())


def test_faults_and_missing_rates_are_doubts_of_all_cells_also_without_a_record():
    lost = preflight(ceilings=None, failure="OOM: rank 0")
    for record in (None, recorded()):
        assert len(doubts(lost, record).of_cell(is_host_bound=True)) == 1, "said once"
        assert len(doubts(lost, record).of_cell(is_host_bound=False)) == 1
    ill = preflight(gpus=(gpu_health(0, remap_failed=True), gpu_health(1)))
    assert ill.faults
    assert [doubts(ill, record).of_all_cells for record in (None, recorded())] == [tuple(ill.faults)] * 2
    assert [doubts(preflight(), record) for record in (None, recorded())] == [Doubts()] * 2


def test_reason_has_the_numbers_and_the_rank():
    slow = preflight(ceilings=ceilings(gemm_flop_per_s=rate(640e12, 1), p2p_bytes_per_s=rate(40e9)))
    assert compare(slow, recorded()) == [
        "GEMM 640 TFLOP/s is 80.7 % of the recorded 793, tolerance 5 %, slowest on rank 1",
        "p2p of 256 MiB 40 GB/s is 10.5 % of the recorded 380, tolerance 5 %",
    ]


def test_reason_says_what_else_has_changed_since_the_record():
    slow = at("launches_per_s", 0.7)
    other = replace(
        slow,
        cpu="Other CPU",
        driver="570.01",
        software=replace(SOFTWARE, torch="2.14.0", transformers="6"),
        variables={"NCCL_P2P_DISABLE": "1"},
    )
    (reason,) = compare(other, recorded())
    assert reason.endswith(
        " (since it was recorded: host CPU Test CPU -> Other CPU, driver 580.10 -> 570.01, torch 2.13.0 -> 2.14.0, "
        "NCCL_P2P_DISABLE none -> 1)"
    )
    assert "since" not in compare(slow, recorded())[0]
    assert compare(replace(other, ceilings=ceilings()), recorded()) == [], "a change by itself is no reason"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("median", [None, 0.0, -1.0, math.nan, math.inf])
def test_value_that_is_none_is_said_and_never_fine(name, median):
    broken = preflight(ceilings=ceilings(**{name: rate(median)}))
    title = next(kind.titled(ceilings().protocol) for kind in KINDS if kind.name == name)
    says = f"{title}: " + ("not measured" if median is None else f"{median:g} is no measured value")
    assert compare(broken, recorded()) == [says]
    assert invalid(broken) == [says]
    (reason,) = compare(preflight(), recorded(ceilings(**{name: rate(median)})))
    assert reason.startswith(f"{title} has no recorded number to compare with")


@pytest.mark.parametrize("name", NAMES[2:])
def test_link_that_several_ranks_lack_is_said_also_where_the_record_lacks_it(name):
    (reason,) = compare(preflight(ceilings=ceilings(**{name: None})), recorded(ceilings(**{name: None})))
    assert "not measured" in reason


def test_one_gpu_has_no_links_and_is_comparable():
    links = dict.fromkeys(NAMES[2:])
    one, machine = ceilings(num_ranks=1, devices=("NVIDIA H200",), **links), replace(H200S, count=1, link=None)
    alone = preflight(machine=machine, ceilings=one)
    assert compare(alone, recorded(one, machine=machine)) == []
    assert invalid(alone) == []
    slow = preflight(machine=machine, ceilings=replace(one, gemm_flop_per_s=rate(640e12, 0)))
    (reason,) = compare(slow, recorded(one, machine=machine))
    assert "slowest" not in reason


def test_cpu_is_held_to_no_record_but_must_have_measured():
    slow = cpu_preflight(ceilings=cpu_ceilings(gemm_flop_per_s=rate(1e9), launches_per_s=rate(1.0)))
    assert compare(slow, recorded(cpu_ceilings(), machine=CPU, driver=None)) == []
    broken = cpu_preflight(ceilings=cpu_ceilings(gemm_flop_per_s=rate(0.0)))
    assert compare(broken, recorded(cpu_ceilings(), machine=CPU, driver=None)) == ["GEMM: 0 is no measured value"]


def test_nothing_measured_another_machine_and_another_protocol_are_not_comparable():
    lost = preflight(ceilings=None, failure="OOM: rank 0\nTraceback")
    assert compare(lost, recorded()) == ["no ceiling was measured: OOM: rank 0"]
    (reason,) = compare(preflight(), recorded(machine=replace(H200S, power_limit_w=500)))
    assert "-700w-nv18, recorded on" in reason
    smaller = replace(ceilings(), protocol=replace(ceilings().protocol, gemm_side=4096))
    (reason,) = compare(preflight(), recorded(smaller))
    assert "gemm_side=4096" in reason


def test_machine_of_a_node_is_all_its_gpus_or_its_cpu():
    gpus = tuple(
        Gpu(name="NVIDIA H200", uuid=f"GPU-{n}", memory_gib=140, power_limit_w=700, num_nvlinks=18) for n in range(2)
    )
    assert replace(BARE, gpus=gpus).machine == H200S
    assert BARE.machine == Machine(device="Test CPU", count=2)
