"""The verdict on one cell: right, valid, memory, throughput, in this order; a pure function of values.

Stage 1 of the decision, the screen, is here: a cell's runs are judged against its baseline at once. `suspicious` marks
the cells that later stages (fresh reruns, A/B beside a reference build) will look at again.
"""

import math
from enum import StrEnum
from typing import ClassVar

import numpy as np

from perf import stats
from perf.baseline import Baseline, Invariants
from perf.correctness import differences, intrinsic_errors
from perf.measurement import (
    PEAK_ALLOCATED,
    PEAK_RESERVED,
    PEAK_RESIDENT,
    STEP_TIME,
    Measurement,
    Metric,
    disturbances,
    gaps,
    straggler,
)
from perf.record import RunRecord
from strategies.value import Value

MIB = 2**20
CPU_PRIOR_SD = 0.04
"""Between-run sd of tiny gloo cells on shared cores, as measured: until nights of a machine say otherwise, such a cell
is NOISY rather than red."""
NINE_IN_TEN = 1.28
"""Normal quantile of 90 %."""
HOST_SHARE = 0.97
"""A host that takes this share of the step time to issue a step is named."""
STRAGGLER_SHARE = 0.2
"""A rank this share of a step late at a collective is named."""


class Outcome(StrEnum):
    """What is said of a cell."""

    PASS = "PASS"
    IMPROVED = "IMPROVED"
    """Better beyond the tolerance: the baseline is stale; never red."""
    REGRESSED = "REGRESSED"
    ENVIRONMENT = "ENVIRONMENT"
    """The machine moved, not the code."""
    NOISY = "NOISY"
    """Too noisy to be gated on time."""
    NO_BASELINE = "NO_BASELINE"
    WRONG = "WRONG"
    """The numbers are not the model's, or the asked mode was not in effect."""
    INVALID = "INVALID"
    """Not a measurement."""
    ERROR = "ERROR"
    """A run failed, or the baseline cannot be read."""
    NOT_RUN = "NOT_RUN"
    """Expected, no result."""
    UNSUPPORTED = "UNSUPPORTED"
    """Refused before any process started."""


FAILURES = frozenset({Outcome.REGRESSED, Outcome.WRONG, Outcome.ERROR})
VERDICTS = frozenset({Outcome.PASS, Outcome.IMPROVED})
"""Green outcomes. Those that are neither a failure nor green are cells without a verdict."""


class Rule(Value, frozen=True, kw_only=True):
    """The numbers of the decision. Tolerances are fractions of the step time."""

    floor: float = 0.025
    """Smallest tolerance."""
    cap: float = 0.08
    """A cell that would need more than this is NOISY."""
    tolerance_errors: float = 3.0
    """Tolerance in standard errors of the difference."""
    suspicious_share: float = 0.6
    least_difference_s: float = 1e-3
    """Absolute difference that a call needs too: the noise of a tiny cell is additive."""
    prior_sd: float = 0.008
    prior_df: float = 6.0
    memory_share: float = 1e-3
    memory_bytes: int = 32 * MIB
    reserved_share: float = 0.05
    reserved_bytes: int = 256 * MIB

    def __post_init__(self) -> None:
        if not 0 <= self.floor <= self.cap < 1:
            raise ValueError(f"tolerances of step time need 0 <= floor {self.floor} <= cap {self.cap} < 1")
        if negative := [name for name in self.__struct_fields__ if getattr(self, name) < 0]:
            raise ValueError(f"a tolerance cannot be negative: {negative[0]} {getattr(self, negative[0])}")


class Comparison(Value, frozen=True, kw_only=True):
    """One metric, old against new."""

    metric: Metric
    old: float
    new: float
    change: float
    """(new - old) / old."""
    interval: tuple[float, float] | None
    """95 % interval of the change; None for a metric that repeats to the byte."""
    tolerance: float | None
    """Fraction; None when the metric is shown but not gated."""
    outcome: Outcome


class Verdict(Value, frozen=True, kw_only=True):
    """What is said of a cell, and on what evidence."""

    SCHEMA_VERSION: ClassVar[int] = 1
    schema_version: int = 1
    cell_id: str
    outcome: Outcome
    reasons: tuple[str, ...] = ()
    comparisons: tuple[Comparison, ...] = ()
    step_time_s: float | None = None
    """Median over the runs, also where there is nothing to compare it with."""
    num_runs: int = 0
    num_baseline_runs: int = 0
    provisional: bool = False
    suspicious: bool = False
    sensitivity: float | None = None
    """Smallest slowdown that this comparison finds nine times out of ten."""
    environment_changes: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def is_failure(self) -> bool:
        return self.outcome in FAILURES


