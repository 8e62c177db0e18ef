"""The metrics over test runs: one value for each test run and cell, read from the folders in results/."""

import statistics
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from perf.facts import jsonfile
from perf.facts.cell import Cell, Recipe
from perf.facts.hardware import Machine
from perf.facts.measurement import METRICS, Measurement, Metric
from perf.facts.outcome import Outcome
from perf.facts.record import RunRecord
from perf.tell.bars import run_value
from perf.tell.results import Manifest, Results
from strategies.value import Value

COMMIT = "commit"
"""In the environment of a point."""
_NOT_MEASURES = frozenset({Outcome.WRONG, Outcome.INVALID, Outcome.ERROR})
_DAMAGE = (ValueError, OSError, RecursionError)
"""What reading a folder can meet: broken or foreign JSON, also nested without end, and files that cannot be read."""


class Point(Value, frozen=True, kw_only=True):
    """One test run of a cell: its runs reduced, in the metric's base unit."""

    run_id: str
    """Name of the test run's folder."""
    started_at: str
    """Of the cell's first run; UTC, ISO 8601."""
    median: float
    low: float
    """Smallest run."""
    high: float
    """Largest run."""
    num_runs: int
    """Runs that have the metric."""
    environment: dict[str, str]
    """What may move a value beside the recipe: software, host, kernels, variables, commit. The versions of CUDA and
    NCCL are those that torch uses; the driver's own is not recorded."""


class Series(Value, frozen=True, kw_only=True):
    """One line of a chart: a metric of a cell on one machine by one recipe, oldest first."""

    cell: Cell
    machine: Machine
    recipe: Recipe
    metric: Metric
    points: tuple[Point, ...]


class LeftOut(Value, frozen=True, kw_only=True):
    """A cell of a test run that stands in no line."""

    run_id: str
    cell_id: str
    machine_key: str
    reason: str
    """`planted fault slow_step`, or an outcome such as `WRONG`."""


class History(Value, frozen=True, kw_only=True):
    """Everything that a results folder tells of its test runs."""

    series: tuple[Series, ...]
    """By cell, machine and metric; several recipes of these follow each other, the one that began first leads."""
    left_out: tuple[LeftOut, ...]
    unreadable: tuple[str, ...]
    """Each damaged or foreign folder or file, in words."""

    @property
    def places(self) -> tuple[tuple[str, str], ...]:
        """Each cell id with a machine key that has a line."""
        return tuple(dict.fromkeys((series.cell.id, series.machine.key) for series in self.series))

    def lines(self, cell_id: str, machine_key: str, metric: Metric) -> tuple[Series, ...]:
        """The lines of one chart, one for each recipe."""
        wanted = (cell_id, machine_key, metric)
        return tuple(one for one in self.series if (one.cell.id, one.machine.key, one.metric) == wanted)

    def left_out_of(self, cell_id: str, machine_key: str) -> tuple[LeftOut, ...]:
        return tuple(one for one in self.left_out if (one.cell_id, one.machine_key) == (cell_id, machine_key))


def gather(
    root: Path,
    *,
    wanted: Callable[[Cell], bool] | None = None,
    until: str | None = None,
    newest: int | None = None,
) -> History:
    """Reads the test runs in the folders directly below `root`. Damaged and foreign ones are named and skipped.

    Args:
        root: such as results/; folders whose name begins with a dot are not looked at.
        wanted: which cells to read; None: all.
        until: leaves out test runs that began later (ISO 8601).
        newest: reads this many test runs at most, the latest of those with a wanted cell.

    Raises:
        OSError: `root` itself cannot be read.
    """
    chosen = wanted or (lambda _: True)
    found, unreadable = _test_runs(root)
    if until is not None:
        found = [one for one in found if _time(one[1].started_at) <= _time(until)]
    found = [one for one in found if any(map(chosen, one[1].cells))]
    lines: dict[tuple[str, str, str, Recipe], tuple[Series, list[Point]]] = {}
    left_out: list[LeftOut] = []
    seen: set[tuple[str, str, float]] = set()
    for results, manifest in found[-newest:] if newest else found:
        for cell in filter(chosen, manifest.cells):
            try:
                measurement = _measurement(results, manifest, cell)
                if measurement is None or _identity(measurement) in seen:
                    continue
                reason = manifest.beside if manifest.side_by_side else _objection(results, measurement)
            except _DAMAGE as error:
                unreadable.append(str(error))
                continue
            seen.add(_identity(measurement))
            machine, run_id = measurement.runs[0].environment.machine, results.folder.name
            if reason:
                one = LeftOut(run_id=run_id, cell_id=cell.id, machine_key=machine.key, reason=reason)
                left_out.append(one)
                continue
            for metric, point in _points(run_id, measurement):
                empty = Series(cell=cell, machine=machine, recipe=measurement.recipe, metric=metric, points=())
                key = (cell.id, machine.key, metric.name, measurement.recipe)
                lines.setdefault(key, (empty, []))[1].append(point)
    return History(series=_in_order(lines.values()), left_out=tuple(left_out), unreadable=tuple(unreadable))


