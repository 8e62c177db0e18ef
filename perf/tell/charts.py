"""The three charts of a test run: cluster throughput, step time, peak memory; drawn from measurements, saved as PNG."""

import math
from collections.abc import Sequence, Set
from pathlib import Path
from typing import Any

import matplotlib
import msgspec
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from perf.facts.measurement import Measurement
from perf.tell import lettering, plot
from perf.tell.bars import (
    CHARTS,
    Bar,
    Chart,
    Panel,
    bars,
    common,
    panels,
    titles,
    variant_names,
)
from perf.tell.render import runs_text

# All lengths are in inches until they reach matplotlib.
DPI = 150
ROW_WIDTH = 10.5
_LEAST_WIDTH = 6.0
_LEFT, _RIGHT = 0.78, 0.17
_MARGIN = 0.12
"""Around everything."""
_SLOTS = (0.6, 0.53, plot.LEAST_UPRIGHT)
"""Widths of a bar with its gap: the widest of those that give the fewest rows. Below the last, labels are turned."""
_LEAST_SLOT = 0.135
"""Below this the numbers over neighbouring bars meet: a wider panel goes on in the next row."""
LOOKS = (
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
STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": plot.TEXT,
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
            with matplotlib.rc_context(STYLE):
                written.append(save(figure_of(chart, shown), folder / chart.file_name))
    return written


def save(figure: Figure, path: Path) -> Path:
    FigureCanvasAgg(figure)
    # Without this the file would name the version that drew it, and differ after an upgrade.
    figure.savefig(path, format="png", dpi=DPI, metadata={"Software": None})
    return path


def reading_of(counts: Set[int], *, has_planted: bool = False) -> str:
    """How to read bars of so many runs. What holds for all of them is not said over each."""
    planted = "; *: planted fault" * has_planted
    if counts == {1}:
        return "bar: the only run of each cell, whose spread is not known" + planted
    if len(counts) == 1:
        return f"bar: median of {runs_text(min(counts))} of each cell; error bar: smallest to largest run" + planted
    once = "; dashed: one run, spread not known" if 1 in counts else ""
    return f"bar: median of n runs; error bar: smallest to largest run{once}{planted}"


def figure_of(chart: Chart, whole: Sequence[Panel]) -> Figure:
    """The picture: a row for as many panels as fit beside each other."""
    names = variant_names(whole)
    looks = {name: _look(index) for index, name in enumerate(dict.fromkeys(names.values()))}
    shown = [part for panel in whole for part in _parts(panel)]
    named = dict(zip(shown, titles(shown), strict=True))
    widest = min((ROW_WIDTH - _LEFT - _RIGHT) / plot.slots(panel) for panel in shown)
    slot = min((min(slot, widest) for slot in _SLOTS), key=lambda slot: len(_rows(named, slot)))
    rows = _rows(named, slot)
    turned = any(plot.too_wide(panel, names, slot) for panel in shown)
    ticks = {panel: plot.fitting(panel, names, slot, turned=turned) for panel in shown}
    below, overhang = _margins(ticks, slot, turned=turned)
    left = max(_LEFT, *(overhang[row[0]] + _MARGIN for row in rows))
    lines = _head_lines(chart, whole)
    counted = len({bar.num_runs for panel in whole for bar in panel.bars}) > 1
    width = max(
        _LEAST_WIDTH,
        *(lettering.width(text, points, bold=bold) + 2 * _MARGIN for text, points, bold in lines),
        *(left - _LEFT + sum(plot.plot_width(p, named[p], slot) + _LEFT + _RIGHT for p in row) for row in rows),
    )
    columns = max(1, int((width - _MARGIN) / (0.5 + max(lettering.width(name, plot.TEXT) for name in looks))))
    header = 0.3 + sum(points * lettering.LINE for _, points, _ in lines) + 0.18 * math.ceil(len(looks) / columns)
    above = 0.35 + 0.14 * any(plot.has_headings(panel) for panel in shown)
    row_height = plot.HEIGHT + above + below
    height = header + row_height * len(rows)
    figure = Figure(figsize=(width, height), dpi=DPI)
    _head(figure, lines, looks, columns)
    for index, row in enumerate(rows):
        at, bottom = left, height - header - row_height * (index + 1) + below
        for panel in row:
            plot_width = plot.plot_width(panel, named[panel], slot)
            axes = figure.add_axes((at / width, bottom / height, plot_width / width, plot.HEIGHT / height))
            plot.draw(axes, panel, names, looks, upright=slot >= plot.LEAST_UPRIGHT, counted=counted)
            plot.set_width(axes, panel, plot_width / slot)
            plot.set_ticks(axes, panel, ticks[panel], turned=turned)
            plot.set_title(axes, panel, named[panel])
            at += plot_width + _RIGHT + _LEFT
    return figure


def _look(index: int) -> tuple[str, str]:
    """Colour and hatch of a variant; from the ninth on, the colours return under other hatches."""
    color, hatch = LOOKS[index % len(LOOKS)]
    return color, hatch + "O" * (index // len(LOOKS))


def _parts(panel: Panel) -> list[Panel]:
    """The panel, or as many as its groups need; all to one scale."""
    most = (ROW_WIDTH - _LEFT - _RIGHT) / _LEAST_SLOT
    num_parts = math.ceil(plot.slots(panel) / most)
    found: list[list[Bar]] = [[]]
    used = 0.0
    for group in panel.groups:
        taken = len(group) + plot.GROUP_GAP
        if found[-1] and used + taken > max(plot.slots(panel) / num_parts + taken / 2, taken):
            found.append([])
            used = 0.0
        found[-1] += group
        used += taken
    if len(found) == 1:
        return [panel]
    return [
        msgspec.structs.replace(panel, bars=tuple(part), part=f"{index} of {len(found)}")
        for index, part in enumerate(found, start=1)
    ]


def _rows(named: dict[Panel, str], slot: float) -> list[list[Panel]]:
    """The panels as they fit beside each other."""
    rows: list[list[Panel]] = [[]]
    for panel in named:
        widths = [plot.plot_width(one, named[one], slot) + _LEFT + _RIGHT for one in (*rows[-1], panel)]
        if rows[-1] and sum(widths) > ROW_WIDTH:
            rows.append([])
        rows[-1].append(panel)
    return rows


def _margins(ticks: dict[Panel, list[str]], slot: float, *, turned: bool) -> tuple[float, dict[Panel, float]]:
    """What labels need below the panels, and to the left of where each panel begins."""
    below, overhang = 0.0, {}
    angle = plot.ANGLE if turned else 0
    for panel, texts in ticks.items():
        boxes = [lettering.turned(text, plot.TEXT, angle) for text in texts]
        below = max(below, *(high for _, high in boxes))
        places = [(middle + 0.5 + plot.GROUP_GAP / 2) * slot for middle in plot.middles(panel)]
        share = 1 if turned else 0.5
        overhang[panel] = max(share * wide - place for (wide, _), place in zip(boxes, places, strict=True))
    return 0.12 + below, overhang


def _head_lines(chart: Chart, shown: Sequence[Panel]) -> list[tuple[str, float, bool]]:
    """Title, what all bars share, and how to read them: each text with the size of its letters, and whether bold."""
    drawn = [bar for panel in shown for bar in panel.bars]
    reading = reading_of({bar.num_runs for bar in drawn}, has_planted=any(bar.planted for bar in drawn))
    texts = [common(shown), chart.note, reading]
    return [(chart.title, 12.5, True), *((text, plot.TEXT, False) for text in texts if text)]


def _head(
    figure: Figure, lines: Sequence[tuple[str, float, bool]], looks: dict[str, tuple[str, str]], columns: int
) -> None:
    """Title, how to read the bars, and the legend."""
    width, height = figure.get_size_inches()
    at = _MARGIN
    for text, points, bold in lines:
        color, weight = ("black", "bold") if bold else (plot.GREY, "normal")
        figure.text(_MARGIN / width, 1 - at / height, text, fontsize=points, fontweight=weight, color=color, va="top")
        at += points * lettering.LINE
    figure.legend(
        handles=[
            Patch(facecolor=color, hatch=hatch, edgecolor="black", linewidth=0.6, label=name)
            for name, (color, hatch) in looks.items()
        ],
        loc="upper left",
        bbox_to_anchor=(_MARGIN / width, 1 - (at + 0.05) / height),
        ncols=columns,
        frameon=False,
        borderpad=0,
        borderaxespad=0,
        handlelength=1.4,
        columnspacing=1.6,
    )
