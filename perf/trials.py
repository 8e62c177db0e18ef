"""The cells of a test run on trial: a first look at each, fresh looks at the suspicious ones, and the breaker between.

A suspicious cell waits until all others had their turn: its fresh runs then are from another time, and whether the
whole suite moved is known by then. xdist's workers know nothing of each other, and look again at once.
"""

import math

import msgspec

from perf.common_shift import CommonShift
from perf.facts.cell import Cell
from perf.facts.failure import LaunchError, ReferenceFailure
from perf.facts.measurement import Measurement, is_host_bound, ledgers
from perf.facts.outcome import Outcome
from perf.judge.baseline import Baseline, Invariants
from perf.judge.circumstances import beside_unsharded, doubted, everywhere, invalid
from perf.judge.pairs import judge_pairs, reference_errors, unproven
from perf.judge.preflight import Doubts
from perf.judge.verdict import Course, Verdict, judge
from perf.suite import Suite
from perf.tell.explanation import explain


class Trials:
    """Judges the cells of one pytest process."""

    def __init__(self, suite: Suite) -> None:
        self.suite = suite
        self.common = CommonShift(suite)
        self._begun: set[str] = set()
        self._failed: dict[str, LaunchError | ReferenceFailure | ValueError] = {}
        self._doubts: Doubts | None = None

    def holds(self, cell: Cell) -> Verdict | None:
        """Makes the first runs of a cell; what they show if it has to wait for another look, else None.

        What fails is kept for `decide`, which is called inside of the cell's own test.
        """
        suite = self.suite
        if suite.settings.side_by_side or suite.obstacle(cell) or self.postponed(cell):
            return None
        self._begun.add(cell.id)
        try:
            self._recall(cell)
            self._doubts_of(cell)
            measurement = suite.measure(cell, suite.plan.runs)
            verdict = self._judge(cell, measurement)
        except (LaunchError, ReferenceFailure, ValueError) as error:
            self._failed[cell.id] = error
            return None
        self.common.note(cell, verdict)
        # Also one that needs no more runs, resumed or hungrier: the breaker is asked once, when all first looks are in.
        if not (verdict.suspicious or verdict.more_runs or verdict.wanted_pairs):
            return None
        suite.results.write_verdict(verdict)
        if suite.budget is not None:
            suite.budget.reserve(sum(run.wall_s for run in measurement.runs))
        return verdict

    def postponed(self, cell: Cell) -> str | None:
        """Why the time budget has no place for this cell, or None; one whose first look is made is finished."""
        suite = self.suite
        if suite.budget is None or cell.id in self._begun or suite.results.num_runs(cell.id) >= suite.plan.runs:
            return None
        return suite.budget.exceeded_by(cell.id)

    def decide(self, cell: Cell) -> tuple[Measurement, Verdict]:
        """Measures and judges a cell until there is something to say, and asks a cell that regressed why.

        Raises:
            LaunchError, ValueError: as of `Suite.measure`.
        """
        side_by_side = self.suite.settings.side_by_side
        try:
            if error := self._failed.pop(cell.id, None):
                raise error
            self._recall(cell)
            self._doubts_of(cell)
            measurement, verdict = self._side_by_side(cell) if side_by_side else self._in_stages(cell)
        except ReferenceFailure as error:
            measurement = self.suite.measured(cell)
            verdict = Verdict(cell_id=cell.id, outcome=Outcome.INVALID, reasons=(str(error),))
        if verdict.outcome in self.suite.settings.evidence:
            verdict = msgspec.structs.replace(verdict, notes=(*verdict.notes, self._why(cell, measurement)))
        return measurement, verdict

    def _in_stages(self, cell: Cell) -> tuple[Measurement, Verdict]:
        """By the cell's baseline, in as many looks as it takes."""
        suite = self.suite
        measurement = suite.measure(cell, suite.plan.runs)
        verdict = self._judge(cell, measurement)
        # Also of a resumed cell that has all its runs: the shift that it was judged by holds still.
        if verdict.suspicious and (shift := self.common.settled()) is not None:
            measurement = suite.measured(cell)  # the control cell has new runs by now, and quiet ones have pairs
            verdict = self._judge(cell, measurement)
            if shift.is_the_build and (verdict.more_runs or verdict.wanted_pairs):
                return measurement, everywhere(verdict, shift)
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
        suite, shift = self.suite, self.common.size
        baseline, invariants = self._recall(cell)
        rule, remarks = suite.rule(cell, baseline)
        course = Course(
            runs_a_look=suite.plan.runs,
            reference=None if suite.settings.reference is None else suite.referenced(cell),
            shift=shift,
        )
        verdict = judge(measurement, baseline, invariants, rule, course)
        recorded = invariants is not None and not invariants.recipe.differences(measurement.recipe)
        if verdict.outcome is Outcome.NO_BASELINE and not recorded:
            verdict = beside_unsharded(verdict, measurement, suite.store.load_unsharded(cell))
        verdict = doubted(verdict, self._doubts_of(cell), is_host_bound=is_host_bound(measurement))
        if course.reference is not None and course.reference.runs and verdict.comparisons:
            unproved = unproven(measurement, course.reference)
            if errors := [*reference_errors(course.reference), *filter(None, [unproved])]:
                verdict = invalid(verdict, errors)
        if shift:
            remarks = (*remarks, f"less {math.expm1(shift) * 100:+.1f} %, by which the whole suite moved")
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
        except (LaunchError, ReferenceFailure, ValueError) as error:
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
