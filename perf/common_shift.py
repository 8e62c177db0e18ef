"""Whether the whole suite moved: the first looks at all cells, and the cell that is measured first and again.

The breaker is asked once, when the first suspicious cell is looked at again; where there is none, in the end.
"""

import contextlib
import math
from collections.abc import Sequence

import msgspec

from perf.facts.cell import Cell
from perf.facts.failure import LaunchError, ReferenceFailure
from perf.facts.measurement import STEP_TIME, Measurement, disturbances, gaps, measure
from perf.facts.outcome import Outcome
from perf.facts.record import RunRecord
from perf.facts.stats import run_level
from perf.judge.breaker import LEAST_CELLS, Screen, Shift, drift_of, quietest, tripped
from perf.judge.correctness import differences, intrinsic_errors
from perf.judge.pairs import confirmed_shift, judge_pairs
from perf.judge.verdict import Verdict
from perf.suite import Suite


class CommonShift:
    """What the cells of one pytest process have in common."""

    def __init__(self, suite: Suite) -> None:
        self.suite = suite
        self._screens: list[Screen] = []
        self._cells: dict[str, Cell] = {}
        self._shift: Shift | None = None
        self._control: Cell | None = None
        self._is_settled = False
        self.remarks: list[str] = []
        """What else the user has to know, in the end."""

    @property
    def size(self) -> float:
        """Log change of all cells that is the machine's; 0 until the breaker is asked."""
        return 0.0 if self._shift is None else self._shift.size

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

    def note(self, cell: Cell, verdict: Verdict) -> None:
        """Remembers the first look for the breaker."""
        self._cells[cell.id] = cell
        times = [comparison for comparison in verdict.comparisons if comparison.metric == STEP_TIME]
        baseline, _ = self.suite.recall(cell)
        if not times or baseline is None or verdict.outcome is Outcome.NOISY:
            return
        rule, _ = self.suite.rule(cell, baseline)
        sd = rule.sd_of(baseline.levels)
        # A resumed test run may hold fresh looks or pairs already; the breaker asks of what every cell has.
        first = verdict.looks[0] if verdict.looks else times[0]
        change = math.log1p(first.change)
        self._screens.append(Screen(cell_id=cell.id, change=change, suspicious=verdict.suspicious, sd=sd))

    def settled(self) -> Shift | None:
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
        control, suite = self._control, self.suite
        try:
            first = suite.measured(control).runs[: suite.plan.runs]
            runs = self._again(control)
        except (LaunchError, ValueError) as error:
            self._amend(control, Outcome.ERROR, str(error))
            return 0.0
        again = measure(control, suite.plan, runs)
        if errors := self._errors(control, again):
            self._amend(control, Outcome.WRONG, errors[0])
            return 0.0
        if faults := gaps(again) + disturbances(again):
            self.remarks.append(f"whether the machine drifted is not known: {control.id}, measured again: {faults[0]}")
            return 0.0
        levels = [[run_level(run.step_times_s) for run in some] for some in (first, runs)]
        return drift_of(levels[0], levels[1], screen.sd)

    def _again(self, control: Cell) -> list[RunRecord]:
        """As many runs of the control cell as a look has, made after all first looks.

        A resumed test run may hold some, which know nothing of the cells that this process has measured since.
        """
        suite, num_runs = self.suite, self.suite.plan.runs
        have = suite.measured(control).runs
        later = [run for run in have[num_runs:] if suite.has_made(run) or not suite.has_measured]
        missing, known = max(0, num_runs - len(later)), {run.index for run in have}
        new = [run for run in suite.measure(control, len(have) + missing).runs if run.index not in known]
        return [*later, *new][:num_runs]

    def _errors(self, cell: Cell, measurement: Measurement) -> list[str]:
        """What is wrong with the numbers of these runs."""
        _, invariants = self.suite.recall(cell)
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
            baseline, invariants = self.suite.recall(cell)
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
