"""The hardware a cell runs on, and the key under which its baselines are kept. No torch: asked by the pytest process.

The key holds hardware only, and only what stays the same from day to day: no host name, no clock, no software.
"""

import os
import platform
import re
import shutil
import sysconfig
from pathlib import Path

from perf.facts.cell import Cell
from perf.facts.gpus import Gpu, visible_gpus
from strategies.spec import LinkProfile
from strategies.value import Value


class Machine(Value, frozen=True, kw_only=True):
    """What the key is made of."""

    device: str
    """Exact name of the GPU, or of the CPU."""
    count: int
    """GPUs that the cell uses, or logical CPUs that this process may use."""
    memory_gib: int | None = None
    """Of one GPU."""
    power_limit_w: int | None = None
    link: str | None = None
    """Between the GPUs: `nv18` for 18 NVLinks each, `pcie`, `unknown`; None for one GPU or a CPU."""

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
        link = "" if self.link is None else f"-{self.link}"
        return f"{self.count}x-{name}-{self.memory_gib}gib-{power}{link}"


class Node(Value, frozen=True, kw_only=True):
    """What this process may use."""

    cpu: str
    cpu_cores: int
    gpus: tuple[Gpu, ...]

    def gpus_for(self, cell: Cell) -> tuple[Gpu, ...]:
        """The GPUs that the ranks of a cell take, one each."""
        return self.gpus[: cell.world_size] if cell.device_kind == "cuda" else ()

    def machine_for(self, cell: Cell) -> Machine:
        """The machine that a cell is measured on: the GPUs it uses, or this CPU."""
        if cell.device_kind == "cpu" or not self.gpus:
            return Machine(device=self.cpu, count=self.cpu_cores)
        return _machine(self.gpus_for(cell), cell.world_size)

    @property
    def machine(self) -> Machine:
        """All of it: every GPU, or this CPU where there is none."""
        return _machine(self.gpus, len(self.gpus)) if self.gpus else Machine(device=self.cpu, count=self.cpu_cores)

    def lacks(self, cell: Cell) -> str | None:
        """Why this node cannot run the cell, with the arithmetic, or None when it can."""
        if cell.device_kind == "cuda" and cell.world_size > len(self.gpus):
            return f"needs {cell.world_size} GPU{'s' * (cell.world_size > 1)}, sees {len(self.gpus)}"
        if cell.layout.compiled:
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


def _machine(used: tuple[Gpu, ...], count: int) -> Machine:
    names = sorted({gpu.name for gpu in used})
    return Machine(
        device=names[0] if len(names) == 1 else f"mixed {' '.join(names)}",
        count=count,
        memory_gib=min(gpu.memory_gib for gpu in used),
        power_limit_w=min((gpu.power_limit_w for gpu in used if gpu.power_limit_w is not None), default=None),
        link=_link(used),
    )


def _link(gpus: tuple[Gpu, ...]) -> str | None:
    """What several GPUs talk over, as far as the driver tells."""
    if len(gpus) < 2:
        return None
    links = [gpu.num_nvlinks for gpu in gpus if gpu.num_nvlinks is not None]
    if len(links) < len(gpus):
        return "unknown"
    return f"nv{min(links)}" if min(links) else "pcie"
