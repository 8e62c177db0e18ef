"""The three charts of a test run: cluster throughput, step time, peak memory; drawn from measurements, saved as PNG."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from perf.facts.measurement import Measurement
from perf.tell.bars import CHARTS, Chart, Panel, axis_unit, bars, number, panels, ranks_text, variant_names

# All lengths are in inches until they reach matplotlib.
_DPI = 150
_ROW_WIDTH = 10.5
_LEAST_WIDTH = 6.0
_PLOT_HEIGHT = 2.5
_LEFT, _RIGHT = 0.78, 0.17
_GROUP_GAP = 0.7
"""Between groups, in bars."""
_SLOTS = (0.6, 0.53, 0.46)
"""Widths of a bar with its gap: the widest of those that give the fewest rows. Below the last, labels are turned."""
_CHARACTER = 0.075
"""Of a tick label; a little more than it takes."""
_GREY = "0.35"
Names = dict[tuple[str, bool], str]
"""Key of a bar -> its name in the legend."""
_LOOKS = (
    # Safe for colour-blind readers; neighbours differ in lightness, and in hatch where lightness repeats.
    ("#0b4f7d", ""),
    ("#f0a830", ""),
    ("#7fc4ec", "////"),
    ("#a3390f", "...."),
    ("#d9d9d9", ""),
    ("#3f3f3f", "xxxx"),
    ("#bfe3c8", "\\\\\\\\"),
    ("#4b7d5a", "++"),
)
_STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 8.5,
    "hatch.linewidth": 0.7,
    "axes.unicode_minus": False,
    "figure.facecolor": "white",
    "axes.facecolor": "white",
    "text.color": "black",
}


def write_charts(measurements: Sequence[Measurement], folder: Path) -> list[Path]:
    """Writes the charts for which there is at least one value; equal measurements give equal bytes."""
    written = []
    for chart in CHARTS:
        if shown := panels(bars(measurements, chart)):
            with matplotlib.rc_context(_STYLE):
                figure = _figure(chart, shown)
                FigureCanvasAgg(figure)
                # Without this the file would name the version that drew it, and differ after an upgrade.
                figure.savefig(folder / chart.file_name, format="png", dpi=_DPI, metadata={"Software": None})
            written.append(folder / chart.file_name)
    return written


def _look(index: int) -> tuple[str, str]:
    """Colour and hatch of a variant; from the ninth on, the colours return under other hatches."""
    color, hatch = _LOOKS[index % len(_LOOKS)]
    return color, hatch + "O" * (index // len(_LOOKS))


def _slots(panel: Panel) -> float:
    """Width of a panel, in bars."""
    return len(panel.bars) + _GROUP_GAP * len(panel.groups)


def _rows(shown: Sequence[Panel], slot: float) -> list[list[Panel]]:
    """The panels as they fit beside each other."""
    rows: list[list[Panel]] = [[]]
    for panel in shown:
        used = sum(_slots(other) * slot + _LEFT + _RIGHT for other in rows[-1])
        if rows[-1] and used + _slots(panel) * slot + _LEFT + _RIGHT > _ROW_WIDTH:
            rows.append([])
        rows[-1].append(panel)
    return rows


def _figure(chart: Chart, shown: Sequence[Panel]) -> Figure:
    names = variant_names(shown)
    looks = {name: _look(index) for index, name in enumerate(dict.fromkeys(names.values()))}
    widest = min((_ROW_WIDTH - _LEFT - _RIGHT) / _slots(panel) for panel in shown)
    slot = min((min(slot, widest) for slot in _SLOTS), key=lambda slot: len(_rows(shown, slot)))
    rows = _rows(shown, slot)
    width = max(_LEAST_WIDTH, *(sum(_slots(p) * slot + _LEFT + _RIGHT for p in row) for row in rows))
    ticks = {panel: _tick_labels(panel, names) for panel in shown}
    turned = any(_too_wide(labels, panel, slot) for panel, labels in ticks.items())
    below = 1.05 if turned else 0.5
    columns = max(1, int((width - _LEFT) / (0.5 + _CHARACTER * max(map(len, looks)))))
    header = 0.8 + 0.18 * math.ceil(len(looks) / columns)
    row_height = _PLOT_HEIGHT + 0.35 + below
    height = header + row_height * len(rows)
    figure = Figure(figsize=(width, height), dpi=_DPI)
    _head(figure, chart, shown, looks, columns)
    for index, row in enumerate(rows):
        left = _LEFT
        bottom = height - header - row_height * (index + 1) + below
        for panel in row:
            plot_width = _slots(panel) * slot
            axes = figure.add_axes((left / width, bottom / height, plot_width / width, _PLOT_HEIGHT / height))
            _draw(axes, panel, names, looks, slot)
            _set_ticks(axes, panel, ticks[panel], turned)
            left += plot_width + _RIGHT + _LEFT
    return figure


def _head(
    figure: Figure, chart: Chart, shown: Sequence[Panel], looks: dict[str, tuple[str, str]], columns: int
) -> None:
    """Title, how to read the bars, and the legend."""
    width, height = figure.get_size_inches()
    planted = any(bar.planted for panel in shown for bar in panel.bars)
    reading = "bar: median of the runs; error bar: smallest to largest run; n: runs" + "; *: planted fault" * planted
    figure.text(0.12 / width, 1 - 0.12 / height, chart.title, fontsize=12.5, fontweight="bold", va="top")
    figure.text(0.12 / width, 1 - 0.37 / height, chart.note, color=_GREY, va="top")
    figure.text(0.12 / width, 1 - 0.53 / height, reading, color=_GREY, va="top")
    figure.legend(
        handles=[
            Patch(facecolor=color, hatch=hatch, edgecolor="black", linewidth=0.6, label=name)
            for name, (color, hatch) in looks.items()
        ],
        loc="upper left",
        bbox_to_anchor=(0.12 / width, 1 - 0.74 / height),
        ncols=columns,
        frameon=False,
        borderpad=0,
        borderaxespad=0,
        handlelength=1.4,
        columnspacing=1.6,
    )


def _draw(axes: Axes, panel: Panel, names: Names, looks: dict[str, tuple[str, str]], slot: float) -> None:
    factor, unit = axis_unit(max(bar.median for bar in panel.bars), panel.metric)
    turned = slot < _SLOTS[-1]
    top = max(bar.high for bar in panel.bars) / factor or 1.0
    label_height = 0.95 if turned else 0.42
    axes.set_ylim(0, top * _PLOT_HEIGHT / (_PLOT_HEIGHT - label_height))
    axes.set_xlim(-0.5 - _GROUP_GAP / 2, _slots(panel) - 0.5 - _GROUP_GAP / 2)
    for bar, x in zip(panel.bars, _positions(panel), strict=True):
        color, hatch = looks[names[bar.key]]
        middle, low, high = bar.median / factor, bar.low / factor, bar.high / factor
        axes.bar(x, middle, width=0.84, color=color, hatch=hatch, edgecolor="black", linewidth=0.6)
        if bar.num_runs > 1:
            reach = [[middle - low], [high - middle]]
            axes.errorbar(x, middle, yerr=reach, fmt="none", ecolor="black", elinewidth=1.1, capsize=3.5)
        mark = "*" * bar.planted
        text = f"{number(middle)}{mark}  n={bar.num_runs}" if turned else f"{number(middle)}{mark}\nn={bar.num_runs}"
        axes.annotate(
            text,
            (x, high),
            xytext=(0, 4),
            textcoords="offset points",
            ha="center",
            va="bottom",
            rotation=90 if turned else 0,
            fontsize=7.5 if turned else 8,
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.6},
        )
    axes.set_title(panel.title, loc="left", fontsize=9.5, fontweight="bold")
    axes.set_ylabel(f"{panel.metric.title} ({unit})")
    axes.yaxis.grid(visible=True, color="0.88", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _positions(panel: Panel) -> list[float]:
    """Where the bars stand, in bars."""
    found, at = [], 0.0
    for group in panel.groups:
        found += [at + index for index in range(len(group))]
        at += len(group) + _GROUP_GAP
    return found


def _tick_labels(panel: Panel, names: Names) -> list[str]:
    """The strategy of each group, with its ranks unless the legend tells them."""
    labels = []
    for group in panel.groups:
        cell = group[0].cell
        ranks = ranks_text(cell.world_size)
        labels.append(cell.variant if ranks in names[group[0].key] else f"{cell.variant}\n{ranks}")
    return labels


def _too_wide(labels: Sequence[str], panel: Panel, slot: float) -> bool:
    """Whether a label would run into its neighbour's."""
    rooms = ((len(group) + _GROUP_GAP) * slot for group in panel.groups)
    widths = (max(map(len, label.split("\n"))) * _CHARACTER for label in labels)
    return any(width > room for width, room in zip(widths, rooms, strict=True))


def _set_ticks(axes: Axes, panel: Panel, labels: Sequence[str], turned: bool) -> None:
    positions, middles, done = _positions(panel), [], 0
    for group in panel.groups:
        own = positions[done : done + len(group)]
        middles.append((own[0] + own[-1]) / 2)
        done += len(group)
    axes.set_xticks(middles, labels, rotation=50 if turned else 0, ha="right" if turned else "center")
    axes.tick_params(axis="x", length=0)
