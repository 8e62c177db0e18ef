"""What a user sees of a self-test: the curve of each cell, and an exit code that says whether the gate was asked."""

import pytest

from perf.facts import jsonfile
from perf.judge.selftest import SelfTest, table
from perf.tell.render import WITHOUT_VERDICT
from perf.tell.results import Results

CELL, FOUND = "self-tested cell", "found of the gate"
"""Properties of a test that asks about the gate, and of one that has written down what it found."""


class SelfTestSummary:
    """Plugin of the one process that talks to the user: the only one, or xdist's controller."""

    def __init__(self, results: Results) -> None:
        self._results = results
        self._asked: list[str] = []
        self._found: list[SelfTest] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Reads what the test of a cell has kept, in whatever process it ran."""
        said = {name: str(value) for name, value in report.user_properties if name in (CELL, FOUND)}
        if report.when != "call" or CELL not in said:
            return
        self._asked.append(said[CELL])
        if FOUND in said:
            self._found.append(jsonfile.read(self._results.selftest(said[FOUND]), SelfTest))

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Green is only what was judged: not a cell too noisy for it, nor a machine on which no cell runs."""
        is_judged = self._found and all(found.is_gated for found in self._found)
        if exitstatus == pytest.ExitCode.OK and self._asked and not is_judged:
            session.exitstatus = WITHOUT_VERDICT

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for found in self._found:
            terminalreporter.section("self-test of the gate")
            terminalreporter.write_line(table(found))
