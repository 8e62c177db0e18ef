"""What the charts show: the bars of each cell, as values. Nothing is drawn here, so a test can read the numbers."""

import math
import statistics
from collections.abc import Iterable, Sequence

from perf.facts.cell import Cell
from perf.facts.measurement import METRICS, PEAK_ALLOCATED, PEAK_RESIDENT, STEP_TIME, THROUGHPUT, Measurement, Metric
from perf.facts.record import RunRecord
from perf.tell.results import REFERENCE
from strategies.shapes import SIZES
from strategies.spec import LinkProfile, Mode, StrategyName
from strategies.value import Value


class Chart(Value, frozen=True, kw_only=True):
    """One picture; a panel of GPU cells and a panel of CPU cells may show different metrics."""

    file_name: str
    title: str
    note: str
    gpu_metric: Metric
    cpu_metric: Metric

    def metric(self, cell: Cell) -> Metric:
        return self.cpu_metric if cell.device_kind == "cpu" else self.gpu_metric


CHARTS = (
    Chart(
        file_name="throughput.png",
        title="Cluster throughput",
        note="tokens per step / step time, all ranks together; higher is better",
        gpu_metric=THROUGHPUT,
        cpu_metric=THROUGHPUT,
    ),
    Chart(
        file_name="step_time.png",
        title="Step time",
        note="one optimizer update, the slowest rank's time; lower is better",
        gpu_metric=STEP_TIME,
        cpu_metric=STEP_TIME,
    ),
    Chart(
        file_name="peak_memory.png",
        title="Peak memory of the fullest rank",
        note="GPU: the allocator's peak; CPU: resident size of the process; lower is better",
        gpu_metric=PEAK_ALLOCATED,
        cpu_metric=PEAK_RESIDENT,
    ),
)


class Bar(Value, frozen=True, kw_only=True):
    """One cell in one chart, in the metric's base unit."""

    cell: Cell
    is_reference: bool = False
    """Of the build beside which the cell was measured."""
    metric: Metric
    median: float
    low: float
    """Smallest run."""
    high: float
    """Largest run."""
    num_runs: int
    """Runs that have the metric."""
    planted: bool = False
    """A run had a planted fault."""

    @property
    def key(self) -> tuple[str, bool]:
        """What no other bar of a chart has."""
        return self.cell.id, self.is_reference


class Panel(Value, frozen=True, kw_only=True):
    """The bars of one model size on one kind of device, in the order in which they stand."""

    size: str
    device_kind: str
    metric: Metric
    bars: tuple[Bar, ...]

    @property
    def groups(self) -> tuple[tuple[Bar, ...], ...]:
        """The bars of each strategy."""
        names = dict.fromkeys(bar.cell.variant for bar in self.bars)
        return tuple(tuple(bar for bar in self.bars if bar.cell.variant == name) for name in names)

    @property
    def title(self) -> str:
        links = "/".join(dict.fromkeys(bar.cell.link.value for bar in self.bars))
        return f"{self.size} on {'CPU' if self.device_kind == 'cpu' else 'GPU'}, {links}"


def run_value(run: RunRecord, metric: Metric) -> float | None:
    """The run's value, or None where it has no finite one: a report must also be able to tell of damaged runs."""
    value = METRICS[metric.name][1](run)
    return value if value is not None and math.isfinite(value) else None


def bars(measurements: Iterable[Measurement], chart: Chart) -> tuple[Bar, ...]:
    """Median, smallest and largest run of each cell; a cell of which no run has the metric gets no bar.

    A cell may come twice, once of the reference build.
    """
    found = []
    for measurement in measurements:
        metric = chart.metric(measurement.cell)
        values = [value for run in measurement.runs if (value := run_value(run, metric)) is not None]
        if values:
            found.append(
                Bar(
                    cell=measurement.cell,
                    is_reference=measurement.runs[0].arm == REFERENCE,
                    metric=metric,
                    median=statistics.median(values),
                    low=min(values),
                    high=max(values),
                    num_runs=len(values),
                    planted=any(run.fault is not None for run in measurement.runs),
                )
            )
    return tuple(found)


def panels(drawn: Iterable[Bar]) -> tuple[Panel, ...]:
    """One panel per model size and kind of device: small sizes first, strategies in the order of their declaration."""
    by_panel: dict[tuple[int, str, str], list[Bar]] = {}
    for bar in drawn:
        key = (SIZES[bar.cell.size].num_parameters, bar.cell.size, bar.cell.device_kind)
        by_panel.setdefault(key, []).append(bar)
    return tuple(
        Panel(
            size=size,
            device_kind=device_kind,
            metric=found[0].metric,
            bars=tuple(sorted(found, key=lambda bar: (*_group(bar.cell), _rank(bar)))),
        )
        for (_, size, device_kind), found in sorted(by_panel.items())
    )


def variant_names(shown: Sequence[Panel]) -> dict[tuple[str, bool], str]:
    """Key of a bar -> what tells it from its group's others: the mode; ranks and link where a group has several."""
    groups = [group for panel in shown for group in panel.groups]
    several_ranks = any(len({bar.cell.world_size for bar in group}) > 1 for group in groups)
    several_links = any(len({bar.cell.link for bar in group}) > 1 for group in groups)
    names = {}
    for bar in sorted((bar for group in groups for bar in group), key=_rank):
        parts = [bar.cell.mode.value]
        parts += [ranks_text(bar.cell.world_size)] * several_ranks
        parts += [bar.cell.link.value] * several_links
        parts += [REFERENCE] * bar.is_reference
        names[bar.key] = ", ".join(parts)
    return names


def ranks_text(world_size: int) -> str:
    return f"{world_size} rank{'s' * (world_size > 1)}"


def axis_unit(largest: float, metric: Metric) -> tuple[float, str]:
    """What to divide values by, and the unit that this gives: one for a whole axis, so that its labels compare."""
    steps: dict[str, tuple[tuple[float, str], ...]] = {
        "s": ((1.0, "s"), (1e-3, "ms")),
        "bytes": ((2.0**30, "GiB"), (2.0**20, "MiB")),
        "tok/s": ((1e6, "M tok/s"), (1e3, "k tok/s"), (1.0, "tok/s")),
    }
    choices = steps.get(metric.unit, ((1.0, metric.unit),))
    return next(((factor, unit) for factor, unit in choices if largest >= factor), choices[-1])


def number(value: float) -> str:
    """Three significant digits, never an exponent: 1,234 or 69.9 or 0.031."""
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    exponent = int(f"{value:.2e}".partition("e")[2])  # of the rounded value: 99.96 is 100, not 100.0
    return f"{value:.{max(0, 2 - exponent)}f}"


def _group(cell: Cell) -> tuple[int, str]:
    """Order of the groups of a panel: that of the strategies, then products; each by its variants."""
    known = list(map(str, StrategyName))
    return known.index(cell.strategy) if cell.strategy in known else len(known), cell.variant


def _rank(bar: Bar) -> tuple[int, int, int, bool]:
    """Where a bar stands in its group: the reference before what is compared with it."""
    cell = bar.cell
    return list(LinkProfile).index(cell.link), cell.world_size, list(Mode).index(cell.mode), not bar.is_reference
