"""The cells of a test run on trial: a first look at each, fresh looks at the suspicious ones, and the breaker between.

A suspicious cell waits until all others had their turn: its fresh runs then are from another time, and whether the
whole suite moved is known by then. xdist's workers know nothing of each other, and look again at once.
"""

import contextlib
import math
from collections.abc import Sequence

import msgspec

from perf.facts.cell import Cell
from perf.facts.failure import LaunchError, ReferenceFailure
from perf.facts.measurement import STEP_TIME, Measurement, disturbances, gaps, is_host_bound, ledgers, measure
from perf.facts.outcome import Outcome
from perf.facts.stats import run_level
from perf.judge.baseline import Baseline, Invariants
from perf.judge.breaker import LEAST_CELLS, Screen, Shift, drift_of, quietest, tripped
from perf.judge.circumstances import beside_unsharded, doubted, everywhere, invalid
from perf.judge.correctness import differences, intrinsic_errors
from perf.judge.pairs import confirmed_shift, judge_pairs, reference_errors, unproven
from perf.judge.preflight import Doubts
from perf.judge.verdict import Course, Verdict, judge
from perf.suite import Suite
from perf.tell.explanation import explain


class Trials:
    """Judges the cells of one pytest process."""

    def __init__(self, suite: Suite) -> None:
        self.suite = suite
        self._screens: list[Screen] = []
        self._cells: dict[str, Cell] = {}
        self._failed: dict[str, LaunchError | ValueError] = {}
        self._shift: Shift | None = None
        self._doubts: Doubts | None = None
        self._control: Cell | None = None
        self._is_settled = False
        self.remarks: list[str] = []
        """What else the user has to know, in the end."""

    def choose_control(self, cells: Sequence[Cell]) -> Cell | None:
        """The cell whose recorded runs differ least: measured first, and again before any suspicious one, or last."""
        spreads = []
        for cell in cells:
            with contextlib.suppress(ValueError):  # damaged: said where the cell is judged
                baseline, _ = self.suite.recall(cell)
                if baseline is not None and not self.suite.obstacle(cell):
                    rule, _ = self.suite.rule(cell, baseline)
                    sd = rule.sd_of(baseline.levels)
                    spreads.append((sd, cell.id, cell))
        self._control = min(spreads)[2] if len(spreads) >= LEAST_CELLS else None
        return self._control

    def holds(self, cell: Cell) -> Verdict | None:
        """Makes the first runs of a cell; what they show if it has to wait for another look, else None.

        What fails is kept for `decide`, which is called inside of the cell's own test.
        """
        suite = self.suite
        if suite.settings.side_by_side or suite.obstacle(cell) or self.postponed(cell):
            return None
        try:
            self._recall(cell)
            self._doubts_of(cell)
            measurement = suite.measure(cell, suite.plan.runs)
            verdict = self._judge(cell, measurement)
        except (LaunchError, ValueError) as error:
            self._failed[cell.id] = error
            return None
        self._note(cell, verdict)
        # Also one that needs no more runs, resumed or hungrier: the breaker is asked once, when all first looks are in.
        if not (verdict.suspicious or verdict.more_runs or verdict.wanted_pairs):
            return None
        suite.results.write_verdict(verdict)
        if suite.budget is not None:
            suite.budget.reserve(sum(run.wall_s for run in measurement.runs))
        return verdict

    def postponed(self, cell: Cell) -> str | None:
        """Why the time budget has no place for this cell, or None; one that has been begun is finished."""
        budget, begun = self.suite.budget, cell.id in self._cells or cell.id in self._failed
        if budget is None or begun or self.suite.results.runs(cell.id):
            return None
        return budget.exceeded_by(cell.id)

    def decide(self, cell: Cell) -> tuple[Measurement, Verdict]:
        """Measures and judges a cell until there is something to say, and asks a cell that regressed why.

        Raises:
            LaunchError, ValueError: as of `Suite.measure`.
        """
        if error := self._failed.pop(cell.id, None):
            raise error
        self._recall(cell)
        self._doubts_of(cell)
        side_by_side = self.suite.settings.side_by_side
        try:
            measurement, verdict = self._side_by_side(cell) if side_by_side else self._in_stages(cell)
        except ReferenceFailure as error:
            measurement = self.suite.measured(cell)
            verdict = Verdict(cell_id=cell.id, outcome=Outcome.INVALID, reasons=(str(error),))
        if verdict.outcome in self.suite.settings.evidence:
            verdict = msgspec.structs.replace(verdict, notes=(*verdict.notes, self._why(cell, measurement)))
        return measurement, verdict

    def look_back(self) -> None:
        """The control cell once more, after all others, where no suspicious one asked for it.

        No verdict changes; but on a machine that became faster, cells pass that would not have, and the reader has to
        know.
        """
        control, budget = self._control, self.suite.budget
        if control is None or self._is_settled or (budget is not None and budget.exceeded_by(control.id)):
            return
        self._is_settled = True
        drift = self._drift()
        if len(self._screens) >= LEAST_CELLS:
            self.suite.results.write_shift(tripped(self._screens, control=control.id, drift=drift) if drift else None)

    def _in_stages(self, cell: Cell) -> tuple[Measurement, Verdict]:
        """By the cell's baseline, in as many looks as it takes."""
        suite = self.suite
        measurement = suite.measure(cell, suite.plan.runs)
        verdict = self._judge(cell, measurement)
        # Also of a resumed cell that has all its runs: the shift that it was judged by holds still.
        if verdict.suspicious and (shift := self._settled()) is not None:
            if shift.is_the_build and (verdict.more_runs or verdict.wanted_pairs):
                return measurement, everywhere(verdict, shift)
            verdict = self._judge(cell, measurement)
        while verdict.more_runs or verdict.wanted_pairs:
            if verdict.more_runs:
                measurement = suite.measure(cell, len(measurement.runs) + verdict.more_runs)
            else:
                measurement, _ = suite.measure_beside(cell, verdict.wanted_pairs)
            verdict = self._judge(cell, measurement)
        return measurement, verdict

    def _recall(self, cell: Cell) -> tuple[Baseline | None, Invariants | None]:
        """What is stored of the cell. Raises ValueError when it is damaged, before anything is measured."""
        try:
            return self.suite.recall(cell)
        except ValueError as error:
            raise ValueError(f"BASELINE: {error}") from None

    def _judge(self, cell: Cell, measurement: Measurement) -> Verdict:
        suite, shift = self.suite, self._shift
        baseline, invariants = self._recall(cell)
        rule, remarks = suite.rule(cell, baseline)
        course = Course(
            runs_a_look=suite.plan.runs,
            reference=None if suite.settings.reference is None else suite.referenced(cell),
            shift=0.0 if shift is None else shift.size,
        )
        verdict = judge(measurement, baseline, invariants, rule, course)
        if invariants is None and verdict.outcome is Outcome.NO_BASELINE:
            verdict = beside_unsharded(verdict, measurement, suite.store.load_unsharded(cell))
        verdict = doubted(verdict, self._doubts_of(cell), is_host_bound=is_host_bound(measurement))
        if course.reference is not None and course.reference.runs and verdict.comparisons:
            unproved = unproven(measurement, course.reference)
            if errors := [*reference_errors(course.reference), *filter(None, [unproved])]:
                verdict = invalid(verdict, errors)
        if course.shift:
            remarks = (*remarks, f"less {math.expm1(course.shift) * 100:+.1f} %, by which the whole suite moved")
        return msgspec.structs.replace(verdict, notes=(*remarks, *verdict.notes))

    def _doubts_of(self, cell: Cell) -> Doubts:
        """Why this node is not comparable with others of its kind, asked once, before its GPUs are measured."""
        if cell.device_kind == "cpu" or not self.suite.has_gpus:
            return Doubts()
        if self._doubts is None:
            self._doubts = self.suite.examine()
        return self._doubts

    def _why(self, cell: Cell, measurement: Measurement) -> str:
        """What profiled runs say of the regression: kept whole, its first line given. They change no verdict."""
        results = self.suite.results
        try:
            candidate, *others = self.suite.profile(cell)
        except (LaunchError, ValueError) as error:
            return f"no evidence: the profiled run failed: {str(error).splitlines()[0]}"
        reference = others[0] if others else None
        _, invariants = self._recall(cell)
        then = invariants.ledger if invariants is not None else None
        if reference is not None:
            then = ledgers(self.suite.referenced(cell).runs[-1])
        # As a reader of the report finds it, wherever the checkout lies.
        folder = str(results.evidence_folder(cell.id).relative_to(results.folder.parent.parent))
        lines = explain(candidate, reference, ledgers(measurement.runs[-1]), then, folder=folder)
        results.write_explanation(cell.id, lines)
        return f"why: {lines[0]}; more in {folder}"

    def _side_by_side(self, cell: Cell) -> tuple[Measurement, Verdict]:
        """Every pair decides, no baseline does."""
        suite = self.suite
        baseline, invariants = self._recall(cell)
        rule, remarks = suite.rule(cell, None)  # the pairs tell their own noise; a baseline's may only add to it
        wanted = suite.settings.pairs or rule.pairs
        while wanted:
            candidate, reference = suite.measure_beside(cell, wanted)
            verdict = judge_pairs(candidate, reference, baseline, invariants, rule, wanted=suite.settings.pairs)
            wanted = verdict.wanted_pairs
        return candidate, msgspec.structs.replace(verdict, notes=(*remarks, *verdict.notes))

    def _note(self, cell: Cell, verdict: Verdict) -> None:
        """Remembers the first look for the breaker."""
        self._cells[cell.id] = cell
        times = [comparison for comparison in verdict.comparisons if comparison.metric == STEP_TIME]
        baseline, _ = self._recall(cell)
        if not times or baseline is None or verdict.outcome is Outcome.NOISY:
            return
        rule, _ = self.suite.rule(cell, baseline)
        sd = rule.sd_of(baseline.levels)
        # A resumed test run may hold fresh looks or pairs already; the breaker asks of what every cell has.
        first = verdict.looks[0] if verdict.looks else times[0]
        change = math.log1p(first.change)
        self._screens.append(Screen(cell_id=cell.id, change=change, suspicious=verdict.suspicious, sd=sd))

    def _settled(self) -> Shift | None:
        """Asks the breaker, once, when the first suspicious cell is looked at again."""
        if not self._is_settled:
            self._is_settled = True
            shift = tripped(self._screens, control=self._control.id if self._control else "", drift=self._drift())
            if shift is not None and shift.is_common and self.suite.settings.reference is not None:
                shift = msgspec.structs.replace(shift, beside=self._quietest_beside(self._screens))
                if shift.beside is not None and not shift.is_the_build:
                    moved = self._quietest_beside([screen for screen in self._screens if screen.suspicious])
                    shift = msgspec.structs.replace(shift, suspicious_beside=moved)
            self._shift = shift
            if shift is not None or len(self._screens) >= LEAST_CELLS:  # too few cannot take back what was said
                self.suite.results.write_shift(shift)
        return self._shift

    def _drift(self) -> float:
        """How far the control cell has moved since it was measured first; 0 where its new runs cannot say."""
        screen = next(
            (screen for screen in self._screens if self._control and screen.cell_id == self._control.id), None
        )
        if screen is None or self._control is None or len(self._screens) < LEAST_CELLS:
            return 0.0
        control, num_runs = self._control, self.suite.plan.runs
        try:
            runs = self.suite.measure(control, 2 * num_runs).runs
        except (LaunchError, ValueError) as error:
            self._amend(control, Outcome.ERROR, str(error))
            return 0.0
        again = measure(control, self.suite.plan, list(runs[num_runs:]))
        if errors := self._errors(control, again):
            self._amend(control, Outcome.WRONG, errors[0])
            return 0.0
        if faults := gaps(again) + disturbances(again):
            self.remarks.append(f"whether the machine drifted is not known: {control.id}, measured again: {faults[0]}")
            return 0.0
        levels = [run_level(run.step_times_s) for run in runs]
        return drift_of(levels[:num_runs], levels[num_runs:], screen.sd)

    def _errors(self, cell: Cell, measurement: Measurement) -> list[str]:
        """What is wrong with the numbers of these runs."""
        _, invariants = self._recall(cell)
        errors = intrinsic_errors(measurement)
        if errors or invariants is None or gaps(measurement) or invariants.recipe.differences(measurement.recipe):
            return errors
        return differences(measurement, invariants)

    def _amend(self, cell: Cell, outcome: Outcome, reason: str) -> None:
        """Another verdict on a cell that had passed, by later runs of it: it counts for the exit code."""
        verdict = Verdict(cell_id=cell.id, outcome=outcome, reasons=(f"measured again: {reason}",))
        self.suite.results.write_verdict(verdict)
        self.remarks.append(f"{outcome} {cell.id} | {verdict.reasons[0]}")

    def _quietest_beside(self, screens: Sequence[Screen]) -> float | None:
        """What the quietest of these cells say of the build, beside the reference; None: they could not be compared."""
        verdicts = []
        for cell_id in quietest(screens):
            cell = self._cells[cell_id]
            baseline, invariants = self._recall(cell)
            rule, _ = self.suite.rule(cell, baseline)
            try:
                candidate, reference = self.suite.measure_beside(cell, rule.pairs)
            except LaunchError as error:
                self._amend(cell, Outcome.ERROR, str(error))
                continue
            except ReferenceFailure as error:
                self.remarks.append(f"{cell_id}: {error}")
                continue
            verdict = judge_pairs(candidate, reference, baseline, invariants, rule, wanted=rule.pairs)
            if verdict.outcome is Outcome.WRONG:
                self._amend(cell, Outcome.WRONG, verdict.reasons[0])
            verdicts.append(verdict)
        change = confirmed_shift(verdicts)
        return None if change is None else math.log1p(change)
