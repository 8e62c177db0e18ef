"""The fastest candidate of each axis in one picture: a row of panels for each size, a column for each metric."""

from collections.abc import Sequence, Set
from pathlib import Path

import matplotlib
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from perf.facts.measurement import PEAK_ALLOCATED, STEP_TIME, THROUGHPUT, Metric
from perf.tell import lettering, plot
from perf.tell.axes import Standing, name, title
from perf.tell.bars import axis_unit, number
from perf.tell.charts import DPI, LOOKS, STYLE, reading_of, save
from perf.tell.screen import Group

FILE_NAME = "axes.png"
TITLE = "The fastest candidate of each axis"
_METRICS = (THROUGHPUT, STEP_TIME, PEAK_ALLOCATED)
# All lengths are in inches until they reach matplotlib.
_BAR = 0.19
_GAP = 0.1
"""Between axes."""
_PLOT_WIDTH, _BETWEEN, _MARGIN = 2.55, 0.3, 0.12
_ABOVE, _BELOW = 0.35, 0.5
_VALUE = 0.95
"""Beside a bar, for its number."""
_LETTERS = 7.5
Rows = dict[Group, list[list[Standing]]]
"""Size with ranks and work -> its axes, each with its standing over each link."""


def write_axes_chart(frame: pd.DataFrame, found: Sequence[Standing], folder: Path) -> list[Path]:
    """Writes the picture, if there is anything to compare; equal records give equal bytes."""
    if not found:
        return []
    with matplotlib.rc_context(STYLE):
        return [save(figure_of(frame, found), folder / FILE_NAME)]


def rows_of(found: Sequence[Standing]) -> Rows:
    """Axes in the order that they have over the first link, so that another order over the next is seen."""
    rows: Rows = {}
    for one in found:
        axes = rows.setdefault(one.place._replace(link=""), [])
        same = next((axis for axis in axes if axis[0].axis == one.axis), None)
        if same is None:
            axes.append([one])
        else:
            same.append(one)
    return rows


def figure_of(frame: pd.DataFrame, found: Sequence[Standing]) -> Figure:
    rows = rows_of(found)
    counts = {len(values) for one in found if len(values := _values(frame, one, THROUGHPUT))}
    links = list(dict.fromkeys(one.group.link for one in found))
    labels = {_label(one) for one in found}
    left = _MARGIN + max(lettering.width(label, _LETTERS) for label in labels) + 0.12
    heights = [sum(_BAR * len(axis) + _GAP for axis in axes) for axes in rows.values()]
    lines = _head_lines(found, counts)
    head = 0.55 + sum(points * lettering.LINE for _, points in lines)
    width = max(
        left + len(_METRICS) * _PLOT_WIDTH + (len(_METRICS) - 1) * _BETWEEN + _MARGIN,
        *(lettering.width(text, points, bold=index == 0) + 2 * _MARGIN for index, (text, points) in enumerate(lines)),
    )
    height = head + sum(heights) + (_ABOVE + _BELOW) * len(rows)
    figure = Figure(figsize=(width, height), dpi=DPI)
    _head(figure, lines, links)
    bottom = height - head
    for (place, axes), plot_height in zip(rows.items(), heights, strict=True):
        bottom -= _ABOVE + plot_height
        for column, metric in enumerate(_METRICS):
            at = left + column * (_PLOT_WIDTH + _BETWEEN)
            panel = figure.add_axes((at / width, bottom / height, _PLOT_WIDTH / width, plot_height / height))
            _draw(panel, frame, axes, metric, links, counted=len(counts) > 1)
            panel.set_ylim(plot_height, 0)
            if column == 0:
                size = title(place, rows)
                panel.set_title(size, loc="left", fontsize=plot.TITLE, fontweight="bold")
                panel.set_yticks([y for y, _ in _places(axes)], [_label(one) for _, one in _places(axes)])
                panel.tick_params(axis="y", labelsize=_LETTERS)
            else:
                panel.set_yticks([])
        bottom -= _BELOW
    return figure


def _label(one: Standing) -> str:
    return f"{one.axis}  {name(one.candidates[0])}" if one.candidates else f"{one.axis}  (no value)"


