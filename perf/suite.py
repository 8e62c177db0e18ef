"""One test run: measures cells into its results folder, recalls their baselines, remembers their verdicts."""

import os
import time
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from perf import baseline as baselines
from perf.approval import provisional, unfit
from perf.baseline import Baseline, Invariants, Store
from perf.cell import Cell, SamplingPlan
from perf.connection import ROOT
from perf.environment import Source, environment
from perf.fault import Fault
from perf.gpus import GpuWatch, settle
from perf.hardware import Machine, Node, link_variables
from perf.job import ENTRY, Job
from perf.launch import Launcher
from perf.lease import Lease
from perf.measurement import Measurement, gaps, measure
from perf.progress import Progress
from perf.record import RankRecord, RunRecord
from perf.results import Results
from perf.verdict import CPU_PRIOR_SD, Outcome, Rule, Verdict
from strategies.rules import refusal
from strategies.spec import LinkProfile
from strategies.value import Value

BASELINES = ROOT / "baselines"
STATE = ROOT / ".shardmark"
"""What this checkout remembers for itself: compile caches and local provisional baselines. Ignored by git."""
LOCAL_BASELINES = STATE / "baselines"


class Settings(Value, frozen=True, kw_only=True):
    """The options of a test run."""

    matrix: str
    plan: SamplingPlan
    baselines: Path
    state: Path
    deadline_s: float
    """Of one run, from the request to the last record."""
    keep_provisional: bool = False
    """Record a local provisional baseline for a cell that has none."""
    fault: Fault | None = None
    commit: str | None = None


