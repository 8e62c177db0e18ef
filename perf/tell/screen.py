"""Which candidates of an axis are the fastest, size by size: those are worth all their runs."""

from collections.abc import Sequence
from typing import NamedTuple

from perf.facts.cell import Cell
from perf.facts.measurement import PEAK_ALLOCATED, THROUGHPUT
from perf.tell.exports import FinishedTestRun
from strategies.layout import parts_on
from strategies.product import is_product
from strategies.shapes import SIZES
from strategies.spec import StrategyName

MARGIN = 0.02
"""Candidates that are this close together are not told apart by one run each, and are all taken."""
PRODUCT = "product"
AXIS_NAMES = {
    "single": "",
    "data": "DP",
    "tensor": "TP",
    "pipeline": "PP",
    "context": "CP",
    "expert": "EP",
    PRODUCT: PRODUCT,
}
"""As `axis_of` calls an axis -> as a reader does; in the order in which axes are shown."""


class Group(NamedTuple):
    """What candidates that compete have in common."""

    size: str
    link: str
    world_size: int
    tokens_per_step: int
    sequence_length: int
    axis: str

    @property
    def workload(self) -> str:
        """What one step of each candidate computes; the micro-batch is a candidate's own affair."""
        return f"{self.tokens_per_step:,} tokens a step in sequences of {self.sequence_length:,}"


def group_of(cell: Cell) -> Group:
    work = cell.workload
    return Group(cell.size, cell.link.value, cell.world_size, work.tokens_per_step, work.sequence_length, axis_of(cell))


class Candidate(NamedTuple):
    """A measured cell among those it competes with."""

    cell: Cell
    tokens_per_s: float
    """Median over its runs."""
    peak_bytes: float | None
    num_runs: int
    machine: str
    """Key."""


def axis_of(cell: Cell) -> str:
    """`data`, `tensor`, `pipeline`, `context`, `expert` or `single`; `product` of several axes.

    Where sequences are cut it is `context` whatever else is, as published comparisons count it.
    """
    if cell.strategy == StrategyName.SINGLE:
        return str(StrategyName.SINGLE)
    kinds = {part.kind for part in parts_on(cell.strategy, cell.world_size)}
    if "context" in kinds:
        return "context"
    return PRODUCT if is_product(cell.strategy) else next(iter(kinds))


def groups_of(test_runs: Sequence[FinishedTestRun]) -> dict[Group, list[Candidate]]:
    """Measured cells by what they compete in, small sizes and the fastest first; of two test runs the newest counts.

    Left out are cells that are wrong, failed, have a fault planted or no runs. Raises ValueError when candidates of a
    group were measured on two machines.
    """
    measured: dict[str, Candidate] = {}
    for test_run in sorted(test_runs, key=lambda one: one.manifest.started_at):
        for measurement, _ in test_run.with_values:
            tokens_per_s = measurement.median(THROUGHPUT)
            if tokens_per_s:
                cell, peak = measurement.cell, measurement.median(PEAK_ALLOCATED)
                machine = measurement.runs[-1].environment.machine.key
                measured[cell.id] = Candidate(cell, tokens_per_s, peak, len(measurement.runs), machine)
    groups: dict[Group, list[Candidate]] = {}
    for candidate in sorted(measured.values(), key=lambda one: -one.tokens_per_s):
        cell = candidate.cell
        group = groups.setdefault(group_of(cell), [])
        if group and group[0].machine != candidate.machine:
            raise ValueError(
                f"{group[0].cell.id} was measured on {group[0].machine}, {cell.id} on {candidate.machine}: "
                "screen the test runs of one machine at a time"
            )
        group.append(candidate)
    return dict(sorted(groups.items(), key=lambda item: (SIZES[item[0].size].num_parameters, item[0])))


def fastest(candidates: Sequence[Candidate], margin: float = MARGIN) -> list[Candidate]:
    """The fastest one, and those that are slower by no more than `margin`."""
    best = max(candidate.tokens_per_s for candidate in candidates)
    return [candidate for candidate in candidates if candidate.tokens_per_s >= best * (1 - margin)]
