"""Exports of a finished test run: its measured values as JSON for other tools, and as properties for JUnit.

Only measured values go out. A cell whose outcome says that it has none (wrong, invalid, failed, refused, not run), one
with a planted fault, and a metric that a run lacks or that is no positive finite number, is left out; never is it a 0.
`FinishedTestRun.left_out` names such cells.
"""

import math
import statistics
from typing import Any, Literal

from perf.facts import jsonfile
from perf.facts.measurement import PEAK_ALLOCATED, STEP_TIME, THROUGHPUT, Measurement, Metric
from perf.facts.outcome import Outcome
from perf.facts.record import Environment
from perf.judge.verdict import Verdict
from perf.tell.results import Manifest, Results
from strategies.value import Value

WITH_VALUES = frozenset(
    {
        Outcome.PASS,
        Outcome.IMPROVED,
        Outcome.REGRESSED,
        Outcome.ENVIRONMENT,
        Outcome.NOISY,
        Outcome.NO_BASELINE,
    }
)
"""Outcomes of cells that computed the right thing in whole runs. How fast wrong numbers came is no measure of anything,
and a dashboard does not show that they are wrong."""
EXPORTED = (STEP_TIME, THROUGHPUT, PEAK_ALLOCATED)
_BENCHER = {
    STEP_TIME.name: ("latency", 1e9),
    THROUGHPUT.name: ("throughput", 1),
    PEAK_ALLOCATED.name: ("peak-allocated-bytes", 1),
}
_ACTION = {
    STEP_TIME.name: ("ms", 1e3),
    THROUGHPUT.name: ("tokens/s", 1),
    PEAK_ALLOCATED.name: ("MiB", 2**-20),
}


class FinishedTestRun(Value, frozen=True, kw_only=True):
    """A test run as its exports see it."""

    manifest: Manifest
    verdicts: tuple[Verdict, ...]
    """Of every cell, measured or not."""
    measurements: tuple[Measurement, ...]
    """Of every cell that has runs, in the manifest's order."""

    @property
    def with_values(self) -> list[tuple[Measurement, Verdict]]:
        """The cells whose values may be shown, in the manifest's order."""
        verdicts = {verdict.cell_id: verdict for verdict in self.verdicts}
        pairs = [(measurement, verdicts[measurement.cell.id]) for measurement in self.measurements]
        return [(measurement, verdict) for measurement, verdict in pairs if obstacle(verdict, measurement) is None]

    @property
    def left_out(self) -> dict[str, str]:
        """Why no value of a cell is shown, by the cell's id."""
        measurements = {measurement.cell.id: measurement for measurement in self.measurements}
        reasons = {verdict.cell_id: obstacle(verdict, measurements.get(verdict.cell_id)) for verdict in self.verdicts}
        return {cell_id: reason for cell_id, reason in reasons.items() if reason is not None}


def read_test_run(results: Results) -> FinishedTestRun:
    """What a results folder holds; a cell without a verdict is NOT_RUN. Raises ValueError for a damaged file."""
    manifest = results.manifest()
    unjudged = {
        cell.id: Verdict(cell_id=cell.id, outcome=Outcome.NOT_RUN, reasons=("no verdict was recorded",))
        for cell in manifest.cells
    }
    verdicts = unjudged | {verdict.cell_id: verdict for verdict in results.verdicts()}
    return FinishedTestRun(
        manifest=manifest, verdicts=tuple(verdicts.values()), measurements=tuple(results.measurements())
    )


def obstacle(verdict: Verdict, measurement: Measurement | None) -> str | None:
    """Why no value of a cell may be shown; None when they may."""
    if verdict.outcome not in WITH_VALUES:
        first = verdict.reasons[0].strip().partition("\n")[0] if verdict.reasons else ""
        return f"{verdict.outcome}: {first}" if first else str(verdict.outcome)
    if measurement is None:
        return "no run was recorded"
    if faults := [run.fault.kind for run in measurement.runs if run.fault is not None]:
        return f"planted fault {faults[0]}"
    if not shown_values(measurement, STEP_TIME) or not all(map(_is_measured, _step_times_s(measurement))):
        return "a step time is no positive number"
    return None


def shown_values(measurement: Measurement, metric: Metric) -> tuple[float, ...]:
    """One value per run, in base units; empty unless every run has one that is positive and finite."""
    values = measurement.values(metric)
    known = tuple(value for value in values if value is not None and _is_measured(value))
    return known if len(known) == len(values) else ()


def commit_text(environment: Environment) -> str:
    """The measured source tree, marked as `git describe --dirty` does: `c0ffee`, `c0ffee-dirty`, `unknown`."""
    return "unknown" if environment.commit is None else environment.commit + "-dirty" * bool(environment.dirty)


def junit_properties(verdict: Verdict, measurement: Measurement | None) -> list[tuple[str, str]]:
    """What JUnit's XML says of a cell beside its outcome: base units, numbers as Python writes them.

    For `item.user_properties`, from which pytest writes `<property name= value=>` into the test case
    (https://docs.pytest.org/en/stable/how-to/output.html#record-property). Names: the medians over the runs
    `step_time_s`, `tokens_per_s` and `peak_allocated_bytes`; of the step time, `change` and `tolerance` as fractions;
    `machine`, `commit`, `torch`. What is unknown has no property.
    """
    if measurement is None or not measurement.runs:
        return []
    numbers: dict[str, float | None] = {}
    if obstacle(verdict, measurement) is None:
        for metric in EXPORTED:
            values = shown_values(measurement, metric)
            numbers[metric.name] = statistics.median(values) if values else None
        for comparison in verdict.comparisons:
            if comparison.metric == STEP_TIME:
                numbers |= {"change": comparison.change, "tolerance": comparison.tolerance}
    environment = measurement.runs[-1].environment
    return [
        *((name, repr(value)) for name, value in numbers.items() if value is not None and math.isfinite(value)),
        ("machine", environment.machine.key),
        ("commit", commit_text(environment)),
        ("torch", environment.software.torch),
    ]


