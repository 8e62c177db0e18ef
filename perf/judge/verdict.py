"""The verdict on one cell: right, valid, memory, throughput, in this order; a pure function of values."""

import math
from collections.abc import Sequence
from typing import ClassVar

from perf.facts import stats
from perf.facts.measurement import (
    PEAK_ALLOCATED,
    PEAK_RESERVED,
    PEAK_RESIDENT,
    STEP_TIME,
    Measurement,
    Metric,
    disturbances,
    gaps,
    is_host_bound,
    straggler,
)
from perf.facts.outcome import FAILURES, Outcome
from perf.facts.record import RunRecord
from perf.judge.baseline import Baseline, Invariants
from perf.judge.correctness import differences, intrinsic_errors
from perf.judge.decision import Decision, Judge, Look, Pair, noise_reasons
from perf.judge.rule import Rule
from strategies.value import Value

STRAGGLER_SHARE = 0.2
"""A rank this share of a step late at a collective is named."""


ORDER = (
    Outcome.REGRESSED,
    Outcome.NOT_RUN,
    Outcome.ENVIRONMENT,
    Outcome.NOISY,
    Outcome.IMPROVED,
    Outcome.PASS,
)
"""Of the metrics of a cell, what comes first is said of the whole."""


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
    num_pairs: int = 0
    """Runs that had a run of the reference build beside them."""
    provisional: bool = False
    suspicious: bool = False
    """At the first look."""
    looks: tuple[Look, ...] = ()
    more_runs: int = 0
    """Missing for a decision: so many fresh runs, or"""
    wanted_pairs: int = 0
    """so many pairs; 0: decided."""
    sensitivity: float | None = None
    """Smallest slowdown that this comparison finds nine times out of ten."""
    environment_changes: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def is_failure(self) -> bool:
        return self.outcome in FAILURES


class Course(Value, frozen=True, kw_only=True):
    """How a cell is judged when more can be measured than its first runs."""

    runs_a_look: int
    reference: Measurement | None = None
    """Of a reference build, each run beside the candidate's of the same index; none yet: they can be made."""
    shift: float = 0.0
    """Log change of the whole suite, which is the machine's."""


