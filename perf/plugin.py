"""The pytest plugin: options, fixtures, and the order in which cells are measured. Thin, on public pytest only."""

import random
import signal
import threading
import time
from collections.abc import Generator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import pytest
from rich.console import Console

from perf import declarations, options, resumption
from perf.bench import Bench
from perf.facts.cell import Cell
from perf.facts.failure import LaunchError
from perf.facts.hardware import this_node
from perf.facts.matrix import cells_of
from perf.gate import Gate
from perf.measure.connection import ROOT
from perf.selftest_summary import SelfTestSummary
from perf.settings import Settings
from perf.suite import Suite
from perf.summary import Summary
from perf.tell.progress import Progress, terminal_console
from perf.tell.render import line
from perf.tell.results import Manifest, Results
from perf.trials import Trials

SETTINGS = pytest.StashKey[Settings]()
CELLS = pytest.StashKey[tuple[Cell, ...]]()
RESULTS = pytest.StashKey[Results]()
CONSOLE = pytest.StashKey[Console | None]()
TRIALS = pytest.StashKey[Trials]()
SEED = pytest.StashKey[int]()
WAITED = pytest.StashKey[float]()
"""Of a test: seconds that its cell's first runs took before it began."""
FOLDER_KEY, SEED_KEY = "perf_results_folder", "perf_seed"
"""Names under which the folder and the order travel to xdist's workers."""
SUSPICIOUS = "SUSPICIOUS"
"""Said of a cell that will be looked at again."""


def pytest_addoption(parser: pytest.Parser) -> None:
    declarations.add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    """Reads the options at once: a mistake in one is said before anything is collected."""
    try:
        config.stash[SETTINGS] = options.settings(config)
        allowed = options.allowed(config)
        options.selftest(config)
        config.stash[CELLS] = cells_of(config.stash[SETTINGS].matrix)
        config.stash[RESULTS] = _results(config)
        config.stash[SEED] = _seed(config)
    except ValueError as error:
        raise pytest.UsageError(str(error)) from None
    config.stash[CONSOLE] = terminal_console() if _worker_id(config) is None else None
    if _worker_id(config) is None:
        _end_in_order(config)
        results, is_selftest = config.stash[RESULTS], config.getoption("perf_selftest")
        summary = SelfTestSummary(results) if is_selftest else Summary(config, results, allowed)
        config.pluginmanager.register(summary, "perf-summary")


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tells an xdist worker the folder of this test run, and the order of its cells."""
    node.config.stash[RESULTS].claim()
    node.workerinput[FOLDER_KEY] = str(node.config.stash[RESULTS].folder)
    node.workerinput[SEED_KEY] = node.config.stash[SEED]


def pytest_unconfigure(config: pytest.Config) -> None:
    """Leaves no empty folder behind where nothing was measured."""
    if RESULTS in config.stash and _worker_id(config) is None:
        config.stash[RESULTS].leave_if_empty()


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    """Before the first test: writes down which cells this test run is about. xdist: the first worker does."""
    config = session.config
    cells = selected_cells(session)
    if config.getoption("perf_selftest") and not config.option.collectonly:
        config.stash[RESULTS].claim()
    if not cells or config.option.collectonly or _worker_id(config) not in (None, "gw0"):
        return
    results, settings = config.stash[RESULTS], config.stash[SETTINGS]
    if _worker_id(config) is None and not settings.side_by_side:
        _put_control_first(session, cells)
    results.claim()
    if results.exists():
        if _worker_id(config) is None:
            try:
                trials_of(session).suite.check_software()
            except ValueError as error:
                raise pytest.UsageError(str(error)) from None
            except LaunchError:
                pass  # there is no server: said by each cell
        results.go_on(cells, settings.plan, Path(settings.matrix).name)
        return
    results.write_manifest(
        Manifest(
            run_id=results.folder.name,
            started_at=datetime.now(UTC).isoformat(timespec="seconds"),
            matrix=Path(settings.matrix).name,
            plan=settings.plan,
            cells=tuple(cells),
            beside=settings.beside,
            side_by_side=settings.side_by_side,
        )
    )


def _put_control_first(session: pytest.Session, cells: list[Cell]) -> None:
    """So that a machine that drifts while the suite is measured is seen as one."""
    control = trials_of(session).common.choose_control(cells)
    places = [place for place, item in enumerate(session.items) if cell_of(item) is not None]
    chosen = next((place for place in places if cell_of(session.items[place]) == control), places[0])
    session.items.insert(places[0], session.items.pop(chosen))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Cells in a random order, so that what drifts while they are measured does not meet the same ones each time."""
    if config.option.collectonly or config.stash[SETTINGS].in_order:
        return
    places = [place for place, item in enumerate(items) if cell_of(item) is not None]
    measuring = [items[place] for place in places]
    random.Random(config.stash[SEED]).shuffle(measuring)  # noqa: S311 - an order, no secret
    for place, item in zip(places, measuring, strict=True):
        items[place] = item


def pytest_report_collectionfinish(config: pytest.Config, items: list[pytest.Item]) -> str | list[str]:
    """How to have the same order again, where there are cells to order, and whether they are broken on purpose."""
    settings = config.stash[SETTINGS]
    if config.option.collectonly or not any(map(cell_of, items)):
        return []
    order = [] if settings.in_order else [f"cells in random order, --perf-seed {config.stash[SEED]} repeats it"]
    broken = [f"every run is broken on purpose: {settings.fault.text}"] if settings.fault else []
    return [f"perf: {text}" for text in (*order, *broken)]


