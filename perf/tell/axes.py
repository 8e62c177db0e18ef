"""Which candidate of each axis is the fastest, side by side: the table and the values of its chart. GPU cells alone.

On CPU ranks that share one machine the order of the axes says nothing.
"""

from collections.abc import Iterable, Mapping, Sequence

import pandas as pd

from perf.facts.cell import Cell
from perf.facts.measurement import PEAK_ALLOCATED, STEP_TIME, THROUGHPUT
from perf.facts.outcome import Outcome
from perf.judge.rule import Rule
from perf.judge.verdict import Verdict
from perf.tell import tables
from perf.tell.bars import ranks_text
from perf.tell.render import quantity
from perf.tell.screen import AXIS_NAMES, Group, group_of
from strategies.shapes import SIZES
from strategies.value import Value


class Standing(Value, frozen=True, kw_only=True):
    """One axis at one size and link."""

    group: Group
    candidates: tuple[Cell, ...]
    """Those with a value that may be compared, fastest first."""
    failures: tuple[str, ...]
    """The others, each with what became of it: `ddp compile OOM`."""

    @property
    def axis(self) -> str:
        """As readers call it."""
        return AXIS_NAMES[self.group.axis]

    @property
    def place(self) -> Group:
        """What the axes that stand beside it have in common with it."""
        return self.group._replace(axis="")


def standings(frame: pd.DataFrame, cells: Sequence[Cell], verdicts: Mapping[str, Verdict]) -> list[Standing]:
    """Of every place at which several axes were tried and one has a value: small sizes first, then fastest first."""
    on_gpus = [cell for cell in cells if cell.device_kind == "cuda"]
    speeds = {
        cell.id: speed
        for cell in tables.sound(frame, on_gpus, verdicts)
        if (speed := tables.median(frame, cell, THROUGHPUT))
    }
    by_group: dict[Group, list[Cell]] = {}
    for cell in on_gpus:
        by_group.setdefault(group_of(cell), []).append(cell)
    found = [
        Standing(
            group=group,
            candidates=tuple(sorted((c for c in own if c.id in speeds), key=lambda cell: -speeds[cell.id])),
            failures=tuple(failure(c, verdicts[c.id]) for c in own if c.id not in speeds),
        )
        for group, own in by_group.items()
    ]
    found.sort(
        key=lambda one: (
            SIZES[one.group.size].num_parameters,
            one.place,
            -speeds[one.candidates[0].id] if one.candidates else 0,
        )
    )
    return [
        one
        for one in found
        if len({other.axis for other in found if other.place == one.place}) > 1
        and any(other.candidates for other in found if other.place == one.place)
    ]


def failure(cell: Cell, verdict: Verdict) -> str:
    """`ddp compile OOM`, `tp eager NOT_RUN`: the kind of failure where there is one."""
    kind = verdict.reasons[0].partition(":")[0] if verdict.reasons else ""
    told = kind if verdict.outcome is Outcome.ERROR and kind.isupper() else verdict.outcome.value
    return f"{name(cell)} {told}"


def name(cell: Cell) -> str:
    return f"{cell.variant} {cell.mode}"


def title(group: Group, others: Iterable[Group]) -> str:
    """The size, with ranks and work where places differ in them; the link has its own column or colour."""
    beside = list(others)
    parts = [group.size]
    parts += [ranks_text(group.world_size)] * (len({one.world_size for one in beside}) > 1)
    parts += [group.workload] * (len({one.workload for one in beside}) > 1)
    return ", ".join(parts)


def growth_table(frame: pd.DataFrame, found: Sequence[Standing]) -> tables.Table:
    """Step time of an axis over the sizes, by its fastest candidate at each: what grows may be another strategy."""
    sizes = list(dict.fromkeys(one.group.size for one in found))
    by_axis: dict[Group, dict[str, Cell]] = {}
    for one in found:
        if one.candidates:
            by_axis.setdefault(one.group._replace(size=""), {})[one.group.size] = one.candidates[0]
    several = len({group._replace(axis="", link="") for group in by_axis}) > 1
    rows = []
    for group, cells in sorted(by_axis.items(), key=lambda item: list(AXIS_NAMES).index(item[0].axis)):
        times = {size: tables.median(frame, cell, STEP_TIME) or 0.0 for size, cell in cells.items()}
        if len(times) > 1 and all(times.values()):
            where = [AXIS_NAMES[group.axis], group.link]
            where += [ranks_text(group.world_size), group.workload] * several
            told = {size: f"{quantity(times[size], STEP_TIME)}, {name(cell)}" for size, cell in cells.items()}
            first, *_, last = times.values()
            texts = (told.get(size, tables.ABSENT) for size in sizes)
            rows.append((", ".join(where), *texts, f"{last / first:.2f} x"))
    return tables.Table(header=("axis", *sizes, "largest / smallest"), rows=tuple(rows))


def _share(value: float, best: float) -> str:
    """`0.92 x`; `~ 0.99 x` where it is too close to the best to be told apart from it."""
    return "~ " * (best * (1 - Rule().floor) <= value < best) + f"{value / best:.2f} x"


def axes_table(frame: pd.DataFrame, found: Sequence[Standing]) -> tables.Table:
    """A row for each axis; shares are of the fastest axis beside it, and of the fastest in the axis."""
    best: dict[Group, float] = {}
    rows = []
    for one in found:
        where = (title(one.place, (other.place for other in found)), one.group.link, one.axis)
        failures = ", ".join(one.failures)
        if not one.candidates:
            rows.append((*where, tables.ABSENT, *[tables.ABSENT] * 5, tables.ABSENT, failures))
            continue
        first, *others = one.candidates
        own = frame[frame["cell"] == first.id]
        speeds = [tables.median(frame, cell, THROUGHPUT) or 0.0 for cell in one.candidates]
        rows.append(
            (
                *where,
                name(first),
                tables.spread_text(own, THROUGHPUT),
                _share(speeds[0], best.setdefault(one.place, speeds[0])),
                tables.spread_text(own, STEP_TIME),
                tables.spread_text(own, PEAK_ALLOCATED),
                str(len(own)),
                f"{name(others[0])} {_share(speeds[1], speeds[0])}" if others else tables.ABSENT,
                failures,
            )
        )
    header = (
        *("size", "link", "axis", "fastest candidate", "cluster throughput", "of the fastest axis"),
        *("step time", "peak memory", "runs", "next in the axis", "no value"),
    )
    return tables.Table(header=header, rows=tuple(rows), first_number=4, words=("next in the axis", "no value"))