def judge(measurement: Measurement, baseline: Baseline | None, invariants: Invariants | None, rule: Rule) -> Verdict:
    """The verdict of stage 1. The order of the gates decides what is said: a later gate never hides an earlier one."""

    def say(outcome: Outcome, reasons: list[str]) -> Verdict:
        return Verdict(
            cell_id=measurement.cell.id,
            outcome=outcome,
            reasons=tuple(reasons),
            step_time_s=measurement.median(STEP_TIME),
            num_runs=len(measurement.runs),
            notes=_notes(measurement) if outcome is Outcome.NO_BASELINE else (),
        )

    if errors := intrinsic_errors(measurement):
        return say(Outcome.WRONG, errors)
    if not_valid := gaps(measurement) + disturbances(measurement):
        return say(Outcome.INVALID, not_valid)
    for stored, name in ((invariants, "invariants were"), (baseline, "baseline was")):
        if stored is None:
            continue
        if changed := stored.recipe.differences(measurement.recipe):
            return say(Outcome.NO_BASELINE, [f"the {name} recorded with another recipe: {'; '.join(changed)}"])
    if invariants is not None and (errors := differences(measurement, invariants)):
        return say(Outcome.WRONG, errors)
    if baseline is None or invariants is None:
        lacking = "no timing baseline for this machine" if baseline is None else "no recorded invariants"
        return say(Outcome.NO_BASELINE, [lacking])
    return _compare(measurement, baseline, rule)


def _compare(measurement: Measurement, baseline: Baseline, rule: Rule) -> Verdict:
    """Memory, then throughput, against a baseline of the same recipe."""
    time, sensitivity, suspicious = _compare_time(measurement, baseline, rule)
    memory = [
        _compare_memory(measurement, baseline, PEAK_ALLOCATED, rule.memory_share, rule.memory_bytes),
        _compare_memory(measurement, baseline, PEAK_RESERVED, rule.reserved_share, rule.reserved_bytes),
        _compare_memory(measurement, baseline, PEAK_RESIDENT, None, 0),
    ]
    comparisons = [comparison for comparison in (*memory, time) if comparison is not None]
    outcomes = [comparison.outcome for comparison in comparisons]
    order = (Outcome.REGRESSED, Outcome.NOISY, Outcome.IMPROVED, Outcome.PASS)
    outcome = next(candidate for candidate in order if candidate in outcomes)
    return Verdict(
        cell_id=measurement.cell.id,
        outcome=outcome,
        comparisons=tuple(comparisons),
        step_time_s=measurement.median(STEP_TIME),
        num_runs=len(measurement.runs),
        num_baseline_runs=len(baseline.runs),
        provisional=baseline.is_provisional,
        suspicious=suspicious,
        sensitivity=sensitivity,
        environment_changes=environment_changes(baseline, measurement.runs[-1]),
        notes=_notes(measurement),
    )


def _compare_time(measurement: Measurement, baseline: Baseline, rule: Rule) -> tuple[Comparison, float, bool]:
    """The step time's comparison, the cell's sensitivity, and whether it is suspicious."""
    levels = [stats.run_level(run.step_times_s) for run in measurement.runs]
    sd = stats.shrunk_sd(baseline.levels, prior_sd=rule.prior_sd, prior_df=rule.prior_df)
    error = stats.standard_error(sd, len(levels), len(baseline.levels))
    needed = rule.tolerance_errors * error
    tolerance = min(max(needed, rule.floor), rule.cap)
    old_level, new_level = float(np.median(baseline.levels)), float(np.median(levels))
    change = math.expm1(new_level - old_level)
    old_s, new_s = math.exp(old_level), math.exp(new_level)
    if needed > rule.cap:
        outcome = Outcome.NOISY
    elif change > tolerance and new_s - old_s > rule.least_difference_s:
        outcome = Outcome.REGRESSED
    elif change < -tolerance and old_s - new_s > rule.least_difference_s:
        outcome = Outcome.IMPROVED
    else:
        outcome = Outcome.PASS
    comparison = Comparison(
        metric=STEP_TIME,
        old=old_s,
        new=new_s,
        change=change,
        interval=stats.interval(new_level - old_level, error),
        tolerance=tolerance,
        outcome=outcome,
    )
    suspicious = outcome is not Outcome.NOISY and change > rule.suspicious_share * tolerance
    return comparison, tolerance + NINE_IN_TEN * error, suspicious