class Suite:
    """The state of a test run in one pytest process."""

    def __init__(self, settings: Settings, node: Node, results: Results, progress: Progress) -> None:
        self._settings = settings
        self._node = node
        self._progress = progress
        self._source = Source(ROOT, settings.commit)
        caches = os.environ.get("TORCHINDUCTOR_CACHE_DIR", str(settings.state / "inductor"))
        self._launcher = Launcher(variables={"TORCHINDUCTOR_CACHE_DIR": caches})
        self._local_baselines = settings.state / "baselines"
        self._server_s = 0.0
        self._primed: set[str] = set()
        self.results = results
        self.store = Store(settings.baselines, self._local_baselines)

    def obstacle(self, cell: Cell) -> str | None:
        """Why this cell cannot run here: refused by arithmetic, or by what the machine lacks."""
        if reason := refusal(cell.layout):
            return reason
        fault = self._settings.fault
        if fault is not None and fault.rank is not None and fault.rank >= cell.world_size:
            return f"the fault is planted on rank {fault.rank}, the cell has ranks 0 to {cell.world_size - 1}"
        if self._settings.matrix == "auto" and cell.link is LinkProfile.GLOO and self._node.gpus:
            return (
                f"gloo cells are for machines without GPUs, sees {len(self._node.gpus)}; --perf-matrix smoke runs them"
            )
        return self._node.lacks(cell)

    def machine(self, cell: Cell) -> Machine:
        return self._node.machine_for(cell)

    def recall(self, cell: Cell) -> tuple[Baseline | None, Invariants | None]:
        """What is stored of a cell. Raises ValueError when a stored file is damaged."""
        return self.store.load(cell, self.machine(cell)), self.store.load_invariants(cell)

    def rule(self, cell: Cell) -> Rule:
        """The numbers of the decision, with the typical noise of the cell's machine as the prior."""
        rule, machine = Rule(), self.machine(cell)
        default = rule.prior_sd if machine.is_gpu else CPU_PRIOR_SD
        return msgspec.structs.replace(rule, prior_sd=self.store.prior_sd(machine, default))

    def measure(self, cell: Cell) -> Measurement:
        """The runs of a cell: those that this test run has already, and the rest in fresh process groups.

        Raises:
            LaunchError: a run failed; its process group is gone.
            ValueError: a record of a resumed test run is damaged, or was made with other software.
        """
        plan = self._settings.plan
        runs = {run.index: run for run in self.results.runs(cell.id) if self._is_finished(run)}
        self._progress.begin_cell(cell.id, num_runs=plan.runs - len(runs))
        try:
            with Lease(f"{cell.id} of {self.results.folder}", self._progress.wait):
                if 0 < len(runs) < plan.runs:
                    self._check_software(runs[min(runs)])
                for index in range(plan.runs):
                    if index not in runs:
                        priming_s = self._prime(cell)
                        runs[index] = self._run(cell, index, priming_s)
                        self.results.write_run(runs[index])
        finally:
            self._progress.end_cell()
        return measure(cell, plan, [runs[index] for index in sorted(runs)])

    def conclude(self, verdict: Verdict, measurement: Measurement | None) -> bool:
        """Stores the verdict; whether a local provisional baseline was recorded with it."""
        self.results.write_verdict(verdict)
        # Only of a cell that nothing speaks against: one that departs from its invariants must not become the bar.
        wanted = self._settings.keep_provisional and verdict.outcome is Outcome.NO_BASELINE
        if measurement is None or not wanted or unfit(measurement):
            return False
        cell = measurement.cell
        baseline, invariants = self.recall(cell)
        if invariants is not None and invariants.recipe.differences(measurement.recipe):
            return False
        first_baseline, first_invariants = provisional(measurement, self.results.folder.name)
        if baseline is None:
            baselines.write(self._local_baselines, first_baseline)
        if invariants is None:
            baselines.write(self._local_baselines, first_invariants)
        return baseline is None

    def close(self) -> None:
        self._launcher.close()

    def _is_finished(self, run: RunRecord) -> bool:
        """Whether a run of a resumed test run can be kept. Raises ValueError when code or hardware changed since."""
        environment = run.environment
        for name, then, now in (
            ("commit", environment.commit, self._source.commit),
            ("uncommitted changes", environment.dirty, self._source.dirty),
            ("machine", environment.machine.key, self.machine(run.cell).key),
        ):
            if then != now:
                raise ValueError(f"{self.results.folder}: {name} {then} when measured, {now} now; start a new test run")
        whole = not gaps(measure(run.cell, msgspec.structs.replace(run.plan, runs=1), [run]))
        return whole and run.fault == self._settings.fault

    def _check_software(self, kept: RunRecord) -> None:
        then, now = kept.environment.software, self._launcher.start().software
        if then != now:
            raise ValueError(f"{self.results.folder}: measured with {then}, now it is {now}; start a new test run")

    def _prime(self, cell: Cell) -> float:
        """One unmeasured run of a compiled cell, so that every measured run finds the compile caches warm.

        Returns:
            The seconds it took; 0 for a cell that needs none or has had its own.
        """
        if not cell.layout.compiled or cell.id in self._primed:
            return 0.0
        self._launcher.start()
        begun = time.monotonic()
        self._launch(cell, msgspec.structs.replace(self._settings.plan, warmup_steps=2, timed_steps=0), None, "priming")
        self._primed.add(cell.id)
        return time.monotonic() - begun

    def _run(self, cell: Cell, index: int, priming_s: float) -> RunRecord:
        settings, gpus = self._settings, self._node.gpus_for(cell)
        plan = cell.plan(settings.plan)
        settle(gpus)
        self._launcher.start()  # here, so that a run's own time holds no imports of the server
        begun, started_at = time.monotonic(), datetime.now(UTC).isoformat(timespec="seconds")
        with GpuWatch(gpus) as watch:
            what = f"run {index + 1}/{plan.runs}"
            ranks, teardown_hang = self._launch(cell, plan, settings.fault, what)
        self._progress.end_run()
        software = self._launcher.start().software
        server_s, self._server_s = self._launcher.start_up_s - self._server_s, self._launcher.start_up_s
        return RunRecord(
            cell=cell,
            plan=plan,
            index=index,
            started_at=started_at,
            wall_s=time.monotonic() - begun,
            server_start_up_s=server_s,
            priming_s=priming_s,
            environment=environment(
                self.machine(cell),
                self._node,
                software,
                source=self._source,
                variables=_variables(cell),
            ),
            ranks=tuple(ranks),
            gpus=watch.uses(),
            teardown_hang=teardown_hang,
            fault=settings.fault,
        )

    def _launch(self, cell: Cell, plan: SamplingPlan, fault: Fault | None, what: str) -> tuple[list[RankRecord], bool]:
        deadline_s = self._settings.deadline_s
        job = Job(cell=cell, plan=plan, requested_at_s=time.monotonic(), deadline_s=deadline_s, fault=fault)
        return self._launcher.run(
            ENTRY,
            job,
            world_size=cell.world_size,
            record=RankRecord,
            deadline_s=deadline_s,
            variables=_variables(cell),
            on_event=self._progress.watch(what, plan.warmup_steps + plan.timed_steps),
        )


def _variables(cell: Cell) -> dict[str, str]:
    """Environment variables that only the ranks of a cell get."""
    return link_variables(cell.link) | dict(cell.variables)
