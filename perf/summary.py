"""What a user sees of a test run: verdict lines as they come, the summary, the report, the exit code."""

from pathlib import Path

import pytest

from perf.facts.matrix import known_cells
from perf.facts.outcome import FAILURES, VERDICTS, Outcome
from perf.facts.record import RunRecord
from perf.judge.baseline import Store
from perf.judge.verdict import Verdict
from perf.tell.render import counts, exit_code, in_order, runs_text, table_lines
from perf.tell.results import Results

RECORDED = "recorded a local provisional baseline"
"""In the verdict line of a cell that got its first baseline on this machine."""


class Summary:
    """Plugin of the one process that talks to the user: the only one, or xdist's controller."""

    def __init__(self, config: pytest.Config, results: Results, allowed: frozenset[Outcome]) -> None:
        self._config = config
        self._results = results
        self._allowed = allowed
        self._verdicts: list[Verdict] = []
        self._paths: list[Path] = []
        self._num_recorded = 0
        self._num_told = 0
        self._trouble = ""

    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        """No dots for cells: each has its line."""
        if report.when == "call" and (outcome := _property(report, "outcome")):
            return report.outcome, "", outcome
        return None

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """The verdict on a cell, as soon as it is known."""
        outcome, text = _property(report, "outcome"), _property(report, "verdict")
        if report.when != "call" or outcome is None or text is None:
            return
        self._num_recorded += RECORDED in text
        terminal = self._config.pluginmanager.getplugin("terminalreporter")
        if terminal is not None:
            # Not write_line: it would make the terminal repeat the file's name before the next cell.
            after_own_word = self._config.get_verbosity() > 0
            text = f"\n{text.splitlines()[0]}" if after_own_word or self._num_told == 0 else text.splitlines()[0]
            terminal.write(text if after_own_word else f"{text}\n", flush=True, **_markup(Outcome(outcome)))
            self._num_told += 1

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Names what was not run, writes the report, and sets the exit code where pytest saw no failure."""
        is_refused = exitstatus == pytest.ExitCode.USAGE_ERROR  # what a test run has that cannot go on stays as it is
        if is_refused or not self._results.exists() or session.config.option.collectonly:
            return
        self._verdicts = self._complete()
        from perf.tell.report import write_report  # pandas and matplotlib: only here, after the last measurement

        try:
            self._paths = write_report(self._results)
        except ValueError as error:
            self._trouble = f"no report: {error}"
        if exitstatus == pytest.ExitCode.OK:
            session.exitstatus = exit_code(self._verdicts, self._allowed)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self._verdicts:
            return
        terminalreporter.section("performance")
        for verdict, row in zip(in_order(self._verdicts), table_lines(self._verdicts), strict=True):
            terminalreporter.write_line(row, **_markup(verdict.outcome))
        terminalreporter.write_line(f"cells: {counts(self._verdicts)}", bold=True)
        for sentence in self._sentences():
            terminalreporter.write_line(sentence)
        if self._num_recorded:
            terminalreporter.write_sep("!", "no baseline on this machine", yellow=True, bold=True)
            terminalreporter.write_line(
                f"{self._num_recorded} cells had no timing baseline on this machine: THEIR TIMES WERE COMPARED WITH "
                "NOTHING. They are local provisional baselines now (.shardmark/baselines, ignored by git): "
                "the next run compares with them.",
                yellow=True,
            )
        if self._trouble:
            terminalreporter.write_line(self._trouble, red=True)
        reports = [path for path in self._paths if path.suffix in (".md", ".html")]
        terminalreporter.write_line(f"report: {', '.join(str(path) for path in reports) or self._results.folder}")

    def _complete(self) -> list[Verdict]:
        """The verdicts on all cells of the manifest; one that has none was not run."""
        verdicts = {verdict.cell_id: verdict for verdict in self._results.verdicts()}
        for cell in self._results.manifest().cells:
            if cell.id not in verdicts:
                reason = "expected by the manifest, no result"
                verdicts[cell.id] = Verdict(cell_id=cell.id, outcome=Outcome.NOT_RUN, reasons=(reason,))
                self._results.write_verdict(verdicts[cell.id])
        return list(verdicts.values())

    def _sentences(self) -> list[str]:
        """What moved all cells, where the time went, and what lies in the baselines without a cell."""
        shift = self._results.shift()
        sentences = [] if shift is None else [shift.text]
        measurements = self._results.measurements()
        if measurements:
            runs = [run for measurement in measurements for run in measurement.runs]
            runs += [run for cell in self._results.manifest().cells for run in self._results.reference_runs(cell.id)]
            sentences.append(wall_time(runs))
        known = known_cells().keys() | {cell.id for cell in self._results.manifest().cells}
        option = self._config.getoption
        store = Store(option("perf_baselines"), option("perf_state") / "baselines")
        machines = {run.environment.machine for measurement in measurements for run in measurement.runs}
        for machine in sorted(machines, key=lambda machine: machine.key):
            if unused := sorted(store.ids(machine) - known):
                names = ", ".join(unused)
                sentences.append(f"{machine.key} has baselines that no cell uses: {names}; move or delete them")
        return sentences


def wall_time(runs: list[RunRecord]) -> str:
    """`wall time of 12 runs 63 s: measuring 12 s, compiling (priming) 20 s, warm-up 9 s, start-up 16 s, ...`."""
    parts = {
        "measuring": sum(run.measuring_s for run in runs),
        "compiling (priming)": sum(run.priming_s for run in runs),
        "warm-up": sum(run.warm_up_s for run in runs),
        "start-up": sum(run.start_up_s + run.server_start_up_s for run in runs),
    }
    total = sum(run.wall_s + run.server_start_up_s + run.priming_s for run in runs)
    parts["audit and teardown"] = total - sum(parts.values())
    text = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in parts.items())
    return f"wall time of {runs_text(len(runs))} {total:.1f} s: {text}"


def _property(report: pytest.TestReport, name: str) -> str | None:
    return next((str(value) for key, value in report.user_properties if key == name), None)


def _markup(outcome: Outcome) -> dict[str, bool]:
    if outcome in FAILURES:
        return {"red": True, "bold": True}
    return {"green": True} if outcome in VERDICTS else {"yellow": outcome is not Outcome.UNSUPPORTED}