def benchmark_json(test_run: FinishedTestRun) -> str:
    """What pytest-benchmark writes for --benchmark-json: a benchmark per cell, its rounds all timed steps, in seconds.

    Names are those of the suite's own tests, so that `pytest perf --benchmark-compare=FILE` and `pytest-benchmark
    compare FILE` set it beside live ones (https://pytest-benchmark.readthedocs.io/en/stable/comparing.html). The
    statistics are computed by pytest-benchmark itself. What it would say of the machine and the commit at hand is
    said here of those of the test run, as far as they are recorded. `left_out`, which its readers do not look at, holds
    the cells without values.
    """
    from pytest_benchmark import __version__
    from pytest_benchmark.stats import Stats

    benchmarks: list[dict[str, Any]] = []
    for measurement, verdict in test_run.with_values:
        stats, cell_id = Stats(), measurement.cell.id
        for step_time_s in _step_times_s(measurement):
            stats.update(step_time_s)
        benchmarks.append(
            {
                "group": None,
                "name": f"test_cell[{cell_id}]",
                "fullname": f"perf/test_cells.py::test_cell[{cell_id}]",
                "params": {"cell": cell_id},
                "param": cell_id,
                "extra_info": {
                    "cell": cell_id,
                    "outcome": verdict.outcome.value,
                    "run_step_times_s": shown_values(measurement, STEP_TIME),
                    "machine": measurement.runs[-1].environment.machine.key,
                },
                "options": {},
                "stats": stats.as_dict() | {"data": stats.data, "iterations": 1},
            }
        )
    runs = [run for measurement, _ in test_run.with_values for run in measurement.runs]
    environment = max(runs, key=lambda run: run.started_at).environment if runs else None
    return jsonfile.dumps(
        {
            "machine_info": _machine_info(environment) if environment else {},
            "commit_info": {"id": environment.commit, "dirty": environment.dirty} if environment else {},
            "benchmarks": benchmarks,
            "left_out": test_run.left_out,
            "datetime": test_run.manifest.started_at,
            "version": __version__,
        }
    )


def bencher_json(test_run: FinishedTestRun) -> str:
    """Bencher Metric Format: cell -> measure -> median over the runs, with the smallest and the largest run as bounds.

    Measures: Bencher's own `latency` in ns and `throughput` (tokens/s), and `peak-allocated-bytes`, which Bencher makes
    when it first meets it (https://bencher.dev/docs/reference/bencher-metric-format/). For `bencher run --adapter json`
    and its `--file`.
    """
    found: dict[str, dict[str, dict[str, float]]] = {}
    for measurement, _ in test_run.with_values:
        measures = found.setdefault(measurement.cell.id, {})
        for metric in EXPORTED:
            slug, scale = _BENCHER[metric.name]
            if values := shown_values(measurement, metric):
                measures[slug] = {
                    "value": _scaled(statistics.median(values), scale),
                    "lower_value": _scaled(min(values), scale),
                    "upper_value": _scaled(max(values), scale),
                }
    return jsonfile.dumps(found)


def action_json(test_run: FinishedTestRun, better: Literal["lower", "higher"]) -> str:
    """Entries for github-action-benchmark, of the metrics of which the lower or the higher is the better.

    Its tools `customSmallerIsBetter` (step time in ms, peak allocated in MiB) and `customBiggerIsBetter` (tokens/s)
    read an array of name, unit, value, and of range and extra as text
    (https://github.com/benchmark-action/github-action-benchmark#examples, `BenchmarkResult` in its src/extract.ts).
    The value is the median over the runs, the range the smallest and the largest. The action fails on an empty array.
    """
    entries = []
    for measurement, verdict in test_run.with_values:
        environment = measurement.runs[-1].environment
        for metric in (metric for metric in EXPORTED if metric.better == better):
            unit, scale = _ACTION[metric.name]
            if values := shown_values(measurement, metric):
                what = f"{verdict.outcome}, median of {len(values)} runs"
                where = f"{environment.machine.key}, torch {environment.software.torch}, {commit_text(environment)}"
                entries.append(
                    {
                        "name": f"{measurement.cell.id} {metric.title}",
                        "unit": unit,
                        "value": _scaled(statistics.median(values), scale),
                        "range": f"{min(values) * scale:g} to {max(values) * scale:g}",
                        "extra": f"{what}\n{where}",
                    }
                )
    return jsonfile.dumps(entries)


def _step_times_s(measurement: Measurement) -> list[float]:
    return [step_time_s for run in measurement.runs for step_time_s in run.step_times_s]


def _is_measured(value: float) -> bool:
    return 0 < value < math.inf  # false of NaN too


def _scaled(value: float, scale: float) -> float:
    """In another unit, without the digits that binary fractions leave behind."""
    return round(value * scale, 6)


def _machine_info(environment: Environment) -> dict[str, Any]:
    """The keys of pytest-benchmark's own that a record knows."""
    return {
        "node": environment.host,
        "python_version": environment.software.python,
        "cpu": {"brand_raw": environment.cpu, "count": environment.cpu_cores},
    }
