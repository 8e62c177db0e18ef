"""One panel of a chart on its axes: bars in groups, their numbers, the labels under them."""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes

from perf.tell import lettering
from perf.tell.bars import Panel, axis_unit, labels, number

# All lengths are in inches until they reach matplotlib.
HEIGHT = 2.5
GROUP_GAP = 0.7
"""Between groups, in bars."""
LEAST_UPRIGHT = 0.46
"""Where a bar with its gap is narrower, the number over it is turned."""
ANGLE = 50
"""Of turned labels, in degrees."""
TEXT, TITLE, _HEADING = 8.5, 9.5, 7.5
"""Sizes of letters, in points."""
GREY = "0.35"
ONE_RUN: Any = (0, (2.5, 1.5))
"""Outline of a bar that stands for one run."""
Names = Mapping[tuple[str, bool], str]
"""Key of a bar -> its name in the legend."""
Looks = Mapping[str, tuple[str, str]]
"""That name -> colour and hatch."""


def slots(panel: Panel) -> float:
    """Width of a panel, in bars."""
    return len(panel.bars) + GROUP_GAP * len(panel.groups)


def plot_width(panel: Panel, title: str, slot: float) -> float:
    """At least what its title takes."""
    return max(slots(panel) * slot, lettering.width(title, TITLE, bold=True))


def _positions(panel: Panel) -> list[float]:
    """Where the bars stand, in bars."""
    found, at = [], 0.0
    for group in panel.groups:
        found += [at + index for index in range(len(group))]
        at += len(group) + GROUP_GAP
    return found


def middles(panel: Panel) -> list[float]:
    """Where the groups stand, in bars."""
    positions, found, done = _positions(panel), [], 0
    for group in panel.groups:
        found.append((positions[done] + positions[done + len(group) - 1]) / 2)
        done += len(group)
    return found


def too_wide(panel: Panel, names: Names, slot: float) -> bool:
    """Whether a label would run into its neighbour's."""
    rooms = ((len(group) + GROUP_GAP) * slot for group in panel.groups)
    widths = (lettering.width("\n".join(lines), TEXT) for lines in labels(panel, names))
    return any(wide > room for wide, room in zip(widths, rooms, strict=True))


def fitting(panel: Panel, names: Names, slot: float, *, turned: bool) -> list[str]:
    """The label of each group; turned ones have as many lines as there is room for between them."""
    places = middles(panel)
    pitch = min((after - before for before, after in itertools.pairwise(places)), default=math.inf) * slot
    room = pitch * math.sin(math.radians(ANGLE)) / (TEXT * lettering.LINE)
    found = []
    for first, *others in labels(panel, names):
        if not turned or room >= 1 + len(others):
            found.append("\n".join([first, *others]))
        else:
            found.append(("\n" if room >= 2 else " ").join([first, *[" ".join(others)] * bool(others)]))
    return found


def draw(axes: Axes, panel: Panel, names: Names, looks: Looks, *, upright: bool, counted: bool) -> None:
    """The bars with their numbers; `counted`: with the number of runs, because it is not the same for all."""
    factor, unit = axis_unit(panel.top, panel.metric)
    separator = "\n" if upright else "  "
    text_height = 0.2 + (0.22 if upright else 0.45) * counted + 0.3 * (not upright)
    axes.set_ylim(0, (panel.top / factor or 1.0) * HEIGHT / (HEIGHT - text_height))
    for bar, x in zip(panel.bars, _positions(panel), strict=True):
        color, hatch = looks[names[bar.key]]
        middle, low, high = bar.median / factor, bar.low / factor, bar.high / factor
        outline = ONE_RUN if bar.num_runs == 1 and counted else "-"
        axes.bar(x, middle, width=0.84, color=color, hatch=hatch, edgecolor="black", linewidth=0.6, linestyle=outline)
        if bar.num_runs > 1:
            reach = [[middle - low], [high - middle]]
            axes.errorbar(x, middle, yerr=reach, fmt="none", ecolor="black", elinewidth=1.1, capsize=3.5)
        text = number(middle) + "*" * bar.planted
        text += f"{separator}n={bar.num_runs}" * counted
        axes.annotate(
            text,
            (x, high),
            xytext=(0, 4),
            textcoords="offset points",
            ha="center",
            va="bottom",
            rotation=0 if upright else 90,
            fontsize=8 if upright else 7.5,
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.6},
        )
    axes.set_ylabel(f"{panel.metric.title} ({unit})")
    axes.yaxis.grid(visible=True, color="0.88", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def set_width(axes: Axes, panel: Panel, width: float) -> None:
    """`width`: of the plot, in bars; they stand in its middle."""
    middle = (slots(panel) - 1 - GROUP_GAP) / 2
    axes.set_xlim(middle - width / 2, middle + width / 2)


def set_ticks(axes: Axes, panel: Panel, texts: Sequence[str], *, turned: bool) -> None:
    axes.set_xticks(
        middles(panel), texts, rotation=ANGLE if turned else 0, ha="right" if turned else "center", fontsize=TEXT
    )
    axes.tick_params(axis="x", length=0)


def has_headings(panel: Panel) -> bool:
    """Where many strategies stand side by side, a reader looks for the axis first."""
    return len(panel.axes) > 1 and len(panel.groups) > 8


def set_title(axes: Axes, panel: Panel, title: str) -> None:
    headed = has_headings(panel)
    axes.set_title(title, loc="left", fontsize=TITLE, fontweight="bold", pad=16 if headed else 6)
    if not headed:
        return
    at, done = -0.5 - GROUP_GAP / 2, 0
    for name, num_groups in panel.axes:
        axes.axvline(at, color="0.6", linewidth=0.7, linestyle=":")
        axes.annotate(
            name,
            (at, 1),
            xycoords=("data", "axes fraction"),
            xytext=(2, 2),
            textcoords="offset points",
            fontsize=_HEADING,
            color=GREY,
            fontweight="bold",
        )
        own = panel.groups[done : done + num_groups]
        at += sum(map(len, own)) + GROUP_GAP * num_groups
        done += num_groups
