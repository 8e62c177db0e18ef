"""One build under measurement: its server, and a run of a cell on it."""

import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from perf.facts.cell import Cell, SamplingPlan
from perf.facts.environment import Source, environment
from perf.facts.fault import Fault
from perf.facts.gpus import GpuWatch, settle
from perf.facts.hardware import Node, link_variables
from perf.facts.job import ENTRY, OPENING_STEPS, PLAIN_STEPS, PROFILED_STEPS, Job
from perf.facts.provenance import Imported
from perf.facts.record import RankRecord, RunRecord, Software
from perf.measure.evidence import Evidence, collect
from perf.measure.launch import Launcher
from perf.measure.reference import Build
from strategies.spec import LinkProfile

NUM_TRACED_STEPS = PLAIN_STEPS + OPENING_STEPS + PROFILED_STEPS
Watch = Callable[[str, int], Callable[[dict[str, Any]], None]]
"""Name of a run and its number of steps -> a listener for its events."""


class Arm:
    """A build with a server of its own, started with its first run.

    Args:
        name: `candidate` or `reference`.
        caches: folder of the compile caches.
        proves: whether its records say what each rank imported.
    """

    def __init__(
        self,
        name: str,
        build: Build,
        node: Node,
        *,
        caches: str,
        deadline_s: float,
        commit: str | None = None,
        fault: Fault | None = None,
        proves: bool = False,
    ) -> None:
        self.name = name
        self.source = Source(build.source, commit)
        self.fault = fault
        self._build = build
        self._node = node
        self._deadline_s = deadline_s
        self._proves = proves
        variables = {"TORCHINDUCTOR_CACHE_DIR": caches} | dict(build.variables)
        self.launcher = Launcher(python=build.python, root=build.root, variables=variables, without=build.without)
        self._server_s = 0.0
        self._primed: set[str] = set()

    @property
    def software(self) -> Software:
        """Versions that its server has imported; starts it."""
        return self.launcher.start().software

    @property
    def imported(self) -> Imported:
        """What its server has imported; starts it."""
        return self.launcher.start().imported

    def variables(self, cell: Cell) -> dict[str, str]:
        """Environment variables that only the ranks of a cell get on this arm."""
        return link_variables(cell.link) | dict(cell.variables) | dict(self._build.variables)

    def prime(self, cell: Cell, plan: SamplingPlan, watch: Watch) -> float:
        """One unmeasured run of a compiled cell, so that every measured run finds the compile caches warm.

        Returns:
            The seconds it took; 0 for a cell that needs none or has had its own.
        """
        # The same on every link: what is compiled are the layers of one rank.
        compiled = cell.id if cell.device_kind == "cpu" else msgspec.structs.replace(cell, link=LinkProfile.NATIVE).id
        if not cell.layout.compiled or compiled in self._primed:
            return 0.0
        self.launcher.start()
        begun = time.monotonic()
        short = msgspec.structs.replace(plan, warmup_steps=2, timed_steps=0)
        self._launch(cell, short, None, watch("priming", 2))
        self._primed.add(compiled)
        return time.monotonic() - begun

    def run(self, cell: Cell, index: int, plan: SamplingPlan, watch: Watch, *, fault: Fault | None = None) -> RunRecord:
        """One run, primed before where it needs that, with a fault planted. Raises LaunchError without a record."""
        fault = fault or self.fault
        priming_s = self.prime(cell, plan, watch)
        plan, gpus = cell.plan(plan), self._node.gpus_for(cell)
        settle(gpus)
        self.launcher.start()  # here, so that a run's own time holds no imports of the server
        begun, started_at = time.monotonic(), datetime.now(UTC).isoformat(timespec="seconds")
        what = f"run {index + 1}" if not self._proves else f"run {index + 1} of the {self.name}"
        listener = watch(what, plan.warmup_steps + plan.timed_steps)
        with GpuWatch(gpus) as gpu_watch:
            ranks, teardown_hang = self._launch(cell, plan, fault, listener)
        wall_s = time.monotonic() - begun
        server_s, self._server_s = self.launcher.start_up_s - self._server_s, self.launcher.start_up_s
        machine, variables = self._node.machine_for(cell), self.variables(cell)
        here = environment(
            machine, self._node, self.software, source=self.source, variables=variables, without=self._build.without
        )
        return RunRecord(
            cell=cell,
            plan=plan,
            index=index,
            arm=self.name if self._proves else None,
            started_at=started_at,
            wall_s=wall_s,
            server_start_up_s=server_s,
            priming_s=priming_s,
            environment=here,
            ranks=tuple(ranks),
            gpus=gpu_watch.uses(),
            teardown_hang=teardown_hang,
            fault=fault,
        )

    def profile(self, cell: Cell, plan: SamplingPlan, watch: Watch, folder: Path) -> Evidence:
        """One profiled run; its traces are left in `folder`. Raises LaunchError or ValueError when it gives none."""
        return collect(
            self.launcher,
            cell,
            plan,
            self.variables(cell),
            folder,
            self.name,
            fault=self.fault,
            deadline_s=self._deadline_s,
            on_event=watch(f"profiling the {self.name}", cell.plan(plan).warmup_steps + NUM_TRACED_STEPS),
        )

    def close(self) -> None:
        self.launcher.close()

    def _launch(
        self, cell: Cell, plan: SamplingPlan, fault: Fault | None, listener: Callable[[dict[str, Any]], None]
    ) -> tuple[list[RankRecord], bool]:
        job = Job(
            cell=cell,
            plan=plan,
            requested_at_s=time.monotonic(),
            deadline_s=self._deadline_s,
            fault=fault,
            proves_imports=self._proves,
        )
        return self.launcher.run(
            ENTRY,
            job,
            world_size=cell.world_size,
            record=RankRecord,
            deadline_s=self._deadline_s,
            variables=self.variables(cell),
            on_event=listener,
        )
