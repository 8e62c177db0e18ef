"""What the charts show: the bars of each cell, as values. Nothing is drawn here, so a test can read the numbers."""

import math
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from perf.facts.cell import Cell
from perf.facts.measurement import METRICS, PEAK_ALLOCATED, PEAK_RESIDENT, STEP_TIME, THROUGHPUT, Measurement, Metric
from perf.facts.record import RunRecord
from perf.tell.results import REFERENCE
from perf.tell.screen import AXIS_NAMES, axis_of, group_of
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
    """The bars of one model size and workload on one kind of device, in the order in which they stand."""

    size: str
    device_kind: str
    workload: str
    metric: Metric
    bars: tuple[Bar, ...]
    top: float
    """The largest run of all; also where this is a part of a panel that is too wide for a row."""
    part: str = ""
    """`1 of 2`."""

    @property
    def groups(self) -> tuple[tuple[Bar, ...], ...]:
        """The bars of each strategy."""
        names = dict.fromkeys(bar.cell.variant for bar in self.bars)
        return tuple(tuple(bar for bar in self.bars if bar.cell.variant == name) for name in names)

    @property
    def axes(self) -> tuple[tuple[str, int], ...]:
        """Each axis by the name that readers use, with its number of groups."""
        found = Counter(axis_of(group[0].cell) for group in self.groups)
        return tuple((AXIS_NAMES[axis], found[axis]) for axis in AXIS_NAMES if axis in found)

    @property
    def facts(self) -> tuple[str, str, str]:
        """What all its cells share, as far as they do: ranks, device and links, workload."""
        ranks = {ranks_text(bar.cell.world_size) for bar in self.bars}
        links = " and ".join(dict.fromkeys(bar.cell.link.value for bar in self.bars))
        device = "CPU" if self.device_kind == "cpu" else "GPU"
        return ranks.pop() if len(ranks) == 1 else "", f"{device}, {links}", self.workload


def common(shown: Sequence[Panel]) -> str:
    """What holds for every bar of a chart, so that it is said once: `4 ranks, GPU, native and no_p2p`."""
    return ", ".join(facts[0] for facts in _facts(shown) if len(set(facts)) == 1 and facts[0])


def titles(shown: Sequence[Panel]) -> list[str]:
    """The size of each panel, with what other panels of the chart do not share."""
    told = [facts for facts in _facts(shown) if len(set(facts)) > 1]
    found = []
    for index, panel in enumerate(shown):
        parts = [panel.size, *(facts[index] for facts in told), panel.part]
        found.append(", ".join(part for part in parts if part))
    return found


def _facts(shown: Sequence[Panel]) -> list[tuple[str, ...]]:
    """Of each kind of fact, that of every panel. Sizes may well have workloads of their own, as the settings tell."""
    *others, workloads = zip(*(panel.facts for panel in shown), strict=True)
    work_of: dict[str, set[str]] = {}
    for panel in shown:
        work_of.setdefault(panel.size, set()).add(panel.workload)
    told = len(set(workloads)) == 1 or any(len(work) > 1 for work in work_of.values())
    return [*others, workloads] if told else others


def labels(panel: Panel, names: Mapping[tuple[str, bool], str]) -> list[tuple[str, ...]]:
    """The lines under each group: strategy, options, and ranks unless the legend or the title tells them."""
    ranks_differ = len({bar.cell.world_size for bar in panel.bars}) > 1
    found = []
    for group in panel.groups:
        strategy, options = _strategy_and_options(group[0].cell)
        ranks = ranks_text(group[0].cell.world_size)
        own = ranks if ranks_differ and ranks not in names[group[0].key] else ""
        found.append(tuple(line for line in (strategy, options, own) if line))
    return found


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
    """One panel per size, workload and kind of device: small sizes first, strategies by axis, then as declared."""
    by_panel: dict[tuple[int, str, str, str], list[Bar]] = {}
    for bar in drawn:
        cell = bar.cell
        key = (SIZES[cell.size].num_parameters, cell.size, cell.device_kind, group_of(cell).workload)
        by_panel.setdefault(key, []).append(bar)
    return tuple(
        Panel(
            size=size,
            device_kind=device_kind,
            workload=workload,
            metric=found[0].metric,
            bars=tuple(sorted(found, key=lambda bar: (*_group(bar.cell), _rank(bar)))),
            top=max(bar.high for bar in found),
        )
        for (_, size, device_kind, workload), found in sorted(by_panel.items())
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


def _strategy_and_options(cell: Cell) -> tuple[str, str]:
    """`hsdp 2x2`, `ac+bf16state`."""
    strategy, *others = cell.variant.split(" ")
    if others and re.fullmatch(r"\d+(x\d+)+", others[0]):
        strategy += f" {others.pop(0)}"
    return strategy, " ".join(others)


def _group(cell: Cell) -> tuple[int, int, str]:
    """Order of the groups of a panel: by axis, strategies as they are declared, then products; each by its variants."""
    known = list(map(str, StrategyName))
    place = known.index(cell.strategy) if cell.strategy in known else len(known)
    return list(AXIS_NAMES).index(axis_of(cell)), place, cell.variant


def _rank(bar: Bar) -> tuple[int, int, int, bool]:
    """Where a bar stands in its group: the reference before what is compared with it."""
    cell = bar.cell
    return list(LinkProfile).index(cell.link), cell.world_size, list(Mode).index(cell.mode), not bar.is_reference
