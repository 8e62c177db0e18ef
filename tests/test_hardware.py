"""Room perf/facts/hardware.py: the machine key, and what a node lacks for a cell."""

import shutil
import sysconfig
from types import SimpleNamespace

import msgspec
import pytest

from perf.facts import hardware
from perf.facts.gpus import Gpu
from perf.facts.hardware import Machine, Node
from strategies.spec import LinkProfile, Mode, StrategyName
from tests.factory import cell

H100 = Machine(device="NVIDIA H100 80GB HBM3", count=8, memory_gib=80, power_limit_w=700)
CPU = Machine(device="Intel(R) Xeon(R) CPU @ 2.10GHz", count=2)
GPUS = [
    Gpu(name="NVIDIA H200", uuid=f"GPU-{letters}-{number:04d}", memory_gib=141, power_limit_w=700, num_nvlinks=18)
    for number, letters in enumerate(("aaaa1111", "aaaa2222", "bbbb3333", "cccc4444"))
]
NODE = Node(cpu="Test CPU", cpu_cores=2, gpus=tuple(GPUS))
BARE = Node(cpu="Test CPU", cpu_cores=2, gpus=())

DIFFERENT = {
    "H100": H100,
    "H100 capped at 350 W": msgspec.structs.replace(H100, power_limit_w=350),
    "H100 of unknown power": msgspec.structs.replace(H100, power_limit_w=None),
    "H100 PCIe": msgspec.structs.replace(H100, device="NVIDIA H100 PCIe", power_limit_w=350),
    "H100 with a longer name": msgspec.structs.replace(H100, device="NVIDIA H100 80GB HBM3 MIG 1g.10gb"),
    "H100 over NVLink": msgspec.structs.replace(H100, link="nv18"),
    "H100 over PCIe": msgspec.structs.replace(H100, link="pcie"),
    "4 of 8 H100": msgspec.structs.replace(H100, count=4),
    "H100 of 94 GiB": msgspec.structs.replace(H100, memory_gib=94),
    "H200": Machine(device="NVIDIA H200", count=8, memory_gib=141, power_limit_w=700),
    "1 H200": Machine(device="NVIDIA H200", count=1, memory_gib=141, power_limit_w=700),
    "CPU": CPU,
    "CPU with more cores": msgspec.structs.replace(CPU, count=4),
    "other CPU": msgspec.structs.replace(CPU, device="AMD EPYC 7B13"),
    "no name": msgspec.structs.replace(CPU, device=""),
}


def test_each_machine_has_a_key_of_its_own():
    keys = {name: machine.key for name, machine in DIFFERENT.items()}
    assert len(set(keys.values())) == len(keys), keys


@pytest.mark.parametrize(
    ("machine", "key"),
    [
        ("H100", "8x-nvidia-h100-80gb-hbm3-80gib-700w"),
        ("H100 over NVLink", "8x-nvidia-h100-80gb-hbm3-80gib-700w-nv18"),
        ("H100 of unknown power", "8x-nvidia-h100-80gb-hbm3-80gib-unknown"),
        ("CPU", "cpu-intel-r-xeon-r-cpu-2-10ghz-2c"),
        ("no name", "cpu-unknown-2c"),
    ],
)
def test_key_says_its_parts(machine, key):
    assert DIFFERENT[machine].key == key


def test_machine_holds_hardware_only():
    assert Machine.__struct_fields__ == ("device", "count", "memory_gib", "power_limit_w", "link")


def test_gpu_order_does_not_change_the_machine():
    turned = Node(cpu="Test CPU", cpu_cores=2, gpus=tuple(reversed(GPUS)))
    of = cell(link=LinkProfile.NATIVE)
    assert turned.machine_for(of).key == NODE.machine_for(of).key


@pytest.mark.parametrize(
    ("changes", "link"),
    [
        ([{}, {}], "nv18"),
        ([{}, {"num_nvlinks": 12}], "nv12"),
        ([{"num_nvlinks": 0}, {}], "pcie"),
        ([{}, {"num_nvlinks": None}], "unknown"),
    ],
)
def test_link_is_the_weakest_of_the_used_gpus(changes, link):
    gpus = tuple(msgspec.structs.replace(gpu, **change) for gpu, change in zip(GPUS, changes, strict=False))
    assert Node(cpu="Test CPU", cpu_cores=2, gpus=gpus).machine_for(cell(link=LinkProfile.NATIVE)).link == link


def test_unlike_gpus_are_no_machine_of_either_kind():
    gpus = (GPUS[0], msgspec.structs.replace(GPUS[1], name="NVIDIA H100 80GB HBM3", memory_gib=80, power_limit_w=None))
    machine = Node(cpu="Test CPU", cpu_cores=2, gpus=gpus).machine_for(cell(link=LinkProfile.NATIVE))
    assert machine.device == "mixed NVIDIA H100 80GB HBM3 NVIDIA H200"
    assert machine.memory_gib == 80


