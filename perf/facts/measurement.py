"""The metrics, and the measurement of a cell: its runs, reduced to one value per run and metric, raw steps kept."""

import statistics
from collections.abc import Callable
from typing import Literal

import msgspec

from perf.facts import stats
from perf.facts.cell import Cell, Recipe, SamplingPlan
from perf.facts.record import LedgerEntry, RankRecord, RunRecord
from strategies.value import Value


class Metric(Value, frozen=True, kw_only=True):
    """One figure of a run."""

    name: str
    title: str
    unit: str
    better: Literal["lower", "higher"]


STEP_TIME = Metric(name="step_time_s", title="step time", unit="s", better="lower")
THROUGHPUT = Metric(name="tokens_per_s", title="cluster throughput", unit="tok/s", better="higher")
PEAK_ALLOCATED = Metric(name="peak_allocated_bytes", title="peak allocated", unit="bytes", better="lower")
PEAK_RESERVED = Metric(name="peak_reserved_bytes", title="peak reserved", unit="bytes", better="lower")
PEAK_RESIDENT = Metric(name="peak_resident_bytes", title="peak resident", unit="bytes", better="lower")

HOST_BOUND_SHARE = 0.97
"""Of the step time. Launches wait for room in a queue of about a thousand, so a step of sixteen thousand kernels is
issued at 94 % of it however fast the host is: eager `single`, 0.6b and 1.7b, on H200s. One of over thirty thousand
counts as limited by the host though it is not."""


def _over_ranks(pick: Callable[[RankRecord], int | None]) -> Callable[[RunRecord], float | None]:
    """The largest value over ranks; None when a rank has none."""

    def reduce(run: RunRecord) -> float | None:
        values = [pick(rank) for rank in run.ranks]
        present = [value for value in values if value is not None]
        return float(max(present)) if present and len(present) == len(values) else None

    return reduce


def _step_time(run: RunRecord) -> float | None:
    even = len({len(rank.step_times_s) for rank in run.ranks}) == 1
    return stats.step_time_s(run.step_times_s) if even and run.step_times_s else None


def _throughput(run: RunRecord) -> float | None:
    step_time_s = _step_time(run)
    return run.cell.workload.tokens_per_step / step_time_s if step_time_s else None


METRICS: dict[str, tuple[Metric, Callable[[RunRecord], float | None]]] = {
    STEP_TIME.name: (STEP_TIME, _step_time),
    THROUGHPUT.name: (THROUGHPUT, _throughput),
    PEAK_ALLOCATED.name: (PEAK_ALLOCATED, _over_ranks(lambda rank: rank.memory.allocated_bytes)),
    PEAK_RESERVED.name: (PEAK_RESERVED, _over_ranks(lambda rank: rank.memory.reserved_bytes)),
    PEAK_RESIDENT.name: (PEAK_RESIDENT, _over_ranks(lambda rank: rank.memory.resident_bytes)),
}
"""Every metric with its reduction of a run; a reduction gives None where the run has no such value."""


class RankLedger(Value, frozen=True, kw_only=True):
    """The ledger that these ranks have in common."""

    ranks: tuple[int, ...]
    entries: tuple[LedgerEntry, ...]


class Measurement(Value, frozen=True, kw_only=True):
    """All runs of one cell in one test run."""

    cell: Cell
    plan: SamplingPlan
    runs: tuple[RunRecord, ...]

    @property
    def recipe(self) -> Recipe:
        return self.cell.recipe(self.plan)

    def values(self, metric: Metric) -> tuple[float | None, ...]:
        """One value per run."""
        reduce = METRICS[metric.name][1]
        return tuple(reduce(run) for run in self.runs)

    def median(self, metric: Metric) -> float | None:
        """Median over the runs, or None when a run lacks the metric."""
        values = [value for value in self.values(metric) if value is not None]
        return statistics.median(values) if values and len(values) == len(self.runs) else None


