"""The pytest plugin: options, fixtures, and how a verdict becomes a test's outcome. Thin, on public pytest only."""

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

import pytest
from rich.console import Console

from perf import options
from perf.baseline import Baseline, Invariants
from perf.cell import Cell
from perf.failure import LaunchError
from perf.hardware import this_node
from perf.matrix import cells_of
from perf.measurement import Measurement
from perf.progress import Progress, terminal_console
from perf.render import line
from perf.results import Manifest, Results, unused_folder
from perf.suite import Settings, Suite
from perf.summary import RECORDED, Summary
from perf.verdict import FAILURES, VERDICTS, Outcome, Verdict

SETTINGS = pytest.StashKey[Settings]()
CELLS = pytest.StashKey[tuple[Cell, ...]]()
RESULTS = pytest.StashKey[Results]()
CONSOLE = pytest.StashKey[Console | None]()
FOLDER_KEY = "perf_results_folder"
"""Name under which the folder travels to xdist's workers."""


class Bench:
    """What the test of a cell works with: the suite, and pytest's ways to skip and fail."""

    def __init__(self, suite: Suite, item: pytest.Item) -> None:
        self._suite = suite
        self._item = item
        self.rule = suite.rule

    def refuse(self, cell: Cell) -> None:
        """Skips the test when this cell cannot run here."""
        if reason := self._suite.obstacle(cell):
            self.conclude(Verdict(cell_id=cell.id, outcome=Outcome.UNSUPPORTED, reasons=(reason,)), None)

    def recall(self, cell: Cell) -> tuple[Baseline | None, Invariants | None]:
        """What is stored of the cell; a damaged file fails the test before anything is measured."""
        try:
            return self._suite.recall(cell)
        except ValueError as error:
            reason = f"BASELINE: {error}"
        self._fail_with(cell, reason)

    def measure(self, cell: Cell) -> Measurement:
        """The cell's runs; a run that gives no record fails the test with that run's own error."""
        try:
            return self._suite.measure(cell)
        except (LaunchError, ValueError) as error:
            reason = str(error)
        self._fail_with(cell, reason)  # outside of the except: pytest would show both, one inside the other

    def conclude(self, verdict: Verdict, measurement: Measurement | None) -> None:
        """Records the verdict and makes it the test's: green, red, or a skip that the exit code remembers."""
        recorded = self._suite.conclude(verdict, measurement)
        text = line(verdict, run_folder=_short(self._suite.results.folder))
        if recorded:
            text += f" | {RECORDED}"
        self._item.user_properties.append(("outcome", verdict.outcome.value))
        self._item.user_properties.append(("verdict", text))
        if verdict.outcome in FAILURES:
            pytest.fail(text, pytrace=False)
        if verdict.outcome not in VERDICTS:
            pytest.skip(text)

    def _fail_with(self, cell: Cell, message: str) -> NoReturn:
        self.conclude(Verdict(cell_id=cell.id, outcome=Outcome.ERROR, reasons=(message,)), None)
        raise AssertionError("an ERROR fails the test")


def pytest_addoption(parser: pytest.Parser) -> None:
    options.add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    """Reads the options at once: a mistake in one is said before anything is collected."""
    try:
        config.stash[SETTINGS] = options.settings(config)
        allowed = options.allowed(config)
        config.stash[CELLS] = cells_of(config.stash[SETTINGS].matrix)
        config.stash[RESULTS] = _results(config)
    except ValueError as error:
        raise pytest.UsageError(str(error)) from None
    config.stash[CONSOLE] = terminal_console() if _worker_id(config) is None else None
    if _worker_id(config) is None:
        config.pluginmanager.register(Summary(config, config.stash[RESULTS], allowed), "perf-summary")


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tells an xdist worker the folder of this test run."""
    node.workerinput[FOLDER_KEY] = str(node.config.stash[RESULTS].folder)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    """Before the first test: writes down which cells this test run is about. xdist: the first worker does."""
    config = session.config
    cells = selected_cells(session)
    if not cells or config.option.collectonly or _worker_id(config) not in (None, "gw0"):
        return
    results, settings = config.stash[RESULTS], config.stash[SETTINGS]
    if results.exists():
        return
    results.write_manifest(
        Manifest(
            run_id=results.folder.name,
            started_at=datetime.now(UTC).isoformat(timespec="seconds"),
            matrix=Path(settings.matrix).name,
            plan=settings.plan,
            cells=tuple(cells),
        )
    )


def selected_cells(session: pytest.Session) -> list[Cell]:
    """The cells of the collected and not deselected tests that measure one."""
    measuring = [item for item in session.items if "bench" in getattr(item, "fixturenames", ())]
    parameters = [getattr(item, "callspec", None) for item in measuring]
    cells = [spec.params.get("cell") for spec in parameters if spec is not None]
    return [cell for cell in cells if isinstance(cell, Cell)]


@pytest.fixture(scope="session")
def suite(pytestconfig: pytest.Config, request: pytest.FixtureRequest) -> Iterator[Suite]:
    """The test run of this process; its server starts with the first run and ends with the session."""
    settings = pytestconfig.stash[SETTINGS]
    num_cells = len(selected_cells(request.session))
    terminal = pytestconfig.pluginmanager.getplugin("terminalreporter")
    progress = Progress(
        num_cells,
        pytestconfig.stash[CONSOLE],
        runs_per_cell=settings.plan.runs,
        tell=terminal.write_line if terminal is not None and _worker_id(pytestconfig) is None else None,
    )
    suite = Suite(settings, this_node(), pytestconfig.stash[RESULTS], progress)
    yield suite
    suite.close()


@pytest.fixture
def bench(suite: Suite, request: pytest.FixtureRequest) -> Bench:
    """What a cell's test works with."""
    return Bench(suite, request.node)


def _results(config: pytest.Config) -> Results:
    """The folder of this test run: a new name, the one to resume, or the one that xdist's controller chose."""
    if _worker_id(config) is not None:
        return Results(Path(config.workerinput[FOLDER_KEY]))  # type: ignore[attr-defined]
    resumed: Path | None = config.getoption("perf_resume")
    if resumed is None:
        return Results(unused_folder(config.getoption("perf_results")))
    results = Results.open(resumed)
    results.check_resumable(config.stash[SETTINGS].plan, config.stash[CELLS])
    return results


def _worker_id(config: pytest.Config) -> str | None:
    """`gw0`, `gw1`, ... in a worker of xdist, else None."""
    workerinput = getattr(config, "workerinput", None)
    return None if workerinput is None else workerinput["workerid"]


def _short(folder: Path) -> str:
    """The folder as the user would type it."""
    return str(folder.relative_to(Path.cwd())) if folder.is_relative_to(Path.cwd()) else str(folder)
