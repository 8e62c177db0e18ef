"""The charts of a history: one picture for each page, its panels one below the other, drawn over test runs."""

import math
import textwrap
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from perf.facts.cell import Recipe
from perf.judge.band import Band
from perf.tell.bars import axis_unit
from perf.tell.history import Point, Series
from perf.tell.history_pages import Page, Panel
from perf.tell.render import percent

# All lengths are in inches until they reach matplotlib.
_DPI = 120
_LEAST_WIDTH, _MOST_WIDTH = 7.2, 10.5
_SLOT = 0.3
"""Between two test runs, where there is room."""
_LEFT, _RIGHT = 0.85, 0.45
_PLOT_HEIGHT = 1.75
_ABOVE = 0.18
"""Over a panel, and for each row of labels there."""
_BELOW = 0.66
"""Under the last panel: dates."""
_ROW = 0.165
"""Of text."""
_CHARACTER = 0.068
"""Of text; a little more than it takes."""
_DATE_WIDTH = 0.8
_MOST_CHANGES = 12
"""Told under a chart: the newest."""
_LEAST_RANGE = 0.02
"""Of an axis, around its middle: what repeats to the byte must not look as if it wavered."""
_COLORS = ("#0b4f7d", "#c98a1b", "#4b7d5a", "#7a4fa0", "#3f3f3f")
_STEP_COLOR, _BAND_COLOR, _MEDIAN_COLOR, _GREY = "#c2410c", "#dcebf4", "#6c9dbd", "0.35"
_DASHES = (0, (2, 2))
_STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 8.5,
    "axes.unicode_minus": False,
    "figure.facecolor": "white",
    "axes.facecolor": "white",
    "text.color": "black",
}