def cpuinfo(clock_mhz: float) -> str:
    return f"processor\t: 0\nmodel name\t: Intel(R) Xeon(R) CPU @ 2.10GHz\ncpu MHz\t\t: {clock_mhz}\n"


@pytest.mark.parametrize("clock_mhz", [2100.1, 2100.3])
def test_cpu_name_does_not_depend_on_the_clock(monkeypatch, tmp_path, clock_mhz):
    (tmp_path / "cpuinfo").write_text(cpuinfo(clock_mhz), encoding="utf-8")
    monkeypatch.setattr(hardware, "Path", lambda _: tmp_path / "cpuinfo")
    assert hardware.cpu_name() == "Intel(R) Xeon(R) CPU @ 2.10GHz"


def test_unnamed_cpu_is_unknown(monkeypatch, tmp_path):
    monkeypatch.setattr(hardware, "Path", lambda _: tmp_path / "missing")
    monkeypatch.setattr(hardware, "platform", SimpleNamespace(processor=lambda: "", machine=lambda: ""))
    assert hardware.cpu_name() == "unknown"


@pytest.mark.parametrize(
    ("of", "machine"),
    [
        (
            cell(link=LinkProfile.NATIVE),
            Machine(device="NVIDIA H200", count=2, memory_gib=141, power_limit_w=700, link="nv18"),
        ),
        (
            cell(StrategyName.SINGLE, world_size=1, link=LinkProfile.NATIVE),
            Machine(device="NVIDIA H200", count=1, memory_gib=141, power_limit_w=700),
        ),
        (cell(), Machine(device="Test CPU", count=2)),
    ],
    ids=["2 of 4 GPUs", "1 of 4 GPUs", "gloo beside GPUs"],
)
def test_machine_counts_what_the_cell_uses(of, machine):
    assert NODE.machine_for(of) == machine


@pytest.mark.parametrize(
    ("num_gpus", "ranks", "message"),
    [
        (0, 2, "needs 2 GPUs, sees 0"),
        (0, 1, "needs 1 GPU, sees 0"),
        (1, 2, "needs 2 GPUs, sees 1"),
        (2, 4, "needs 4 GPUs, sees 2"),
        (2, 2, None),
        (4, 2, None),
    ],
)
@pytest.mark.parametrize("link", [LinkProfile.NATIVE, LinkProfile.NO_P2P])
def test_missing_gpus_are_said_with_the_numbers(num_gpus, ranks, message, link):
    node = msgspec.structs.replace(NODE, gpus=NODE.gpus[:num_gpus])
    assert node.lacks(cell(world_size=ranks, link=link)) == message


@pytest.mark.parametrize("node", [NODE, BARE], ids=["with GPUs", "without GPUs"])
def test_gloo_cell_needs_no_gpu(node):
    assert node.lacks(cell(world_size=64)) is None


@pytest.mark.parametrize("found", [[], ["g++"], ["clang++"]], ids=str)
def test_compile_needs_a_compiler(monkeypatch, tmp_path, found):
    monkeypatch.delenv("CXX", raising=False)
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr(shutil, "which", lambda name: name if name in found else None)
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    lacks = BARE.lacks(cell(mode=Mode.COMPILE))
    assert (lacks is None) is bool(found)
    assert lacks is None or lacks.endswith("found neither g++ nor clang++; install g++")
    assert BARE.lacks(cell(mode=Mode.EAGER)) is None


def test_compile_needs_the_headers_of_python(monkeypatch, tmp_path):
    monkeypatch.setattr(shutil, "which", lambda name: name)
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    lacks = BARE.lacks(cell(mode=Mode.COMPILE))
    assert lacks == f"torch.compile needs Python's headers, found no {tmp_path}/Python.h; install python3-dev"


def test_missing_gpus_are_said_before_a_missing_compiler(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda _: None)
    assert BARE.lacks(cell(mode=Mode.COMPILE, link=LinkProfile.NATIVE)) == "needs 2 GPUs, sees 0"


def test_this_node_respects_the_visible_devices(monkeypatch):
    asked = []
    monkeypatch.setattr(hardware, "visible_gpus", lambda visible: asked.append(visible) or tuple(GPUS[1:2]))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    node = hardware.this_node()
    assert asked == ["1"]
    assert node.gpus == (GPUS[1],)
    assert node.cpu_cores >= 1


def test_only_the_slow_link_switches_peer_copies_off():
    assert {link: hardware.link_variables(link) for link in LinkProfile} == {
        LinkProfile.GLOO: {},
        LinkProfile.NATIVE: {},
        LinkProfile.NO_P2P: {"NCCL_P2P_DISABLE": "1"},
    }