def judge(
    measurement: Measurement,
    baseline: Baseline | None,
    invariants: Invariants | None,
    rule: Rule,
    course: Course | None = None,
) -> Verdict:
    """The verdict. The order of the gates decides what is said: a later gate never hides an earlier one.

    Without a course, by one look at the runs there are. With one, a suspicious cell may be undecided: the verdict is
    then NOT_RUN, and says how much more has to be measured.
    """

    def say(outcome: Outcome, reasons: list[str]) -> Verdict:
        return Verdict(
            cell_id=measurement.cell.id,
            outcome=outcome,
            reasons=tuple(reasons),
            step_time_s=measurement.median(STEP_TIME),
            num_runs=len(measurement.runs),
            notes=notes_of(measurement) if outcome is Outcome.NO_BASELINE else (),
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
        lacking = "no recorded invariants"
        if baseline is None:
            lacking = "no timing baseline for this machine; python -m tools.approve makes one"
        return say(Outcome.NO_BASELINE, [lacking])
    return _compare(measurement, baseline, rule, course)


def _compare(measurement: Measurement, baseline: Baseline, rule: Rule, course: Course | None) -> Verdict:
    """Memory, then throughput, against a baseline of the same recipe."""
    decision, outcome_of_time = _decide(measurement, baseline, rule, course)
    comparisons = (*memory_comparisons(measurement, baseline, rule), time_comparison(decision, outcome_of_time))
    outcome = most_urgent(comparisons)
    undecided = outcome is Outcome.NOT_RUN
    reference = course.reference if course else None
    reasons = [f"suspicious after {decision.looks[-1].num_runs} runs, not looked at again yet"] if undecided else []
    reasons += noise_reasons(decision, outcome, rule)
    return Verdict(
        cell_id=measurement.cell.id,
        outcome=outcome,
        reasons=tuple(reasons),
        comparisons=comparisons,
        step_time_s=measurement.median(STEP_TIME),
        num_runs=len(measurement.runs),
        num_baseline_runs=len(baseline.runs),
        num_pairs=len(reference.runs) if reference else 0,
        provisional=baseline.is_provisional,
        suspicious=decision.suspicious,
        looks=decision.looks,
        more_runs=decision.more_runs if undecided else 0,
        wanted_pairs=decision.pairs if undecided else 0,
        sensitivity=decision.sensitivity,
        environment_changes=environment_changes(baseline, measurement.runs[-1]),
        notes=notes_of(measurement),
    )


def _decide(
    measurement: Measurement, baseline: Baseline, rule: Rule, course: Course | None
) -> tuple[Decision, Outcome]:
    """On the step time, and what that means: what only the whole suite's shift explains is the machine's."""
    pairs, levels = split(measurement, course.reference if course else None)
    if course is None:
        decision = Judge(levels, baseline.levels, rule).once()
        assert decision.outcome is not None
        return decision, decision.outcome
    staged = Judge(levels, baseline.levels, rule, runs_a_look=course.runs_a_look, shift=course.shift)
    decision = staged.in_stages(None if course.reference is None else pairs)
    outcome = decision.outcome or Outcome.NOT_RUN
    if course.shift and outcome in (Outcome.PASS, Outcome.IMPROVED):
        alone = Judge(levels[: course.runs_a_look], baseline.levels, rule).once()
        outcome = Outcome.ENVIRONMENT if alone.suspicious else outcome
    return decision, outcome


def split(measurement: Measurement, reference: Measurement | None) -> tuple[list[Pair], list[float]]:
    """The pairs of levels, reference and candidate, and the levels of the candidate's runs that have no such run."""
    beside = {run.index: stats.run_level(run.step_times_s) for run in (reference.runs if reference else ())}
    own = {run.index: stats.run_level(run.step_times_s) for run in measurement.runs}
    pairs = [(beside[index], level) for index, level in own.items() if index in beside]
    return pairs, [level for index, level in own.items() if index not in beside]


def most_urgent(comparisons: Sequence[Comparison]) -> Outcome:
    """What is said of a cell whose metrics came out like this."""
    outcomes = {comparison.outcome for comparison in comparisons}
    return next(outcome for outcome in ORDER if outcome in outcomes)


def time_comparison(decision: Decision, outcome: Outcome) -> Comparison:
    """The decision on the step time, as one row beside the other metrics."""
    return Comparison(
        metric=STEP_TIME,
        old=math.exp(decision.old_level),
        new=math.exp(decision.new_level),
        change=decision.change,
        interval=stats.interval(decision.new_level - decision.old_level, decision.standard_error),
        tolerance=decision.tolerance,
        outcome=outcome,
    )


def memory_comparisons(measurement: Measurement, baseline: Baseline, rule: Rule) -> tuple[Comparison, ...]:
    """Of every peak that was measured."""
    rows = (
        _compare_memory(measurement, baseline, PEAK_ALLOCATED, rule.memory_share, rule.memory_bytes),
        _compare_memory(measurement, baseline, PEAK_RESERVED, rule.reserved_share, rule.reserved_bytes),
        _compare_memory(measurement, baseline, PEAK_RESIDENT, None, 0),
    )
    return tuple(row for row in rows if row is not None)


def _compare_memory(
    measurement: Measurement, baseline: Baseline, metric: Metric, share: float | None, least_bytes: int
) -> Comparison | None:
    """A peak against its baseline; None where it was not measured. `share` None: shown, not gated.

    REGRESSED when most runs exceed the limit: one run out of three may have met a passing condition. What tensors took
    repeats, so its bar is the median. What the allocator held depends on when other streams freed what they shared (two
    values 8 % apart were met in equal runs of ddp, one of them in all runs of a night), so its bar is the largest that
    was recorded, the room above it wider, and less is luck.
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


def notes_of(measurement: Measurement) -> tuple[str, ...]:
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
    if issue_time_s and is_host_bound(measurement):
        notes.append(f"the host takes {issue_time_s * 1e3:.0f} ms to issue a step: it may be what limits it")
    breaks = max(rank.compile.graph_breaks for run in measurement.runs for rank in run.ranks)
    if breaks:
        notes.append(f"{breaks} graph breaks")
    return tuple(notes)
