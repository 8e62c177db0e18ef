"""The order of the axes as it was published elsewhere, beside the order that was measured here.

Machines differ in everything; what can carry over is which axis leads, and by how much.
"""

from collections.abc import Mapping, Sequence

import msgspec

from perf.facts.cell import Cell
from perf.facts.outcome import Outcome
from perf.tell.exports import FinishedTestRun
from perf.tell.published import PublishedTable
from perf.tell.render import runs_text
from perf.tell.screen import AXIS_NAMES, PRODUCT, Candidate, Group, group_of, groups_of
from perf.tell.tables import Table
from strategies.value import Value

AXES = {name: axis for axis, name in AXIS_NAMES.items() if name and axis != PRODUCT}
"""As published -> as `axis_of` calls it."""
CLOSE = 0.02
"""Two axes whose rates are this close are not told apart."""
Order = list[tuple[str, float]]
"""Axes with their throughput, fastest first."""


class Ranking(Value, frozen=True, kw_only=True):
    """Both orders for each size and link, and what was not compared, and why."""

    table: Table
    notes: tuple[str, ...] = ()


def ranking(published: PublishedTable, test_run: FinishedTestRun) -> Ranking:
    """A row for each size and link on which at least two of the published axes were tried and one was measured.

    Of each axis counts the fastest cell. Shares are of the fastest axis' throughput. Compared are cells on as many
    ranks and, where the published table states it, of the same work a step; nothing where several machines were
    measured.
    """
    as_many = [cell for cell in test_run.manifest.cells if cell.world_size == published.num_ranks]
    alike = [cell for cell in as_many if _is_same_work(cell, published)]
    notes = _on_work(as_many, published)
    chosen = tuple(one for one in test_run.measurements if one.cell in alike)
    machines = {run.environment.machine.key for measurement in chosen for run in measurement.runs}
    if len(machines) > 1:
        return Ranking(table=_table([]), notes=(*notes, f"Not compared: measured on {', '.join(sorted(machines))}."))
    groups = groups_of([msgspec.structs.replace(test_run, measurements=chosen)])
    failures = _failures(alike, test_run.left_out)
    tried: dict[Group, set[str]] = {}
    for cell in alike:
        group = group_of(cell)
        if name := next((name for name, axis in AXES.items() if axis == group.axis), None):
            tried.setdefault(group._replace(axis=""), set()).add(name)
    several = len({group.workload for group in tried}) > 1
    rows = []
    for place, names in tried.items():
        rates = {row.strategy: row.tokens_per_s for row in published.rows if row.size == place.size}
        fastest = {
            name: groups[group][0] for name in rates if name in AXES and (group := _of_axis(place, name)) in groups
        }
        if fastest and len(names & set(rates)) > 1:
            missing = {
                name: failures.get(_of_axis(place, name), "not measured") for name in rates if name not in fastest
            }
            size = place.size + f", {place.workload}" * several
            rows.append((size, place.link, *_compared(rates, fastest, missing)))
    return Ranking(table=_table(rows), notes=notes)


def _compared(
    rates: Mapping[str, float], fastest: Mapping[str, Candidate], missing: Mapping[str, str]
) -> tuple[str, ...]:
    """The cells of a row behind its size and link; `missing`: axes without a value here, and why."""
    ours = _order({name: candidate.tokens_per_s for name, candidate in fastest.items()})
    here = "; ".join([_text(ours), *(f"{name} {reason}" for name, reason in missing.items())])
    cells = ", ".join(
        f"{name} {fastest[name].cell.variant} {fastest[name].cell.mode} ({runs_text(fastest[name].num_runs)})"
        for name, _ in ours
    )
    return _text(_order(rates)), here, _agreement(rates, ours, missing), cells


def _table(rows: Sequence[tuple[str, ...]]) -> Table:
    header = ("size", "link", "published", "measured here", "same order", "fastest cells")
    return Table(header=header, rows=tuple(rows), first_number=len(header))


def _of_axis(place: Group, name: str) -> Group:
    return place._replace(axis=AXES.get(name, name))


def _is_same_work(cell: Cell, published: PublishedTable) -> bool:
    """As far as the published table states its work."""
    work = cell.workload
    return (published.tokens_per_step or work.tokens_per_step, published.sequence_length or work.sequence_length) == (
        work.tokens_per_step,
        work.sequence_length,
    )


def _on_work(cells: Sequence[Cell], published: PublishedTable) -> tuple[str, ...]:
    """A sentence on the cells that do other work than the published ones, or on work that nobody stated."""
    others = [cell for cell in cells if not _is_same_work(cell, published)]
    tokens, length = published.tokens_per_step, published.sequence_length
    told = [] if tokens is None else [f"{tokens:,} tokens a step"]
    told += [] if length is None else [f"sequences of {length:,}"]
    notes = []
    if cells and len(told) < 2:
        ours = _workloads([cell for cell in cells if cell not in others])
        notes.append(f"The published table states {' and '.join(told) or 'no work a step'}: it may differ from {ours}.")
    if others:
        notes.append(f"Not compared: {len(others)} cells of {_workloads(others)}; published: {', '.join(told)}.")
    return tuple(notes)


def _workloads(cells: Sequence[Cell]) -> str:
    return " and of ".join(dict.fromkeys(group_of(cell).workload for cell in cells))


def _failures(cells: Sequence[Cell], left_out: Mapping[str, str]) -> dict[Group, str]:
    """Why a group has no value, should all that was tried of it have failed: `no value (6 tried: OOM, HANG)`."""
    found: dict[Group, list[str]] = {}
    for cell in cells:
        if reason := left_out.get(cell.id):
            outcome, _, detail = reason.partition(": ")
            kind = detail.partition(":")[0]
            told = kind if outcome == Outcome.ERROR and kind.isupper() else outcome
            found.setdefault(group_of(cell), []).append(told)
    return {
        group: f"no value ({len(kinds)} tried: {', '.join(dict.fromkeys(kinds))})" for group, kinds in found.items()
    }


def _order(rates: Mapping[str, float]) -> Order:
    return sorted(rates.items(), key=lambda pair: -pair[1])


def _text(order: Order) -> str:
    """`PP 1.00 > DP 0.80 ~ TP 0.79`."""
    best = order[0][1]
    text = ""
    for index, (name, rate) in enumerate(order):
        if index:
            text += " > " if order[index - 1][1] > rate * (1 + CLOSE) else " ~ "
        text += f"{name} {rate / best:.2f}"
    return text


def _agreement(theirs: Mapping[str, float], ours: Order, missing: Mapping[str, str]) -> str:
    """Whether the axes that were published apart stand the same way round here: each pair of them counts."""
    here = dict(ours)
    apart = [(one, two) for one in here for two in here if theirs[one] > theirs[two] * (1 + CLOSE)]
    turned = [f"{two} > {one}" for one, two in apart if here[two] > here[one] * (1 + CLOSE)]
    close = [f"{one} ~ {two}" for one, two in apart if here[one] <= here[two] * (1 + CLOSE)]
    if len(ours) < 2:
        return "nothing to compare"
    without = f", without {', '.join(missing)}" if missing else ""
    if turned:
        return f"no: {', '.join(turned)}{without}"
    return (f"too close to tell: {', '.join(close)}" if close else "yes") + without
