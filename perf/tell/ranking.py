"""The order of the axes as it was published elsewhere, beside the order that was measured here.

Machines differ in everything; what can carry over is which axis leads, and by how much.
"""

import msgspec

from perf.tell.exports import FinishedTestRun
from perf.tell.published import PublishedTable
from perf.tell.screen import Candidate, groups_of
from perf.tell.tables import Table

AXES = {"DP": "data", "TP": "tensor", "PP": "pipeline", "CP": "context"}
"""As published -> as `axis_of` calls it."""
CLOSE = 0.02
"""Neighbours of an order that are this close are not told apart."""
Order = list[tuple[str, float]]
"""Axes with their throughput, fastest first."""


def ranking_table(published: PublishedTable, test_run: FinishedTestRun) -> Table:
    """A row for each size and link on which at least two of the published axes were measured, on as many ranks.

    Of each axis counts the fastest cell. Shares are of the fastest axis' throughput. Nothing is compared where several
    machines were measured.
    """
    as_many = [one for one in test_run.measurements if one.cell.world_size == published.num_ranks]
    machines = {run.environment.machine.key for measurement in as_many for run in measurement.runs}
    alike = msgspec.structs.replace(test_run, measurements=tuple(as_many) if len(machines) == 1 else ())
    measured: dict[tuple[str, str], dict[str, Candidate]] = {}
    for group, candidates in groups_of([alike]).items():
        names = [name for name, axis in AXES.items() if axis == group.axis]
        if names:
            measured.setdefault((group.size, group.link), {})[names[0]] = candidates[0]
    rows = []
    for (size, link), fastest in measured.items():
        theirs = _order({row.strategy: row.tokens_per_s for row in published.rows if row.size == size}, set(fastest))
        ours = _order({name: candidate.tokens_per_s for name, candidate in fastest.items()}, {n for n, _ in theirs})
        if len(ours) > 1:
            cells = ", ".join(f"{name} {fastest[name].cell.variant} {fastest[name].cell.mode}" for name, _ in ours)
            rows.append((size, link, _text(theirs), _text(ours), "yes" if _agree(theirs, ours) else "no", cells))
    header = ("size", "link", "published", "measured here", "same order", "fastest cells")
    return Table(header=header, rows=tuple(rows), first_number=5)


def _order(rates: dict[str, float], names: set[str]) -> Order:
    return sorted(((name, rate) for name, rate in rates.items() if name in names), key=lambda pair: -pair[1])


def _text(order: Order) -> str:
    """`PP 1.00 > DP 0.80 > TP 0.08`."""
    best = order[0][1]
    return " > ".join(f"{name} {rate / best:.2f}" for name, rate in order)


def _agree(theirs: Order, ours: Order) -> bool:
    """Whether no two axes stand the other way round that both tell apart."""
    here, there = dict(ours), dict(theirs)
    pairs = [(one, two) for one in here for two in here if here[one] > here[two] * (1 + CLOSE)]
    return all(there[one] >= there[two] * (1 - CLOSE) for one, two in pairs)