def _failed(one: Standing) -> str:
    """`7 tried: OOM, HANG`: short, as the table has them one by one."""
    kinds = dict.fromkeys(failure.rpartition(" ")[2] for failure in one.failures)
    return f"{len(one.failures)} tried: {', '.join(kinds)}"


def _places(axes: Sequence[Sequence[Standing]]) -> list[tuple[float, Standing]]:
    """The middle of each bar, in inches from the top."""
    found, at = [], 0.0
    for axis in axes:
        at += _GAP / 2
        for one in axis:
            found.append((at + _BAR / 2, one))
            at += _BAR
        at += _GAP / 2
    return found


def _draw(
    panel: Axes,
    frame: pd.DataFrame,
    axes: Sequence[Sequence[Standing]],
    metric: Metric,
    links: Sequence[str],
    *,
    counted: bool,
) -> None:
    shown = [(y, one, _values(frame, one, metric)) for y, one in _places(axes)]
    top = max((float(values.max()) for _, _, values in shown if len(values)), default=0.0)
    factor, unit = axis_unit(top, metric)
    for y, one, found in shown:
        if not len(found):
            told = _failed(one) if metric is THROUGHPUT else ""
            panel.annotate(told, (0, y), xytext=(3, 0), textcoords="offset points", va="center", fontsize=_LETTERS)
            continue
        values = found / factor
        color, hatch = LOOKS[links.index(one.group.link) % len(LOOKS)]
        outline = plot.ONE_RUN if counted and len(values) == 1 else "-"
        middle = float(values.median())
        panel.barh(
            y,
            middle,
            height=_BAR * 0.86,
            color=color,
            hatch=hatch,
            edgecolor="black",
            linewidth=0.6,
            linestyle=outline,
        )
        if len(values) > 1:
            reach = [[middle - float(values.min())], [float(values.max()) - middle]]
            panel.errorbar(middle, y, xerr=reach, fmt="none", ecolor="black", elinewidth=1.0, capsize=2.5)
        panel.annotate(
            number(middle) + f"  n={len(values)}" * counted,
            (float(values.max()), y),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            fontsize=_LETTERS,
        )
    panel.set_xlim(0, (top / factor or 1.0) * _PLOT_WIDTH / (_PLOT_WIDTH - _VALUE))
    panel.set_xlabel(f"{metric.title} ({unit}), {metric.better} is better")
    panel.tick_params(axis="y", length=0)
    panel.xaxis.grid(visible=True, color="0.88", linewidth=0.7)
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)


def _values(frame: pd.DataFrame, one: Standing, metric: Metric) -> "pd.Series[float]":
    cell_id = one.candidates[0].id if one.candidates else None
    return frame[frame["cell"] == cell_id][metric.name].dropna()


def _head_lines(found: Sequence[Standing], counts: Set[int]) -> list[tuple[str, float]]:
    """Each text with the size of its letters; the first is the title."""
    groups = [one.place for one in found]
    shared = [f"{groups[0].world_size} ranks"] * (len({one.world_size for one in groups}) == 1)
    shared += [groups[0].workload] * (len({one.workload for one in groups}) == 1)
    picked = "by cluster throughput, size by size; all three metrics are of the same cell; peak: the fullest rank"
    texts = [text for text in (", ".join(shared), picked, reading_of(counts)) if text]
    return [(TITLE, 12.5), *((text, plot.TEXT) for text in texts)]


def _head(figure: Figure, lines: Sequence[tuple[str, float]], links: Sequence[str]) -> None:
    width, height = figure.get_size_inches()
    at = _MARGIN
    for index, (text, points) in enumerate(lines):
        weight, color = ("normal", plot.GREY) if index else ("bold", "black")
        figure.text(_MARGIN / width, 1 - at / height, text, fontsize=points, fontweight=weight, color=color, va="top")
        at += points * lettering.LINE
    looks = [LOOKS[index % len(LOOKS)] for index in range(len(links))]
    figure.legend(
        handles=[
            Patch(facecolor=color, hatch=hatch, edgecolor="black", linewidth=0.6, label=link)
            for link, (color, hatch) in zip(links, looks, strict=True)
        ],
        loc="upper left",
        bbox_to_anchor=(_MARGIN / width, 1 - (at + 0.05) / height),
        ncols=len(links),
        frameon=False,
        borderpad=0,
        borderaxespad=0,
        handlelength=1.4,
    )
