"""What the charts of a history show, as data: a page for each cell and machine, a panel for each metric."""

from collections import Counter
from collections.abc import Callable, Sequence

from perf.facts.cell import Recipe
from perf.facts.measurement import PEAK_ALLOCATED, PEAK_RESERVED, PEAK_RESIDENT, STEP_TIME, THROUGHPUT, Metric
from perf.judge.band import Band
from perf.tell.change_points import Change, ChangePoint, change_points, changes
from perf.tell.history import History, Point, Series, in_time
from perf.tell.render import percent, quantity
from strategies.value import Value

BandOf = Callable[[Series], Band | None]
"""The baseline's band for the newest test run of a line; None where there is none of its recipe."""


class Panel(Value, frozen=True, kw_only=True):
    """One metric of a cell on a machine."""

    metric: Metric
    lines: tuple[Series, ...]
    """One for each recipe."""
    steps: tuple[ChangePoint, ...]
    """Of all lines."""
    band: Band | None
    """Of the line that was measured last."""


class Page(Value, frozen=True, kw_only=True):
    """What one file shows."""

    cell_id: str
    machine_key: str
    panels: tuple[Panel, ...]
    changes: tuple[Change, ...]
    left_out: tuple[str, ...]
    """Test runs that stand in no line, counted: `2 x planted fault slow_step`."""
    searched: bool
    """Whether change points were looked for: not without apache-otava."""

    @property
    def visits(self) -> tuple[Point, ...]:
        """A point of each test run, oldest first: the places along x."""
        found = in_time(line for panel in self.panels for line in panel.lines)
        return tuple({point.run_id: point for point, _ in found}.values())

    @property
    def recipes(self) -> tuple[Recipe, ...]:
        """The one that was measured last comes first."""
        found = in_time(line for panel in self.panels for line in panel.lines)
        return tuple(dict.fromkeys(recipe for _, recipe in reversed(found)))

    @property
    def usual_runs(self) -> int:
        """How many runs most points rest on."""
        counted = Counter(point.num_runs for panel in self.panels for line in panel.lines for point in line.points)
        return counted.most_common(1)[0][0]


def pages(
    history: History, metrics: Sequence[Metric] | None, band_of: BandOf, *, commits: bool = False
) -> tuple[Page, ...]:
    """What there is to draw: each cell and machine that has one of the metrics.

    Args:
        history: as gathered.
        metrics: panels from top to bottom; one that no run has is left out. None: step time, throughput and the
            allocator's peaks, or the resident size of a CPU cell, which has no allocator statistics.
        band_of: asked for the line that was measured last.
        commits: mark changes of the commit too.
    """
    found = []
    for cell_id, machine_key in history.places:
        shown = metrics if metrics is not None else _usual_metrics(history, cell_id, machine_key)
        every = [lines for metric in shown if (lines := history.lines(cell_id, machine_key, metric))]
        if not every:
            continue
        steps = [[change_points(line) for line in lines] for lines in every]
        left_out = Counter(one.reason for one in history.left_out_of(cell_id, machine_key))
        found.append(
            Page(
                cell_id=cell_id,
                machine_key=machine_key,
                panels=tuple(
                    Panel(
                        metric=lines[0].metric,
                        lines=lines,
                        steps=tuple(step for line in of_lines for step in line or ()),
                        band=band_of(_newest(lines)),
                    )
                    for lines, of_lines in zip(every, steps, strict=True)
                ),
                changes=changes(max(every, key=lambda lines: sum(len(line.points) for line in lines)), commits=commits),
                left_out=tuple(f"{number} x {reason}" for reason, number in left_out.items()),
                searched=all(line is not None for of_lines in steps for line in of_lines),
            )
        )
    return tuple(found)


def told(page: Page) -> list[str]:
    """What changed, in words: change points, then the environment, then what was left out."""
    lines = []
    for panel in page.panels:
        for step in panel.steps:
            old, new = quantity(step.old, panel.metric), quantity(step.new, panel.metric)
            text = f"{panel.metric.title} {old} -> {new}, {percent(step.change)}, p {step.p_value:.1g}"
            lines.append(f"change point at {step.run_id}: {text}")
    lines += [f"from {change.run_id} on: {'; '.join(change.texts)}" for change in page.changes]
    return lines + [f"left out: {text}" for text in page.left_out]


def _usual_metrics(history: History, cell_id: str, machine_key: str) -> tuple[Metric, ...]:
    """A resident size says little of a GPU cell."""
    peaks = (PEAK_ALLOCATED, PEAK_RESERVED)
    found = any(history.lines(cell_id, machine_key, peak) for peak in peaks)
    return (STEP_TIME, THROUGHPUT, *(peaks if found else (PEAK_RESIDENT,)))


def _newest(lines: Sequence[Series]) -> Series:
    """The line that was measured last."""
    recipe = in_time(lines)[-1][1]
    return next(line for line in lines if line.recipe == recipe)
