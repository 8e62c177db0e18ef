"""The preflight of a node is made: what it reaches and how it is, before anything is measured on it. No torch."""

import platform
import time
from collections.abc import Mapping
from datetime import UTC, datetime

from perf.facts.environment import Source, telling_variables
from perf.facts.failure import LaunchError
from perf.facts.findings import findings, shared_memory_free_bytes
from perf.facts.gpu_health import driver_version, health_of
from perf.facts.gpus import GpuUse, GpuWatch, num_lost, settle
from perf.facts.hardware import Node
from perf.facts.rates import ON_CPU, ON_GPUS, CeilingJob, Ceilings, RankTimes, ceilings_of
from perf.judge.preflight import Preflight
from perf.measure.connection import ROOT
from perf.measure.launch import Launcher

ENTRY = "perf.measure.ceilings:measure_rank"
CPU_RANKS = 2
SAMPLE_S = 0.1
SETTLE_S = 3.0


def examine(
    launcher: Launcher,
    node: Node,
    *,
    source: Source | None = None,
    variables: Mapping[str, str] | None = None,
    deadline_s: float = 120.0,
) -> Preflight:
    """Looks at the node and measures its ceilings. Whoever calls holds the node's lease.

    Args:
        source: the measured tree; None: this one.
        variables: of the environment that the launcher's server has beside this process's.
        deadline_s: of the measurement, which takes seconds.
    """
    measured_at = datetime.now(UTC).isoformat(timespec="seconds")
    source = source or Source(ROOT)
    started_up_s, begun = launcher.start_up_s, time.monotonic()
    software, ceilings, failure, uses = None, None, None, tuple[GpuUse, ...]()
    try:
        software = launcher.start().software
    except LaunchError as error:
        failure = str(error)
    settle(node.gpus, within_s=SETTLE_S)
    gpus, shared_memory = health_of(node.gpus), shared_memory_free_bytes()
    if software is not None:
        with GpuWatch(node.gpus, SAMPLE_S) as watch:
            try:
                ceilings = measure(launcher, node, deadline_s=deadline_s)
            except LaunchError as error:
                failure = str(error)
        uses = watch.uses()
    started_up_s = launcher.start_up_s - started_up_s
    return Preflight(
        measured_at=measured_at,
        took_s=time.monotonic() - begun - started_up_s,
        server_start_up_s=started_up_s,
        machine=node.machine,
        host=platform.node(),
        cpu=node.cpu,
        cpu_cores=node.cpu_cores,
        software=software,
        driver=driver_version(),
        commit=source.commit,
        dirty=source.dirty,
        variables=telling_variables() | dict(variables or {}),
        ceilings=ceilings,
        failure=failure,
        gpus=gpus,
        uses=uses,
        shared_memory_free_bytes=shared_memory,
        findings=tuple(findings(gpus, uses, shared_memory, num_lost())),
    )


def measure(launcher: Launcher, node: Node, *, deadline_s: float) -> Ceilings:
    """The node's ceilings, over all its GPUs or two ranks of its CPU. Raises LaunchError."""
    protocol = ON_GPUS if node.gpus else ON_CPU
    records, _ = launcher.run(
        ENTRY,
        CeilingJob(protocol=protocol, deadline_s=deadline_s),
        world_size=len(node.gpus) or CPU_RANKS,
        record=RankTimes,
        deadline_s=deadline_s,
    )
    return ceilings_of(protocol, records)
