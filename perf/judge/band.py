"""The band of a baseline: its median and how far a test run may be off, as `perf.judge.verdict` judges."""

import math

import numpy as np

from perf.facts.hardware import Machine
from perf.facts.measurement import PEAK_ALLOCATED, PEAK_RESERVED, STEP_TIME, THROUGHPUT, Metric
from perf.facts.outcome import Outcome
from perf.judge.baseline import Baseline, Store
from perf.judge.rule import Rule, prior_sd
from perf.judge.verdict import Comparison
from strategies.value import Value


class Band(Value, frozen=True, kw_only=True):
    """In the metric's base unit."""

    middle: float
    """The baseline's median."""
    low: float | None
    """Beyond it a test run is better than the baseline; None where less is no improvement."""
    high: float
    """Beyond it a test run regressed. Of throughput, `low` is this side."""
    noisy: bool = False
    """The cell needs a wider band than the rule allows: it is not gated on time."""


def band(baseline: Baseline, metric: Metric, rule: Rule, num_runs: int) -> Band | None:
    """The band for a test run of `num_runs` runs; None for a metric that is not gated or was not measured.

    A verdict is about the step time: of throughput, this is its band turned over.
    """
    if metric in (STEP_TIME, THROUGHPUT):
        of = rule.sd_of(baseline.levels), num_runs, len(baseline.levels)
        old_s = math.exp(float(np.median(baseline.levels)))
        found = _of_time(old_s, rule.tolerance(*of), rule, noisy=rule.needed(*of) > rule.cap)
        return found if metric is STEP_TIME else _turned(found, baseline.recipe.workload.tokens_per_step)
    if metric is PEAK_ALLOCATED and (old := baseline.median(metric.name)) is not None:
        room = max(rule.memory_share * old, rule.memory_bytes)
        return Band(middle=old, low=old - room, high=old + room)
    if metric is PEAK_RESERVED and (old := baseline.median(metric.name)) is not None:
        room = max(rule.reserved_share * old, rule.reserved_bytes)
        return Band(middle=old, low=None, high=max(baseline.values(metric.name)) + room)
    return None


def judged_band(comparison: Comparison, rule: Rule) -> Band | None:
    """The band that a test run's verdict was judged by; of the step time alone."""
    if comparison.metric != STEP_TIME or comparison.tolerance is None:
        return None
    return _of_time(comparison.old, comparison.tolerance, rule, noisy=comparison.outcome is Outcome.NOISY)


def rule_of(store: Store, machine: Machine) -> Rule:
    """The numbers of the decision on a machine, with its typical noise as the prior."""
    return Rule(prior_sd=prior_sd(store, machine))


def _of_time(old_s: float, tolerance: float, rule: Rule, *, noisy: bool) -> Band:
    """A call needs a difference beyond the tolerance and beyond the least one."""
    room_s = max(tolerance * old_s, rule.least_difference_s)
    return Band(middle=old_s, low=old_s - room_s, high=old_s + room_s, noisy=noisy)


def _turned(time: Band, tokens_per_step: int) -> Band:
    assert time.low is not None
    fastest = tokens_per_step / time.low if time.low > 0 else math.inf
    return Band(middle=tokens_per_step / time.middle, low=tokens_per_step / time.high, high=fastest, noisy=time.noisy)
