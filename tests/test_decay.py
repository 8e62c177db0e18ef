"""Decay within a run: a slowdown is found where it is, and steps that resemble their neighbours are not called one."""

import math

import msgspec
import numpy as np
import pytest

from perf.facts.measurement import measure
from perf.tell.conditions import decay_table
from perf.tell.decay import BLOCKS, LEAST_STEPS, decay
from tests import factory

SEEDS = range(200)


def run_of(times_s, index=0):
    return factory.run_record(index=index, step_times_s=tuple(float(time_s) for time_s in times_s))


def noisy(num_steps, seed, *, noise=0.02, memory=0.0):
    """Around 0.1 s; each step's noise holds a share `memory` of the step's before."""
    fresh = np.random.default_rng(seed).standard_normal(num_steps + 100)
    found = np.zeros(num_steps + 100)
    for step in range(1, len(found)):
        found[step] = memory * found[step - 1] + math.sqrt(1 - memory**2) * fresh[step]
    return 0.1 * (1 + noise * found[100:])


def test_the_last_third_stands_against_the_first():
    found = decay(run_of([0.1] * 30 + [0.5] * 30 + [0.12] * 30))
    assert (found.num_steps, found.first_s, found.last_s) == (90, 0.1, 0.12)
    assert found.change == pytest.approx(0.2)
    assert found.bound == 0.01
    assert found.slower


def test_the_middle_takes_what_three_does_not_divide():
    found = decay(run_of([0.1] * 21 + [0.5] * 20 + [0.12] * 21))
    assert (found.first_s, found.last_s, found.bound) == (0.1, 0.12, 0.01)


@pytest.mark.parametrize(("last_s", "slower"), [(0.1009, False), (0.1011, True), (0.05, False)])
def test_less_than_1_percent_is_no_decay_and_neither_is_getting_faster(last_s, slower):
    assert decay(run_of([0.1] * 20 + [0.1] * 20 + [last_s] * 20)).slower is slower


def test_a_slow_climb_of_5_percent_is_found_in_noise_of_2():
    slope = np.linspace(1, 1.05, 300)
    assert sum(decay(run_of(noisy(300, seed) * slope)).slower for seed in SEEDS) >= 0.95 * len(SEEDS)


@pytest.mark.parametrize(("num_steps", "memory"), [(60, 0.0), (300, 0.0), (300, 0.5), (300, 0.9)])
def test_undisturbed_runs_are_called_slower_in_at_most_one_of_twenty(num_steps, memory):
    found = [decay(run_of(noisy(num_steps, seed, memory=memory))).slower for seed in SEEDS]
    assert sum(found) <= len(SEEDS) / 20


def test_the_bound_is_three_standard_errors_of_the_blocks():
    levels = [0.10, 0.11, 0.12, 0.13, 0.14]
    first = [level for level in levels for _ in range(4)]
    found = decay(run_of(first + [0.1] * 20 + [0.12] * 20))
    assert found.bound == pytest.approx(3 * math.sqrt(0.00025 / BLOCKS) / 0.12)
    assert not decay(run_of(first + [0.1] * 20 + [0.14] * 20)).slower
    assert decay(run_of(first + [0.1] * 20 + [0.15] * 20)).slower


def test_the_slowest_rank_decides():
    run = factory.change_ranks(run_of([0.1] * 60), 1, step_times_s=(0.1,) * 40 + (0.2,) * 20)
    assert decay(run).last_s == 0.2


def test_short_and_damaged_runs_tell_nothing():
    assert decay(run_of([0.1] * LEAST_STEPS)) is not None
    assert decay(run_of([0.1] * (LEAST_STEPS - 1))) is None
    assert decay(factory.change_ranks(run_of([0.1] * 90), 1, step_times_s=(0.1,) * 60)) is None
    assert decay(run_of([0.1] * 59 + [math.inf])) is None
    assert decay(run_of([0.0] * 60)) is None
    assert decay(msgspec.structs.replace(run_of([0.1] * 60), ranks=())) is None


def test_the_table_counts_the_runs_that_slowed_down():
    runs = [run_of([0.1] * 60), run_of([0.1] * 40 + [0.15] * 20, 1), run_of([0.1] * 10, 2)]
    of = runs[0].cell
    ((name, *told),) = decay_table([measure(of, factory.PLAN, runs)]).rows
    assert name == of.id
    assert told == ["60", "100.0 ms", "125.0 ms", "+0.0 %, +50.0 %", "1.0 %, 1.0 %", "1 of 2 runs"]
    assert decay_table([factory.measurement()]).rows == ()
