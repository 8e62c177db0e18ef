"""One test run: measures cells into its results folder, recalls their baselines, judges them, keeps their verdicts."""

import itertools
import time
from collections.abc import Sequence
from functools import partial

import msgspec

from perf import resumption
from perf.arms import Arms
from perf.budget import Budget
from perf.facts.cell import Cell, SamplingPlan
from perf.facts.failure import LaunchError, ReferenceFailure
from perf.facts.fault import Fault
from perf.facts.hardware import Machine, Node
from perf.facts.matrix import obstacle
from perf.facts.measurement import Measurement, disturbances, gaps, measure
from perf.facts.outcome import Outcome
from perf.facts.record import RunRecord
from perf.judge import baseline as baselines
from perf.judge.approval import provisional, unfit
from perf.judge.baseline import Baseline, Invariants, Store
from perf.judge.preflight import Doubts, looked_at
from perf.judge.rule import Rule, prior_sd, rule_for
from perf.judge.verdict import Verdict
from perf.measure.arm import Arm
from perf.measure.evidence import Evidence
from perf.measure.examination import examine
from perf.measure.lease import Lease
from perf.settings import Settings
from perf.tell.progress import Progress
from perf.tell.results import REFERENCE, RUNS, SELFTEST, Results


class Suite:
    """The state of a test run in one pytest process."""

    def __init__(self, settings: Settings, node: Node, results: Results, progress: Progress) -> None:
        self.settings = settings
        self._node = node
        self._progress = progress
        self._local_baselines = settings.state / "baselines"
        self._arms = Arms(settings, node)
        self._priors: dict[Machine, float] = {}
        self._pairs: dict[str, int] = {}
        self._checked: set[str] = set()
        self._made: set[tuple[str, str, int]] = set()
        """Arm, cell and index of the runs of this process: kept whatever they lack, which is for the judge to say."""
        self.results = results
        self.store = Store(settings.baselines, self._local_baselines)
        total_s = settings.time_budget_s
        profiles = Outcome.PASS in settings.evidence
        self.budget = None if total_s is None else Budget(total_s, self._expected_s, profiles=profiles)

    @property
    def plan(self) -> SamplingPlan:
        return self.settings.plan

    @property
    def has_measured(self) -> bool:
        """Whether this process has made a run, of whatever cell."""
        return bool(self._made)

    def check_software(self) -> None:
        """Raises NotResumable when the runs that are there already were made with other versions than this build's."""
        if self.results.first(RUNS) is not None:
            self._check_software(self._arms.candidate, RUNS)

    def has_made(self, run: RunRecord) -> bool:
        """Whether this process has made this run of the candidate; else it is one of a resumed test run."""
        return (self._arms.candidate.name, run.cell.id, run.index) in self._made

    def obstacle(self, cell: Cell) -> str | None:
        """Why this cell cannot run here: refused by arithmetic, or by what the machine lacks."""
        fault = self.settings.fault
        if fault is not None and fault.rank is not None and fault.rank >= cell.world_size:
            return f"the fault is planted on rank {fault.rank}, the cell has ranks 0 to {cell.world_size - 1}"
        return obstacle(cell, self._node, self.settings.matrix)

    def machine(self, cell: Cell) -> Machine:
        return self._node.machine_for(cell)

    def recall(self, cell: Cell) -> tuple[Baseline | None, Invariants | None]:
        """What is stored of a cell, without this test run's own night: a resumed one is no bar to itself.

        Raises ValueError when a stored file is damaged.
        """
        stored = self.store.load(cell, self.machine(cell))
        baseline = None if stored is None else stored.without(self.results.folder.name)
        return baseline, self.store.load_invariants(cell)

    def rule(self, cell: Cell, baseline: Baseline | None) -> tuple[Rule, tuple[str, ...]]:
        """The numbers of the decision, the typical noise of the cell's machine as the prior, and remarks on them."""
        machine = self.machine(cell)
        if machine not in self._priors:  # every baseline of the machine is read for it
            self._priors[machine] = prior_sd(self.store, machine)
        return rule_for(cell.id, self.settings.preset, baseline, self.settings.overrides, self._priors[machine])

    def measure(self, cell: Cell, num_runs: int) -> Measurement:
        """At least so many runs of a cell: those that this test run has already, and the rest in fresh process groups.

        Raises:
            LaunchError: a run failed; its process group is gone.
            NotResumable: a record of a resumed test run was made with other software.
        """
        have = {run.index for run in self._finished(self._arms.candidate, cell)}
        # Half a pair, as an interrupted test run leaves, must not get a neighbour from another time.
        taken = have | {run.index for run in self.results.reference_runs(cell.id)}
        free = (index for index in itertools.count() if index not in taken)
        self._make(
            cell, [(self._arms.candidate, index) for index in itertools.islice(free, max(0, num_runs - len(have)))]
        )
        return self.measured(cell)

    def measure_beside(self, cell: Cell, num_pairs: int) -> tuple[Measurement, Measurement]:
        """So many pairs of runs on both builds, in the order ABBA ABBA; the candidate's and the reference's runs.

        What drifts while they are made then touches both builds alike.

        Raises:
            LaunchError, ValueError: as of `measure`; also where both builds are the same.
        """
        other = self._arms.reference()
        if self.settings.side_by_side:  # else the pairs are more than the plan asks for
            self._pairs[cell.id] = num_pairs
        paired = {run.index for run in self._finished(other, cell)}
        # As in `measure`: half a pair stays alone.
        alone = {run.index for run in self._finished(self._arms.candidate, cell)} ^ paired
        free = (index for index in itertools.count() if index not in alone)
        wanted: list[tuple[Arm, int]] = []
        for number, index in enumerate(itertools.islice(free, num_pairs)):
            pair = [(other, index), (self._arms.candidate, index)]
            wanted += pair if number % 2 == 0 else reversed(pair)
        self._make(cell, wanted)
        return self.measured(cell), self.referenced(cell)

    def measured(self, cell: Cell) -> Measurement:
        """The finished runs of a cell on this build."""
        return measure(cell, self._plan_of(cell), self._finished(self._arms.candidate, cell))

    def referenced(self, cell: Cell) -> Measurement:
        """The finished runs of a cell on the reference build, which is not started for this where there are none."""
        runs = self._finished(self._arms.reference(), cell) if self.results.reference_runs(cell.id) else []
        return measure(cell, msgspec.structs.replace(self.plan, runs=max(1, len(runs))), runs)

    def _plan_of(self, cell: Cell) -> SamplingPlan:
        """Side by side, the noise of a cell or an override says how many runs it has."""
        return msgspec.structs.replace(self.plan, runs=self._pairs.get(cell.id, self.plan.runs))

    def sample(self, cell: Cell, faults: Sequence[Fault | None]) -> list[RunRecord]:
        """A run of a cell with each fault, in this order; each is kept, and those that there are already stay.

        Raises:
            LaunchError: a run gave no record.
            ValueError: runs that are kept have another plan or fault, or code or hardware changed since.
        """
        arm, runs = self._arms.candidate, self.results.samples(cell.id)
        for run in runs:
            then = run.plan, run.fault
            now = cell.plan(self.plan), faults[run.index] if run.index < len(faults) else run.fault
            if then != now:
                raise ValueError(
                    f"{self.results.folder}: run {run.index} is of {then}, not {now}; start a new self-test"
                )
        kept = {run.index: run for run in runs}
        missing = [index for index in range(len(faults)) if index not in kept]
        self._progress.begin_cell(cell.id, num_runs=len(missing))
        try:
            with Lease(f"self-test of {cell.id}", self._progress.wait):
                for index in missing:
                    self._check_software(arm, SELFTEST)
                    kept[index] = arm.run(cell, index, self.plan, self._progress.watch, fault=faults[index])
                    self._progress.end_run()
                    self.results.write_sample(kept[index])
        finally:
            self._progress.end_cell()
        return [kept[index] for index in range(len(faults))]

    def profile(self, cell: Cell) -> list[Evidence]:
        """A profiled run of the cell on this build, and on the reference where one was measured; each is kept.

        Those that a resumed test run has already are not made again.

        Raises LaunchError, ReferenceFailure or ValueError when a run gives no record.
        """
        folder, begun = self.results.evidence_folder(cell.id), time.monotonic()
        arms = [self._arms.candidate, *([self._arms.reference()] if self.results.reference_runs(cell.id) else [])]
        found = {arm.name: self.results.evidence(cell.id, arm.name) for arm in arms}
        missing = [arm for arm in arms if found[arm.name] is None]
        self._progress.begin_cell(cell.id, num_runs=0)
        try:
            with Lease(f"profile of {cell.id} of {self.results.folder}", self._progress.wait):
                for arm in missing:
                    new = found[arm.name] = arm.profile(cell, self.plan, self._progress.watch, folder)
                    self.results.write_evidence(arm.name, new)
        finally:
            self._progress.end_cell()
        if self.budget is not None and missing:
            self.budget.profiled(time.monotonic() - begun)
        return list(filter(None, found.values()))

    def examine(self) -> Doubts:
        """Why this node is not comparable with what machines of its key have reached; kept as the test run's preflight.

        Raises ValueError when the recorded ceilings are damaged.
        """
        with Lease(f"preflight of {self.results.folder}", self._progress.wait):
            arm, variables = self._arms.candidate, dict(self.settings.variables)
            look = partial(examine, arm.launcher, self._node, source=arm.source, variables=variables)
            preflight, found = looked_at(look, self.store.load_ceilings)
        self.results.write_preflight(preflight)
        return found

    @property
    def has_gpus(self) -> bool:
        return bool(self._node.gpus)

    def conclude(self, verdict: Verdict, measurement: Measurement | None) -> bool:
        """Stores the verdict; whether a local provisional baseline was recorded with it."""
        self.results.write_verdict(verdict)
        # Only of a cell that nothing speaks against: one that departs from its invariants must not become the bar.
        wanted = self.settings.keep_provisional and verdict.outcome is Outcome.NO_BASELINE
        if measurement is None or not wanted or unfit(measurement):
            return False
        cell = measurement.cell
        baseline, invariants = self.store.load(cell, self.machine(cell)), self.store.load_invariants(cell)
        if invariants is not None and invariants.recipe.differences(measurement.recipe):
            return False
        first_baseline, first_invariants = provisional(measurement, self.results.folder.name)
        if baseline is None:
            baselines.write(self._local_baselines, first_baseline)
        if invariants is None:
            baselines.write(self._local_baselines, first_invariants)
        return baseline is None

    def close(self) -> None:
        """Ends both servers, and removes what was made for the reference."""
        self._arms.close()

    def _expected_s(self, cell_id: str) -> float | None:
        """What the runs that a cell lacks will take, or those of one more look."""
        lacking = self.plan.runs - self.results.num_runs(cell_id)
        arms = (RUNS, REFERENCE) if self.settings.side_by_side else (RUNS,)
        return self.results.expected_s(cell_id, lacking if lacking > 0 else self.plan.runs, arms)

    def _make(self, cell: Cell, wanted: list[tuple[Arm, int]]) -> None:
        """Makes the runs that are not there yet, in this order, while nobody else times anything on this node."""
        have = {(arm.name, run.index) for arm in {arm for arm, _ in wanted} for run in self._finished(arm, cell)}
        missing = [(arm, index) for arm, index in wanted if (arm.name, index) not in have]
        if not missing:
            return
        self._progress.begin_cell(cell.id, num_runs=len(missing))
        begun = time.monotonic()
        try:
            with Lease(f"{cell.id} of {self.results.folder}", self._progress.wait):
                for arm, index in missing:
                    self._check_software(arm, RUNS if arm is self._arms.candidate else REFERENCE)
                    run = self._run(arm, cell, index)
                    self._progress.end_run()
                    self._write(arm, run)
        finally:
            self._progress.end_cell()
        if self.budget is not None:
            self.budget.took(time.monotonic() - begun)

    def _run(self, arm: Arm, cell: Cell, index: int) -> RunRecord:
        try:
            return arm.run(cell, index, self._plan_of(cell), self._progress.watch)
        except LaunchError as error:
            if arm is self._arms.candidate:
                raise
            raise ReferenceFailure(f"the {arm.name} gave no record: {error}") from None

    def _finished(self, arm: Arm, cell: Cell) -> list[RunRecord]:
        """The whole runs that this test run has; what was made with other code or hardware was refused before."""
        read = self.results.runs if arm is self._arms.candidate else self.results.reference_runs
        made = self._made
        return [run for run in read(cell.id) if (arm.name, cell.id, run.index) in made or self._is_finished(run)]

    def _is_finished(self, run: RunRecord) -> bool:
        alone = measure(run.cell, msgspec.structs.replace(run.plan, runs=1), [run])
        if gaps(alone) or run.plan.warmup_steps != run.cell.plan(self.plan).warmup_steps:
            return False
        # One that was disturbed, such as by a throttled GPU, is made again: kept, its cell could never be judged. The
        # runs of a pair are neighbours in time: one alone cannot be made again.
        return not disturbances(alone) or bool(self.results.reference_runs(run.cell.id))

    def _check_software(self, arm: Arm, kind: str) -> None:
        if arm.name not in self._checked:
            resumption.check_software(self.results, kind, arm.software)
            self._checked.add(arm.name)

    def _write(self, arm: Arm, run: RunRecord) -> None:
        self._made.add((arm.name, run.cell.id, run.index))
        write = self.results.write_run if arm is self._arms.candidate else self.results.write_reference_run
        write(run)
