"""How often the rule calls a cell slower: simulated runs under a noise model, judged by the rule itself.

Model, in log step time, so that 0.01 is 1 %: a night moves all cells and each cell; a run is drawn around its night,
and some runs are slow as a whole; steps within a run are correlated with their neighbours, and some stall.
"""

import math
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from perf.facts.outcome import Outcome
from perf.facts.stats import trimmed_mean
from perf.judge.decision import Decision, Judge
from perf.judge.rule import RUNS_A_LOOK, Rule
from strategies.value import Value

NUM_NIGHTS = 5
NUM_STEPS = 10
STALL_SHARE, STALL_MEAN = 0.03, 0.10
STEP_CORRELATION = 0.2
SLOW_RUN = 0.03, 0.08
"""Least and most by which a slow run is slower."""
Floats = NDArray[np.float64]


class Noise(Value, frozen=True, kw_only=True):
    """Standard deviations of the log step time."""

    between_runs: float
    step: float
    cell_night: float = 0.0
    """Of one cell from night to night."""
    suite_night: float = 0.0
    """Of all cells together from night to night."""
    slow_run_share: float = 0.0
    """How many runs are slow as a whole: a throttled GPU, a busy host."""


PROFILES = {
    "quiet": Noise(between_runs=0.003, step=0.005, cell_night=0.001, suite_night=0.001, slow_run_share=0.005),
    "typical": Noise(between_runs=0.007, step=0.010, cell_night=0.002, suite_night=0.002, slow_run_share=0.01),
    "noisy": Noise(between_runs=0.015, step=0.020, cell_night=0.004, suite_night=0.003, slow_run_share=0.02),
    "drifting": Noise(between_runs=0.007, step=0.010, cell_night=0.005, suite_night=0.008, slow_run_share=0.01),
}


class Rates(Value, frozen=True, kw_only=True):
    """What became of many nights in which a cell was so much slower."""

    slowdown: float
    regressed: float
    """Share of nights in which the cell was REGRESSED."""
    environment: float
    runs: float
    """Mean number of runs, those of the reference included."""


def rates(noise: Noise, slowdown: float, rule: Rule, *, has_reference: bool, num_trials: int, seed: int = 0) -> Rates:
    """The rates of one point of the operating curve, each night against a baseline of five nights of three runs."""
    source = np.random.default_rng([seed, round(1e4 * slowdown), round(1e6 * noise.between_runs), has_reference])
    outcomes, num_runs = [], 0
    for baseline, levels, pairs in _nights(source, noise, slowdown, num_trials, rule):
        decision, took = decided(baseline, levels, pairs if has_reference else None, rule)
        outcomes.append(decision.outcome)
        num_runs += took
    return Rates(
        slowdown=slowdown,
        regressed=outcomes.count(Outcome.REGRESSED) / num_trials,
        environment=outcomes.count(Outcome.ENVIRONMENT) / num_trials,
        runs=num_runs / num_trials,
    )


def decided(
    baseline: Sequence[float], levels: Sequence[float], pairs: Sequence[tuple[float, float]] | None, rule: Rule
) -> tuple[Decision, int]:
    """What the rule decides when it is given as many of these runs and pairs as it asks for; and how many that were."""
    num_runs, num_beside = RUNS_A_LOOK, 0
    while True:
        beside = None if pairs is None else pairs[:num_beside]
        decision = Judge(levels[:num_runs], baseline, rule).in_stages(beside)
        if decision.outcome is not None:
            return decision, num_runs + 2 * num_beside
        num_runs, num_beside = num_runs + decision.more_runs, decision.pairs


def _nights(
    source: np.random.Generator, noise: Noise, slowdown: float, num_trials: int, rule: Rule
) -> Iterator[tuple[list[float], list[float], list[tuple[float, float]]]]:
    """Baseline levels, levels of fresh runs, and pairs, night after night."""
    most_runs, most_pairs = RUNS_A_LOOK * rule.most_looks, max(rule.pairs, rule.noisy_pairs)
    recorded = [_levels(source, noise, (num_trials, RUNS_A_LOOK)) for _ in range(NUM_NIGHTS)]
    baselines = np.concatenate(recorded, axis=1)
    tonight = _night(source, noise, num_trials)
    fresh = _levels(source, noise, (num_trials, most_runs + most_pairs), night=tonight, slowdown=slowdown)
    beside = _levels(source, noise, (num_trials, most_pairs), night=tonight)
    for baseline, levels, reference in zip(baselines, fresh, beside, strict=True):
        pairs = list(zip(reference.tolist(), levels[most_runs:].tolist(), strict=True))
        yield baseline.tolist(), levels[:most_runs].tolist(), pairs


def _night(source: np.random.Generator, noise: Noise, num_trials: int) -> Floats:
    return source.normal(0, noise.suite_night, num_trials) + source.normal(0, noise.cell_night, num_trials)


def _levels(
    source: np.random.Generator,
    noise: Noise,
    shape: tuple[int, int],
    *,
    night: Floats | None = None,
    slowdown: float = 0.0,
) -> Floats:
    """[trials, runs]: levels of runs; each trial is a night of its own."""
    night = _night(source, noise, shape[0]) if night is None else night
    run = source.normal(0, noise.between_runs, shape)
    run += (source.random(shape) < noise.slow_run_share) * np.log1p(source.uniform(*SLOW_RUN, shape))
    white = source.normal(0, noise.step, (*shape, NUM_STEPS))
    steps = white.copy()
    for step in range(1, NUM_STEPS):
        fresh = math.sqrt(1 - STEP_CORRELATION**2) * white[..., step]
        steps[..., step] = STEP_CORRELATION * steps[..., step - 1] + fresh
    steps += (source.random(steps.shape) < STALL_SHARE) * np.log1p(source.exponential(STALL_MEAN, steps.shape))
    levels: Floats = np.log(trimmed_mean(np.exp(steps))) + run + night[:, None] + math.log1p(slowdown)
    return levels