def cell_of(item: pytest.Item) -> Cell | None:
    """The cell that a test measures, or None."""
    spec = getattr(item, "callspec", None)
    cell = spec.params.get("cell") if spec is not None and "bench" in getattr(item, "fixturenames", ()) else None
    return cell if isinstance(cell, Cell) else None


def selected_cells(session: pytest.Session) -> list[Cell]:
    """The cells of the collected and not deselected tests that measure one, in the order of the matrix."""
    cells = {cell.id: cell for item in session.items if (cell := cell_of(item)) is not None}
    matrix: tuple[Cell, ...] = session.config.stash[CELLS]
    order = {cell.id: place for place, cell in enumerate(matrix)}
    return sorted(cells.values(), key=lambda cell: order.get(cell.id, len(order)))


@pytest.fixture
def bench(request: pytest.FixtureRequest) -> Bench:
    """What a cell's test works with."""
    return Bench(trials_of(request.session), request.node)


@pytest.fixture
def gate(request: pytest.FixtureRequest) -> Gate:
    """What a cell's self-test works with."""
    return Gate(trials_of(request.session).suite, request.node, *options.selftest(request.config))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Cells or self-tests, never both."""
    unasked = "test_cells.py" if config.getoption("perf_selftest") else "test_selftest.py"
    return True if collection_path == ROOT / "perf" / unasked else None


def trials_of(session: pytest.Session) -> Trials:
    """The trials of this process; their server starts with the first run and ends with the session."""
    config = session.config
    if TRIALS not in config.stash:
        settings = config.stash[SETTINGS]
        progress = Progress(
            len(selected_cells(session)),
            config.stash[CONSOLE],
            runs_per_cell=settings.plan.runs,
            tell=partial(_warn, config) if _worker_id(config) is None else None,
        )
        try:
            config.stash[TRIALS] = Trials(Suite(settings, this_node(), config.stash[RESULTS], progress))
        except ValueError as error:
            raise pytest.UsageError(str(error)) from None
    return config.stash[TRIALS]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Makes a cell's first runs before its test begins: a suspicious cell goes to the end of the queue, once.

    Not in a worker of xdist, which has no say in the order: there the test itself looks again at once.
    """
    config, cell = item.config, cell_of(item)
    if cell is None or _worker_id(config) is not None or config.option.setuponly or WAITED in item.stash:
        return None
    if nextitem is not None and nextitem.parent is not item.parent:
        return None  # pytest keeps for this test what its module has set up, and would not for one of another module
    begun = time.monotonic()
    held = trials_of(item.session).holds(cell)
    item.stash[WAITED] = time.monotonic() - begun
    if held is None:
        return None
    _warn(config, f"{SUSPICIOUS:<11} {line(held).partition(' ')[2].lstrip()}")
    item.session.items.append(item)
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """The time of a test holds that of the runs that were made before it began."""
    report = yield
    if report.when == "call":
        report.duration += item.stash.get(WAITED, 0.0)
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Measures the control cell last, and ends the servers, before the report is written."""
    if (trials := session.config.stash.get(TRIALS, None)) is None:
        return
    is_whole = exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED) and not session.shouldfail
    try:
        if is_whole:
            trials.common.look_back()
    finally:
        trials.suite.close()
        for remark in trials.common.remarks:
            _warn(session.config, remark)


def _end_in_order(config: pytest.Config) -> None:
    """SIGTERM, of a CI or a scheduler, is as Ctrl-C: servers end, a build's worktree goes, the report is written."""

    def end(*_: object) -> NoReturn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # `timeout` tells twice: the second must not stop the cleaning up
        raise KeyboardInterrupt

    def restore() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, end)
        config.add_cleanup(restore)


def _warn(config: pytest.Config, text: str) -> None:
    terminal = config.pluginmanager.getplugin("terminalreporter")
    if terminal is not None:
        terminal.write_line(text, yellow=True)


def _results(config: pytest.Config) -> Results:
    """The folder of this test run: a new name, the one to resume, or the one that xdist's controller chose."""
    if _worker_id(config) is not None:
        return Results(Path(config.workerinput[FOLDER_KEY]))  # type: ignore[attr-defined]
    resumed: Path | None = config.getoption("perf_resume")
    if resumed is None:
        return Results.new(config.getoption("perf_results"))
    settings = config.stash[SETTINGS]
    if config.getoption("perf_selftest"):
        results = Results.open_selftest(resumed)
        resumption.check_selftest(results, settings, this_node())
        return results
    results = Results.open(resumed.resolve())
    results.check_cells(config.stash[CELLS])
    resumption.check(results, settings, this_node())
    return results


def _seed(config: pytest.Config) -> int:
    """Of the order: the user's, a new one, or the one that xdist's controller chose."""
    if _worker_id(config) is not None:
        return int(config.workerinput[SEED_KEY])  # type: ignore[attr-defined]
    seed: int | None = config.getoption("perf_seed")
    return random.SystemRandom().randrange(10**6) if seed is None else seed


def _worker_id(config: pytest.Config) -> str | None:
    """`gw0`, `gw1`, ... in a worker of xdist, else None."""
    workerinput = getattr(config, "workerinput", None)
    return None if workerinput is None else workerinput["workerid"]
