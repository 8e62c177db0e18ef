"""The hardware a cell runs on, and the key under which its baselines are kept. No torch: asked by the pytest process.

The key holds hardware only, and only what stays the same from day to day: no host name, no clock, no software.
"""

import os
import platform
import re
import shutil
import sysconfig
from pathlib import Path

import pynvml

from perf.cell import Cell
from strategies.spec import LinkProfile, Mode, Value


class Machine(Value, frozen=True, kw_only=True):
    """What the key is made of."""

    device: str
    """Exact name of the GPU, or of the CPU."""
    count: int
    """GPUs that the cell uses, or logical CPUs that this process may use."""
    memory_gib: int | None = None
    """Of one GPU."""
    power_limit_w: int | None = None

    @property
    def is_gpu(self) -> bool:
        return self.memory_gib is not None

    @property
    def key(self) -> str:
        """Folder name of the machine's baselines. Compared whole: a similar machine never serves another."""
        name = re.sub(r"[^a-z0-9]+", "-", self.device.lower()).strip("-") or "unknown"
        if not self.is_gpu:
            return f"cpu-{name}-{self.count}c"
        power = "unknown" if self.power_limit_w is None else f"{self.power_limit_w}w"
        return f"{self.count}x-{name}-{self.memory_gib}gib-{power}"


class Gpu(Value, frozen=True, kw_only=True):
    """One visible GPU."""

    name: str
    uuid: str
    memory_gib: int
    power_limit_w: int | None


class Node(Value, frozen=True, kw_only=True):
    """What this process may use."""

    cpu: str
    cpu_cores: int
    gpus: tuple[Gpu, ...]

    def machine_for(self, cell: Cell) -> Machine:
        """The machine that a cell is measured on: the GPUs it uses, or this CPU."""
        if cell.device_kind == "cpu" or not self.gpus:
            return Machine(device=self.cpu, count=self.cpu_cores)
        gpu = self.gpus[0]
        return Machine(
            device=gpu.name, count=cell.world_size, memory_gib=gpu.memory_gib, power_limit_w=gpu.power_limit_w
        )

    def lacks(self, cell: Cell) -> str | None:
        """Why this node cannot run the cell, with the arithmetic, or None when it can."""
        if cell.device_kind == "cuda" and cell.world_size > len(self.gpus):
            return f"needs {cell.world_size} GPU{'s' * (cell.world_size > 1)}, sees {len(self.gpus)}"
        if cell.mode is Mode.COMPILE:
            return missing_compiler()
        return None


def this_node() -> Node:
    """The CPU and the GPUs that this process sees, CUDA_VISIBLE_DEVICES respected."""
    return Node(cpu=cpu_name(), cpu_cores=usable_cores(), gpus=visible_gpus(os.environ.get("CUDA_VISIBLE_DEVICES")))


def usable_cores() -> int:
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def cpu_name() -> str:
    """The CPU's model name; `unknown` rather than a guess."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        match = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(encoding="utf-8"), re.MULTILINE)
        if match:
            return match.group(1).strip()
    return platform.processor() or platform.machine() or "unknown"


def visible_gpus(visible: str | None) -> tuple[Gpu, ...]:
    """NVIDIA GPUs named by a CUDA_VISIBLE_DEVICES value (None: not set, all of them); () without a driver."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    try:
        gpus = [_gpu(pynvml.nvmlDeviceGetHandleByIndex(index)) for index in range(pynvml.nvmlDeviceGetCount())]
    finally:
        pynvml.nvmlShutdown()
    return select_gpus(gpus, visible)


def select_gpus(gpus: list[Gpu], visible: str | None) -> tuple[Gpu, ...]:
    """The GPUs that CUDA would show: a list of indices or UUID prefixes, cut at the first name it does not know."""
    if visible is None:
        return tuple(gpus)
    chosen = []
    for name in (part.strip() for part in visible.split(",")):
        if name.isdigit() and int(name) < len(gpus):
            chosen.append(gpus[int(name)])
            continue
        matching = [gpu for gpu in gpus if name and gpu.uuid.startswith(name)]
        if len(matching) != 1:
            break
        chosen.extend(matching)
    return tuple(chosen)


def missing_compiler() -> str | None:
    """What torch.compile would miss on this machine, a C++ compiler or Python's headers, with the cure."""
    compiler = os.environ.get("CXX", "g++").split()[0]
    if not shutil.which(compiler) and not shutil.which("clang++"):
        return f"torch.compile needs a C++ compiler, found neither {compiler} nor clang++; install g++"
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not header.exists():
        return f"torch.compile needs Python's headers, found no {header}; install python3-dev"
    return None


def link_variables(link: LinkProfile) -> dict[str, str]:
    """Environment variables that make a rank use a link profile."""
    return {"NCCL_P2P_DISABLE": "1"} if link is LinkProfile.NO_P2P else {}


def _gpu(handle: object) -> Gpu:
    try:
        power_limit_w = round(pynvml.nvmlDeviceGetPowerManagementLimit(handle) / 1000)
    except pynvml.NVMLError:
        power_limit_w = None
    return Gpu(
        name=pynvml.nvmlDeviceGetName(handle),
        uuid=pynvml.nvmlDeviceGetUUID(handle),
        memory_gib=round(pynvml.nvmlDeviceGetMemoryInfo(handle).total / 2**30),
        power_limit_w=power_limit_w,
    )