def measure(cell: Cell, plan: SamplingPlan, runs: list[RunRecord]) -> Measurement:
    """The measurement of a cell from its runs, with the warm-up that they had: an earlier version's may be another.

    Raises ValueError when one is another cell's.
    """
    if strange := [run for run in runs if run.cell != cell]:
        other = strange[0].cell.id
        what = f"a record of {other}" if other != cell.id else "a record of another workload"
        raise ValueError(f"run {strange[0].index} of {cell.id} is {what}")
    plan = cell.plan(plan)
    if runs:
        plan = msgspec.structs.replace(plan, warmup_steps=runs[-1].plan.warmup_steps)
    return Measurement(cell=cell, plan=plan, runs=tuple(runs))


def ledgers(run: RunRecord) -> tuple[RankLedger, ...]:
    """The ledgers of a run's ranks, equal ones told once."""
    groups: dict[tuple[LedgerEntry, ...], list[int]] = {}
    for rank in run.ranks:
        groups.setdefault(rank.ledger, []).append(rank.rank)
    return tuple(RankLedger(ranks=tuple(ranks), entries=entries) for entries, ranks in groups.items())


def straggler(run: RunRecord) -> tuple[int, float] | None:
    """The rank that reached a collective latest behind the first one, and by how many seconds; None when unknown.

    In a synchronous step all ranks look equally slow; only the time at which each reaches a collective tells who the
    others wait for.
    """
    arrivals = [rank.arrivals_s for rank in run.ranks]
    if len(arrivals) < 2 or not arrivals[0] or len({len(times) for times in arrivals}) != 1:
        return None
    lags = [(max(times) - min(times), run.ranks[times.index(max(times))].rank) for times in zip(*arrivals, strict=True)]
    lag_s, rank = max(lags)
    return rank, lag_s


def is_host_bound(measurement: Measurement) -> bool:
    """Whether the host may be what limits the steps, in part at least; also where that is not known.

    It may where it issues the last kernel of a step as the step ends, in most runs: the one step that is asked can meet
    something. Where GPUs are behind, a queue of kernels lasts longer.
    """
    shares = [_issued_at(run) for run in measurement.runs]
    known = [share for share in shares if share is not None]
    return not known or len(known) < len(shares) or statistics.median(known) > HOST_BOUND_SHARE


def _issued_at(run: RunRecord) -> float | None:
    """When the host has issued a step, as a fraction of the step; None where that is not known."""
    step_time_s = _step_time(run)
    return None if run.issue_time_s is None or step_time_s is None else run.issue_time_s / step_time_s


def disturbances(measurement: Measurement) -> list[str]:
    """What made a GPU slower than it is, in words: the run then measured that. A power cap under load is no fault."""
    found = []
    for run in measurement.runs:
        for gpu in run.gpus:
            if gpu.throttled:
                found.append(f"run {run.index}: {gpu.uuid} was throttled: {', '.join(gpu.throttled)}")
            if gpu.foreign_pids:
                pids = ", ".join(map(str, gpu.foreign_pids))
                found.append(f"run {run.index}: {gpu.uuid} was not alone, used by process {pids}")
    return found


def gaps(measurement: Measurement) -> list[str]:
    """What is missing for a measurement: each gap in words; empty when it is whole."""
    plan, found = measurement.plan, []
    if len(measurement.runs) < plan.runs:
        found.append(f"{len(measurement.runs)} of {plan.runs} runs")
    for run in measurement.runs:
        ranks = sorted(rank.rank for rank in run.ranks)
        if ranks != list(range(measurement.cell.world_size)):
            found.append(f"run {run.index} has records of ranks {ranks}, not of {measurement.cell.world_size} ranks")
        for rank in run.ranks:
            where = f"run {run.index} rank {rank.rank}"
            if len(rank.step_times_s) != plan.timed_steps or not rank.step_times_s:
                found.append(f"{where} has {len(rank.step_times_s)} of {plan.timed_steps} measured steps")
            elif min(rank.step_times_s) <= 0:
                found.append(f"{where} has a step time of {min(rank.step_times_s)} s")
            if len(rank.losses) != plan.warmup_steps + plan.timed_steps:
                found.append(
                    f"{where} has losses of {len(rank.losses)} of {plan.warmup_steps + plan.timed_steps} steps"
                )
        if run.teardown_hang:
            found.append(f"run {run.index}: teardown hang, its processes had to be killed after measuring")
    if measurement.cell.device_kind == "cuda" and None in measurement.values(PEAK_ALLOCATED):
        found.append("a run has no allocator statistics")
    return found