def in_time(lines: Iterable[Series]) -> list[tuple[Point, Recipe]]:
    """The points of several lines, each with its recipe, oldest first."""
    return sorted(((point, line.recipe) for line in lines for point in line.points), key=lambda one: _place(one[0]))


def _place(point: Point) -> tuple[datetime, str]:
    """Where a point stands in time."""
    return _time(point.started_at), point.run_id


def _time(text: str) -> datetime:
    """Raises ValueError when this is no time in ISO 8601. One without a zone is UTC."""
    time = datetime.fromisoformat(text)
    return time if time.tzinfo else time.replace(tzinfo=UTC)


def _test_runs(root: Path) -> tuple[list[tuple[Results, Manifest]], list[str]]:
    """The test runs below a folder, oldest first, and the folders that are none, in words."""
    found, unreadable = [], []
    for folder in sorted(root.iterdir()):
        if folder.name.startswith(".") or not folder.is_dir():
            continue
        try:
            results = Results.open(folder)
            manifest = results.manifest()
            found.append((_time(manifest.started_at), folder.name, results, manifest))
        except _DAMAGE as error:
            unreadable.append(str(error))
    return [(results, manifest) for _, _, results, manifest in sorted(found, key=lambda one: one[:2])], unreadable


def _measurement(results: Results, manifest: Manifest, cell: Cell) -> Measurement | None:
    """None without a run. Raises ValueError when a run is damaged, or they are not of one cell and machine."""
    measurement = results.measurement(cell, manifest.plan)
    runs = () if measurement is None else measurement.runs
    keys = sorted({run.environment.machine.key for run in runs})
    if len(keys) > 1:
        raise ValueError(f"{results.folder}: runs of {cell.id} are of several machines: {', '.join(keys)}")
    for run in runs:
        _time(run.started_at)
    return measurement


def _identity(measurement: Measurement) -> tuple[str, str, float]:
    """The same for a copy, as `tools.report --into` makes one: it is no other test run."""
    first = measurement.runs[0]
    return measurement.cell.id, first.started_at, first.wall_s


def _objection(results: Results, measurement: Measurement) -> str | None:
    """Why these runs are no measure of the cell, or None. Raises ValueError when the verdict cannot be read.

    Of the verdict only the outcome is read, so that a history goes on where the rest of its file has changed.
    """
    if faults := [run.fault for run in measurement.runs if run.fault is not None]:
        return f"planted fault {faults[0].kind}"
    path = results.folder / "verdicts" / f"{measurement.cell.id}.json"
    verdict = jsonfile.load(path) if path.exists() else {}
    outcome = verdict.get("outcome") if isinstance(verdict, dict) else None
    return str(outcome) if outcome in _NOT_MEASURES else None


def _points(run_id: str, measurement: Measurement) -> list[tuple[Metric, Point]]:
    """One point for each metric that a run has."""
    found = []
    for metric, _ in METRICS.values():
        values = [value for run in measurement.runs if (value := run_value(run, metric)) is not None]
        if values:
            point = Point(
                run_id=run_id,
                started_at=measurement.runs[0].started_at,
                median=statistics.median(values),
                low=min(values),
                high=max(values),
                num_runs=len(values),
                environment=_environment(measurement.runs[-1]),
            )
            found.append((metric, point))
    return found


def _environment(run: RunRecord) -> dict[str, str]:
    """Name -> value, as far as known."""
    environment, software = run.environment, run.environment.software
    facts = {name: getattr(software, name) for name in ("torch", "transformers", "python", "cuda", "nccl")}
    facts |= {"host": environment.host, "cpu": environment.cpu}
    facts |= {"attention": " ".join(sorted({kernel for rank in run.ranks for kernel in rank.attention}))}
    facts |= dict(sorted(environment.variables.items()))
    if environment.commit is not None:
        facts[COMMIT] = environment.commit[:9] + " with uncommitted changes" * bool(environment.dirty)
    return {name: value for name, value in facts.items() if value}


def _in_order(lines: Iterable[tuple[Series, list[Point]]]) -> tuple[Series, ...]:
    """The lines with their points, both in order."""
    metrics, found = list(METRICS), []
    for line, points in lines:
        points.sort(key=_place)
        key = (line.cell.id, line.machine.key, metrics.index(line.metric.name), _place(points[0]))
        found.append((key, msgspec.structs.replace(line, points=tuple(points))))
    return tuple(line for _, line in sorted(found, key=lambda one: one[0]))
