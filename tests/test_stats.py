"""Room perf/facts/stats.py: every statistic against an independent computation."""

import json
import math
import statistics
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from perf.facts import stats

steady = settings(deadline=None, derandomize=True)
levels = st.lists(st.floats(-5, 5), min_size=2, max_size=20)
times = st.lists(st.floats(1e-4, 100), min_size=1, max_size=30)
SWINGING = json.loads((Path(__file__).parent / "data/swinging_steps.json").read_text(encoding="utf-8"))


@steady
@given(times)
def test_step_time_is_the_mean_without_a_tenth_at_each_end(step_times_s):
    num_cut = math.floor(max(1.0, 0.1 * len(step_times_s))) if len(step_times_s) > 2 else 0
    expected = scipy.stats.trim_mean(step_times_s, (num_cut + 0.5) / len(step_times_s) if num_cut else 0.0)
    assert stats.step_time_s(step_times_s) == pytest.approx(expected)
    assert stats.run_level(step_times_s) == pytest.approx(math.log(expected))


@steady
@given(times, st.floats(0.1, 10))
def test_run_levels_differ_by_the_log_of_the_ratio(step_times_s, factor):
    longer = [factor * time for time in step_times_s]
    assert stats.run_level(longer) - stats.run_level(step_times_s) == pytest.approx(math.log(factor), abs=1e-9)


def test_one_stall_in_ten_steps_does_not_move_a_step_time():
    steady = [0.1] * 10
    assert stats.step_time_s([*steady[1:], 5.0]) == stats.step_time_s([*steady[1:], 0.11]) == pytest.approx(0.1)
    assert stats.step_time_s([*steady[2:], 5.0, 5.0]) > 0.7


@pytest.mark.parametrize("cell_id", SWINGING)
def test_step_time_of_a_gpu_at_its_power_limit_is_steadier_than_its_median(cell_id):
    """Forty runs of ten steps on two H200s; the same of the first ten of seven runs of sixty."""
    recorded = SWINGING[cell_id]
    for runs in (recorded["ten_steps_ms"], [run[:10] for run in recorded["sixty_steps_ms"]]):
        by_mean = statistics.stdev(stats.run_level(run) for run in runs)
        by_median = statistics.stdev(math.log(statistics.median(run)) for run in runs)
        assert by_mean < 0.75 * by_median


def winsorised_sd(values: list[float]) -> float:
    """By hand: what lies more than 3 scaled MADs off the median is pulled in, then the sample sd."""
    median = statistics.median(values)
    reach = 3 * scipy.stats.median_abs_deviation(values, scale=1 / 1.4826)
    return statistics.stdev(min(max(value, median - reach), median + reach) for value in values)


@steady
@given(levels)
def test_robust_sd_is_the_winsorised_sd(values):
    assert stats.robust_sd(values) == pytest.approx(winsorised_sd(values), abs=1e-9)


def test_robust_sd_is_the_plain_sd_where_nothing_lies_far_off():
    values = [1.0, 1.1, 0.9, 1.05, 0.95]
    assert stats.robust_sd(values) == pytest.approx(statistics.stdev(values))


def test_one_outlier_cannot_carry_robust_sd_away():
    values = [0.0, 0.01, -0.01, 0.005, -0.005, 0.0, 0.008, -0.008]
    assert statistics.stdev([*values, 10.0]) > 3
    assert stats.robust_sd([*values, 10.0]) < 3 * stats.robust_sd(values)


@steady
@given(levels, st.floats(-3, 3), st.floats(0.1, 10))
def test_robust_sd_ignores_shifts_and_scales_with_the_values(values, shift, scale):
    moved = [scale * value + shift for value in values]
    assert stats.robust_sd(moved) == pytest.approx(scale * stats.robust_sd(values), rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("values", [[], [1.0]])
def test_robust_sd_of_too_few_values_is_0(values):
    assert stats.robust_sd(values) == 0.0


@steady
@given(levels, st.floats(0, 1), st.floats(0.5, 20))
def test_shrunk_variance_is_the_mean_weighted_by_degrees_of_freedom(values, prior_sd, prior_df):
    shrunk = stats.shrunk_sd(values, prior_sd=prior_sd, prior_df=prior_df)
    own = winsorised_sd(values)
    expected = np.average([prior_sd**2, own**2], weights=[prior_df, len(values) - 1])
    assert shrunk**2 == pytest.approx(float(expected), rel=1e-6, abs=1e-12)
    assert min(prior_sd, own) - 1e-9 <= shrunk <= max(prior_sd, own) + 1e-9


@pytest.mark.parametrize("values", [[], [0.3]])
def test_shrunk_sd_of_too_few_values_is_the_prior(values):
    assert stats.shrunk_sd(values, prior_sd=0.008, prior_df=6.0) == pytest.approx(0.008)


def test_shrunk_sd_by_hand():
    assert stats.shrunk_sd([0.0, 0.02, 0.01], prior_sd=0.02, prior_df=2.0) == pytest.approx(
        math.sqrt((8e-4 + 2e-4) / 4)
    )


@pytest.mark.parametrize(
    ("num_runs", "num_baseline_runs", "expected"),
    [(1, 1, 0.01 * 1.25 * math.sqrt(2)), (3, 15, 0.01 * 1.25 * math.sqrt(0.4)), (3, 9, 0.01 * 1.25 * 2 / 3)],
)
def test_standard_error_by_hand(num_runs, num_baseline_runs, expected):
    assert stats.standard_error(0.01, num_runs, num_baseline_runs) == pytest.approx(expected)


def test_standard_error_is_that_of_simulated_differences_of_medians():
    samples = np.random.default_rng(0).normal(0, 0.01, size=(20_000, 24))
    differences = np.median(samples[:, :9], axis=1) - np.median(samples[:, 9:], axis=1)
    assert stats.standard_error(0.01, 9, 15) == pytest.approx(float(differences.std()), rel=0.05)


@steady
@given(st.floats(-0.5, 0.5), st.floats(1e-4, 0.1))
def test_interval_is_the_central_95_percent_of_a_normal_difference(difference, error):
    low, high = stats.interval(difference, error)
    normal = scipy.stats.norm.interval(0.95, loc=difference, scale=error)
    assert (low, high) == pytest.approx((math.exp(normal[0]) - 1, math.exp(normal[1]) - 1), abs=1e-5)
    assert low < math.expm1(difference) < high


@pytest.mark.parametrize(
    ("step_times_s", "count"),
    [
        ((1.0,) * 10, 0),
        ((1.0,) * 9 + (12.0,), 1),
        ((1.0,) * 9 + (1.5,), 0),
        ((1.0, 1.0, 1.0, 2.0, 3.0), 2),
        ((5.0,), 0),
    ],
)
def test_outliers_are_longer_than_one_and_a_half_medians(step_times_s, count):
    assert stats.outlier_count(step_times_s) == count