def _compare_memory(
    measurement: Measurement, baseline: Baseline, metric: Metric, share: float | None, least_bytes: int
) -> Comparison | None:
    """A peak against its baseline; None where it was not measured. `share` None: shown, not gated.

    REGRESSED when most runs exceed the limit: one run out of three may have met a passing condition. What tensors took
    repeats, so its bar is the median. What the allocator held depends on when other streams freed what they shared (two
    values 8 % apart were met in equal runs of ddp), so its bar is the largest that was recorded, and less is luck.
    """
    old, new = baseline.median(metric.name), measurement.median(metric)
    if old is None or new is None:
        return None
    outcome, tolerance = Outcome.PASS, None
    if share is not None:
        room = max(share * old, least_bytes)
        tolerance = room / old
        repeats = metric is not PEAK_RESERVED
        highest = old if repeats else max(baseline.values(metric.name))
        values = [value for value in measurement.values(metric) if value is not None]
        if 2 * sum(value > highest + room for value in values) > len(values):
            outcome = Outcome.REGRESSED
        elif repeats and 2 * sum(value < old - room for value in values) > len(values):
            outcome = Outcome.IMPROVED
    return Comparison(
        metric=metric, old=old, new=new, change=(new - old) / old, interval=None, tolerance=tolerance, outcome=outcome
    )


def environment_changes(baseline: Baseline, run: RunRecord) -> tuple[str, ...]:
    """What differs between the newest night of the baseline and now, as `name old -> new`."""
    night, environment = baseline.nights[-1], run.environment
    origin, kernels = night.origin, sorted({kernel for rank in run.ranks for kernel in rank.attention})
    pairs: dict[str, tuple[object, object]] = {
        name: (getattr(origin.software, name), getattr(environment.software, name))
        for name in ("torch", "transformers", "python", "cuda", "nccl")
    }
    pairs |= {name: (getattr(origin, name), getattr(environment, name)) for name in ("host", "cpu")}
    pairs["attention"] = (" ".join(night.attention), " ".join(kernels))
    for name in sorted(origin.variables.keys() | environment.variables.keys()):
        pairs[name] = (origin.variables.get(name, "unset"), environment.variables.get(name, "unset"))
    return tuple(f"{name} {old} -> {new}" for name, (old, new) in pairs.items() if old != new)


def _notes(measurement: Measurement) -> tuple[str, ...]:
    """What does not decide, but helps to read the decision."""
    notes = []
    outliers = sum(stats.outlier_count(run.step_times_s) for run in measurement.runs)
    if outliers:
        notes.append(f"{outliers} outlier step{'s' * (outliers > 1)} (more than 1.5 x the median)")
    # On a GPU the audit step is bound by the host, which says nothing of who waits for whom on the devices.
    late = straggler(measurement.runs[-1]) if measurement.cell.device_kind == "cpu" else None
    step_time_s = measurement.median(STEP_TIME)
    if late and step_time_s and late[1] > STRAGGLER_SHARE * step_time_s:
        notes.append(f"rank {late[0]} keeps the others waiting: {late[1] * 1e3:.0f} ms late at a collective")
    retries = sum(rank.memory.allocator_retries or 0 for run in measurement.runs for rank in run.ranks)
    if retries:
        notes.append(f"{retries} allocator retries")
    room = [gpu.total_bytes - gpu.used_bytes for gpu in measurement.runs[-1].gpus if gpu.used_bytes and gpu.total_bytes]
    if room:
        notes.append(f"{min(room) / 2**30:.1f} GiB left on the fullest GPU")
    issue_time_s = measurement.runs[-1].issue_time_s
    if issue_time_s and step_time_s and issue_time_s > HOST_SHARE * step_time_s:
        notes.append(f"the host takes {issue_time_s * 1e3:.0f} ms to issue a step: it may be what limits it")
    breaks = max(rank.compile.graph_breaks for run in measurement.runs for rank in run.ranks)
    if breaks:
        notes.append(f"{breaks} graph breaks")
    return tuple(notes)