def draw(page: Page, path: Path) -> Path:
    """Writes a page as PNG; equal pages give equal bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(_STYLE):
        figure = _figure(page)
        FigureCanvasAgg(figure)
        # Without this the file would name the version that drew it, and differ after an upgrade.
        figure.savefig(path, format="png", dpi=_DPI, metadata={"Software": None})
    return path


def _figure(page: Page) -> Figure:
    width = min(max(_LEAST_WIDTH, _LEFT + _RIGHT + _SLOT * len(page.visits)), _MOST_WIDTH)
    plot_width = width - _LEFT - _RIGHT
    head = [row for text in _head(page) for row in textwrap.wrap(text, int(width / _CHARACTER))]
    legend, key = _legend(page), _key(page, width)
    columns = max(1, int((width - 0.3) / (0.6 + _CHARACTER * max(len(str(one.get_label())) for one in legend))))
    header = 0.45 + _ROW * (len(head) + math.ceil(len(legend) / columns))
    above = _ABOVE * (1 + bool(page.changes) + any(panel.steps for panel in page.panels))
    height = header + len(page.panels) * (above + _PLOT_HEIGHT) + _BELOW + _ROW * len(key) + 0.1 * bool(key)
    figure = Figure(figsize=(width, height), dpi=_DPI)
    figure.text(0.12 / width, 1 - 0.12 / height, page.cell_id, fontsize=12, fontweight="bold", va="top")
    for row, text in enumerate(head):
        figure.text(0.12 / width, 1 - (0.37 + _ROW * row) / height, text, color=_GREY, va="top")
    figure.legend(
        handles=legend,
        loc="upper left",
        bbox_to_anchor=(0.12 / width, 1 - (0.42 + _ROW * len(head)) / height),
        ncols=columns,
        frameon=False,
        borderpad=0,
        borderaxespad=0,
        handlelength=1.8,
        columnspacing=1.6,
    )
    bottom = height - header
    for panel in page.panels:
        bottom -= above + _PLOT_HEIGHT
        axes = figure.add_axes((_LEFT / width, bottom / height, plot_width / width, _PLOT_HEIGHT / height))
        _draw(axes, panel, page, plot_width / len(page.visits))
        _set_dates(axes, page.visits, plot_width, shown=panel == page.panels[-1])
    for row, text in enumerate(key):
        figure.text(0.12 / width, (bottom - _BELOW - _ROW * row) / height, text, va="top", fontsize=7.5)
    return figure


def _draw(axes: Axes, panel: Panel, page: Page, slot: float) -> None:
    """One metric: band, vertical lines, lines."""
    places = {point.run_id: place for place, point in enumerate(page.visits)}
    points = [point for line in panel.lines for point in line.points]
    factor, unit = axis_unit(max(point.median for point in points), panel.metric)
    low, high = _range(points, panel.band)
    axes.set_xlim(-0.5, len(places) - 0.5)
    axes.set_ylim(low / factor, high / factor)
    if band := panel.band:
        reach = (max(low, band.low or low) / factor, min(high, band.high) / factor)
        axes.axhspan(*reach, color=_BAND_COLOR, zorder=0, linewidth=0)
        axes.axhline(band.middle / factor, color=_MEDIAN_COLOR, linewidth=1, linestyle="--", zorder=1)
    steps = [(places[step.run_id], percent(step.change)) for step in panel.steps]
    marks = [(places[one.run_id], _letters(number)) for number, one in enumerate(page.changes) if one.run_id in places]
    for place, _ in steps:
        axes.axvline(place - 0.5, color=_STEP_COLOR, linewidth=1.4, zorder=1)
    for place, _ in marks:
        axes.axvline(place - 0.5, color="0.45", linewidth=0.9, linestyle=_DASHES, zorder=1)
    _label(axes, marks, slot, row=0, color=_GREY)
    _label(axes, steps, slot, row=int(bool(page.changes)), color=_STEP_COLOR)
    for line in panel.lines:
        _draw_line(axes, line, places, _color(page, line.recipe), factor, page.usual_runs)
    axes.set_ylabel(f"{panel.metric.title} ({unit})")
    axes.yaxis.grid(visible=True, color="0.9", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_line(axes: Axes, line: Series, places: dict[str, int], color: str, factor: float, usual_runs: int) -> None:
    """The medians of one recipe, with their smallest and largest runs."""
    xs = [places[point.run_id] for point in line.points]
    middles = [point.median / factor for point in line.points]
    below = [(point.median - point.low) / factor for point in line.points]
    above = [(point.high - point.median) / factor for point in line.points]
    axes.errorbar(xs, middles, yerr=[below, above], fmt="none", ecolor=color, elinewidth=0.9, capsize=2, zorder=2)
    axes.plot(xs, middles, color=color, linewidth=1.2, marker="o", markersize=3.2, zorder=3)
    for x, point in zip(xs, line.points, strict=True):
        if point.num_runs != usual_runs:
            at = (x, point.high / factor)
            axes.annotate(
                f"n={point.num_runs}",
                at,
                (0, 4),
                textcoords="offset points",
                ha="center",
                fontsize=6.5,
                color=_GREY,
                bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.4},
            )


def _range(points: Sequence[Point], band: Band | None) -> tuple[float, float]:
    """Of the axis, in the metric's base unit: all runs, the baseline's median, its band where that is not far off."""
    low, high = min(point.low for point in points), max(point.high for point in points)
    if band is not None:
        low, high = min(low, band.middle), max(high, band.middle)
        spread = max(high - low, _LEAST_RANGE * high)
        low, high = min(low, max(band.low or low, low - spread)), max(high, min(band.high, high + spread))
    room = max(0.1 * (high - low), (_LEAST_RANGE * high - (high - low)) / 2)
    return max(0.0, low - room), high + room


def _label(axes: Axes, labels: Sequence[tuple[int, str]], slot: float, *, row: int, color: str) -> None:
    """Texts over their vertical lines, in one of two rows; one that would run into its neighbour is not written."""
    end = -math.inf
    for place, text in sorted(labels):
        half = (0.03 + _CHARACTER * len(text)) / 2
        if place * slot - half < end:
            continue
        end = place * slot + half
        axes.annotate(
            text,
            (place - 0.5, 1),
            (0, 2 + 11 * row),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            ha="center",
            va="bottom",
            fontsize=7.5,
            color=color,
        )


def _set_dates(axes: Axes, visits: Sequence[Point], width: float, *, shown: bool) -> None:
    """One place for each test run: they come in bursts, and on a scale of time would lie over each other."""
    every = max(1, math.ceil(len(visits) * _DATE_WIDTH / width))
    times = [_utc(point.started_at) for point in visits]
    chosen = list(range((len(visits) - 1) % every, len(visits), every))
    one_a_day = len({time.date() for time in times}) == len(times)
    texts = [times[place].strftime("%Y-%m-%d" if one_a_day else "%Y-%m-%d\n%H:%M") for place in chosen]
    axes.set_xticks(chosen, texts if shown else [""] * len(chosen))
    axes.tick_params(axis="x", labelsize=7.5)
    if shown:
        axes.set_xlabel("start of the test run, UTC; evenly spaced, not to scale", fontsize=7.5, color=_GREY)


def _utc(text: str) -> datetime:
    time = datetime.fromisoformat(text)
    return time.astimezone(UTC) if time.tzinfo else time


def _color(page: Page, recipe: Recipe) -> str:
    return _COLORS[page.recipes.index(recipe) % len(_COLORS)]


def _head(page: Page) -> list[str]:
    """The machine, how to read the chart, and what it lacks."""
    reading = "point: median of a test run's runs; bar: smallest to largest run; "
    found = [f"on {page.machine_key}", f"{reading}n = {page.usual_runs} runs unless written"]
    found += [f"left out: {', '.join(page.left_out)}"] * bool(page.left_out)
    found += ["change points were not looked for: apache-otava is not installed"] * (not page.searched)
    return found


def _legend(page: Page) -> list[Artist]:
    newest, *others = page.recipes
    handles: list[Artist] = []
    for recipe in (newest, *others):
        differences = [text.partition(": ") for text in newest.differences(recipe)]
        told = ", ".join(f"{name} {values.rpartition(' -> ')[2]}" for name, _, values in differences)
        label = f"another recipe: {told}" if told else "median"
        color = _color(page, recipe)
        handles.append(Line2D([], [], color=color, marker="o", markersize=3.2, linewidth=1.2, label=label))
    if bands := [panel.band for panel in page.panels if panel.band is not None]:
        noisy = ", too noisy to be gated" * any(band.noisy for band in bands)
        handles.append(Line2D([], [], color=_MEDIAN_COLOR, linestyle="--", linewidth=1, label="baseline's median"))
        handles.append(Patch(facecolor=_BAND_COLOR, label=f"its tolerance{noisy}"))
    if any(panel.steps for panel in page.panels):
        handles.append(Line2D([], [], color=_STEP_COLOR, linewidth=1.4, label="change point, p < .001"))
    if page.changes:
        handles.append(Line2D([], [], color="0.45", linestyle=_DASHES, linewidth=0.9, label="A, B: changes, see below"))
    return handles


def _key(page: Page, width: float) -> list[str]:
    """What the letters stand for; of the newest ones where there are many."""
    told = list(enumerate(page.changes))[-_MOST_CHANGES:]
    hidden = len(page.changes) - len(told)
    rows = [f"{hidden} earlier changes are not told here"] * bool(hidden)
    for number, change in told:
        text = f"{_letters(number)}  from {change.run_id} on: {'; '.join(change.texts)}"
        rows += textwrap.wrap(text, int(width / 0.06), subsequent_indent="      ")
    return rows


def _letters(number: int) -> str:
    """A, B, ... Z, AA, AB, ..."""
    text = ""
    while number >= 0:
        text = chr(ord("A") + number % 26) + text
        number = number // 26 - 1
    return text
