"""Statistics of runs: numbers in, numbers out.

The unit of evidence is the run (a fresh process group): one number, the log of its step time. Steps of one run share
its luck, and a test over steps would take ten of them for ten independent witnesses.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

MEDIAN_EFFICIENCY = 1.25
"""sd of a median / sd of a mean, for normal samples."""
WINSOR_MADS = 3.0
MAD_TO_SD = 1.4826


def trimmed_mean(values: ArrayLike) -> NDArray[np.float64]:
    """Along the last axis, without the smallest and the largest tenth: at least one of each, where there are three.

    A GPU at its power limit swings around it, and its step times with it: sorted, they lie thick at both ends of the
    swing and thin in its middle, where a median would stand on one or two of them. The mean counts whole swings; what
    is cut off keeps a stall from carrying it away (Tukey, A survey of sampling from contaminated distributions, 1960).
    """
    ordered = np.sort(np.asarray(values, dtype=float), axis=-1)
    num_values = ordered.shape[-1]
    num_cut = max(1, num_values // 10) if num_values >= 3 else 0
    kept: NDArray[np.float64] = ordered[..., num_cut : num_values - num_cut]
    return np.asarray(kept.mean(axis=-1))


def step_time_s(step_times_s: Sequence[float]) -> float:
    """What a step of one run takes, in seconds."""
    return float(trimmed_mean(step_times_s))


def run_level(step_times_s: Sequence[float]) -> float:
    """Log of the step time of one run."""
    return math.log(step_time_s(step_times_s))


def robust_sd(levels: Sequence[float]) -> float:
    """Standard deviation after pulling in what lies over 3 scaled MADs off the median; 0 for fewer than two values."""
    if len(levels) < 2:
        return 0.0
    values = np.asarray(levels, dtype=float)
    median = np.median(values)
    reach = WINSOR_MADS * MAD_TO_SD * float(np.median(np.abs(values - median)))
    return float(np.clip(values, median - reach, median + reach).std(ddof=1))


def shrunk_sd(levels: Sequence[float], *, prior_sd: float, prior_df: float) -> float:
    """Between-run sd of a cell, shrunk towards a prior that counts as `prior_df` degrees of freedom."""
    df = max(len(levels) - 1, 0)
    variance = (prior_df * prior_sd**2 + df * robust_sd(levels) ** 2) / (prior_df + df)
    return math.sqrt(variance)


def standard_error(sd: float, num_runs: int, num_baseline_runs: int) -> float:
    """Of the difference between the medians of so many runs of the same between-run sd."""
    return MEDIAN_EFFICIENCY * sd * math.sqrt(1 / num_runs + 1 / num_baseline_runs)


def interval(difference: float, standard_error: float) -> tuple[float, float]:
    """95 % interval of a change, as fractions, from a difference of log levels."""
    return math.expm1(difference - 1.96 * standard_error), math.expm1(difference + 1.96 * standard_error)


def outlier_count(step_times_s: Sequence[float]) -> int:
    """Steps longer than 1.5 times the median. One in ten does not move the step time, two do; they are shown."""
    return sum(time > 1.5 * float(np.median(step_times_s)) for time in step_times_s)
