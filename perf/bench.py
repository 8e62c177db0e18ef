"""What the test of a cell works with: its trial, and how a verdict becomes the test's outcome."""

from typing import NoReturn

import pytest

from perf.facts.cell import Cell
from perf.facts.failure import LaunchError, NotResumable
from perf.facts.measurement import Measurement
from perf.facts.outcome import FAILURES, VERDICTS, Outcome
from perf.judge.verdict import Verdict
from perf.summary import RECORDED
from perf.tell.exports import junit_properties
from perf.tell.render import line
from perf.tell.results import shown
from perf.trials import Trials


class Bench:
    """One test, with pytest's ways to skip and fail."""

    def __init__(self, trials: Trials, item: pytest.Item) -> None:
        self._trials = trials
        self._suite = trials.suite
        self._item = item

    def refuse(self, cell: Cell) -> None:
        """Skips the test when this cell cannot run here, or not in the time that is left."""
        for outcome, reason in (
            (Outcome.UNSUPPORTED, self._suite.obstacle(cell)),
            (Outcome.NOT_RUN, self._trials.postponed(cell)),
        ):
            if reason:
                self.conclude(Verdict(cell_id=cell.id, outcome=outcome, reasons=(reason,)), None)

    def decide(self, cell: Cell) -> tuple[Measurement, Verdict]:
        """The cell's runs, as many as it takes, and the verdict on them.

        A damaged baseline fails the test before anything is measured, a run that gives no record with its own error. A
        test run that cannot go on ends, with what it has as it is.
        """
        try:
            return self._trials.decide(cell)
        except NotResumable as error:
            if hasattr(self._item.config, "workerinput"):  # xdist takes an end of its worker for a crash
                pytest.fail(str(error), pytrace=False)
            pytest.exit(str(error), returncode=pytest.ExitCode.USAGE_ERROR)
        except (LaunchError, ValueError) as error:
            reason = str(error)
        self._fail_with(cell, reason)  # outside of the except: pytest would show both, one inside the other

    def conclude(self, verdict: Verdict, measurement: Measurement | None) -> None:
        """Records the verdict and makes it the test's: green, red, or a skip that the exit code remembers."""
        recorded = self._suite.conclude(verdict, measurement)
        text = line(verdict, run_folder=shown(self._suite.results.folder))
        if recorded:
            text += f" | {RECORDED}"
        self._item.user_properties.append(("outcome", verdict.outcome.value))
        self._item.user_properties.append(("verdict", text))
        self._item.user_properties += junit_properties(verdict, measurement)
        if verdict.outcome in FAILURES:
            pytest.fail(text, pytrace=False)
        if verdict.outcome not in VERDICTS:
            pytest.skip(text)

    def _fail_with(self, cell: Cell, message: str) -> NoReturn:
        self.conclude(Verdict(cell_id=cell.id, outcome=Outcome.ERROR, reasons=(message,)), None)
        raise AssertionError("an ERROR fails the test")
