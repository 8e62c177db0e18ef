"""The band of a baseline ends where the verdict on a test run changes."""

import msgspec
import pytest

from perf.facts.measurement import PEAK_ALLOCATED, PEAK_RESERVED, PEAK_RESIDENT, STEP_TIME, THROUGHPUT
from perf.facts.outcome import Outcome
from perf.judge.band import band, judged_band, rule_of
from perf.judge.baseline import Store, write
from perf.judge.rule import CPU_PRIOR_SD, Rule
from perf.judge.verdict import judge
from strategies.spec import LinkProfile
from tests import factory

OF = factory.cell(size="0.6b", link=LinkProfile.NATIVE)
ENV = factory.environment(factory.H200X2)
GIB = 2**30
QUIET = ((0.4, 0.401, 0.399),) * 3
UNQUIET = ((0.4, 0.41, 0.39), (0.405, 0.395, 0.4), (0.39, 0.41, 0.4))
SHORT = ((0.004, 0.0041, 0.0039),) * 3
"""Steps so short that the least difference decides."""


def stored(nights=QUIET):
    return factory.baseline(OF, nights=nights, allocated_bytes=80 * GIB, machine=factory.H200X2)


def verdict(baseline, step_time_s, allocated_bytes=80 * GIB, reserved_bytes=None):
    measured = factory.measurement(
        OF, step_times_s=(step_time_s,) * 3, allocated_bytes=(int(allocated_bytes),) * 3, env=ENV
    )
    if reserved_bytes is not None:
        runs = [
            factory.change_ranks(
                run, memory=msgspec.structs.replace(run.ranks[0].memory, reserved_bytes=int(reserved_bytes))
            )
            for run in measured.runs
        ]
        measured = msgspec.structs.replace(measured, runs=tuple(runs))
    return judge(measured, baseline, factory.invariants(OF), Rule())


@pytest.mark.parametrize("nights", [QUIET, UNQUIET, SHORT, QUIET[:1]])
def test_the_verdict_changes_at_the_ends_of_the_band_of_the_step_time(nights):
    baseline = stored(nights)
    found = band(baseline, STEP_TIME, Rule(), 3)
    assert not found.noisy
    inch = 1e-3 * (found.high - found.middle)
    for step_time_s, outcome in (
        (found.high + inch, Outcome.REGRESSED),
        (found.high - inch, Outcome.PASS),
        (found.middle, Outcome.PASS),
        (found.low + inch, Outcome.PASS),
        (found.low - inch, Outcome.IMPROVED),
    ):
        assert verdict(baseline, step_time_s).outcome is outcome, step_time_s


def test_few_runs_have_a_wider_band():
    one, three = (band(stored(UNQUIET), STEP_TIME, Rule(), num_runs) for num_runs in (1, 3))
    assert one.high > three.high > three.middle > three.low > one.low


def test_the_verdict_changes_at_the_ends_of_the_band_of_peak_allocated():
    found = band(stored(), PEAK_ALLOCATED, Rule(), 3)
    assert found.middle == 80 * GIB
    for peak, outcome in (
        (found.high + 1024, Outcome.REGRESSED),
        (found.high - 1024, Outcome.PASS),
        (found.low + 1024, Outcome.PASS),
        (found.low - 1024, Outcome.IMPROVED),
    ):
        assert verdict(stored(), 0.4, peak, reserved_bytes=81 * GIB).outcome is outcome, peak


def test_less_reserved_is_no_improvement_so_that_its_band_has_one_end():
    found = band(stored(), PEAK_RESERVED, Rule(), 3)
    assert (found.middle, found.low) == (81 * GIB, None)
    assert verdict(stored(), 0.4, reserved_bytes=found.high + 1024).outcome is Outcome.REGRESSED
    assert verdict(stored(), 0.4, reserved_bytes=found.high - 1024).outcome is Outcome.PASS
    assert verdict(stored(), 0.4, reserved_bytes=GIB).outcome is Outcome.PASS


def test_the_band_of_throughput_is_that_of_the_step_time_turned_over():
    time, tokens = (band(stored(), metric, Rule(), 3) for metric in (STEP_TIME, THROUGHPUT))
    assert (tokens.low, tokens.middle, tokens.high) == (32_768 / time.high, 32_768 / time.middle, 32_768 / time.low)


def test_a_cell_that_is_too_noisy_is_marked():
    baseline = stored(((0.4, 0.6, 0.3), (0.5, 0.35, 0.45), (0.7, 0.4, 0.3)))
    assert band(baseline, STEP_TIME, Rule(), 3).noisy
    assert verdict(baseline, 0.8).outcome is Outcome.NOISY


def test_what_is_not_gated_or_was_not_measured_has_no_band():
    assert band(stored(), PEAK_RESIDENT, Rule(), 3) is None
    assert band(factory.baseline(), PEAK_ALLOCATED, Rule(), 3) is None
    assert band(factory.baseline(), PEAK_RESERVED, Rule(), 3) is None


@pytest.mark.parametrize("nights", [QUIET, UNQUIET, SHORT])
def test_a_recorded_verdict_gives_the_same_band(nights):
    comparisons = verdict(stored(nights), 0.41).comparisons
    found = [judged for comparison in comparisons if (judged := judged_band(comparison, Rule()))]
    assert found == [band(stored(nights), STEP_TIME, Rule(), 3)]


def test_the_rule_of_a_machine_knows_its_noise(tmp_path):
    store = Store(tmp_path)
    assert rule_of(store, factory.CPU).prior_sd == CPU_PRIOR_SD
    assert rule_of(store, factory.H200X2).prior_sd == Rule().prior_sd
    for micro_batch, label in ((1, "a"), (2, "b"), (4, "c")):
        of = msgspec.structs.replace(OF, label=label)
        write(tmp_path, factory.baseline(of, nights=UNQUIET, allocated_bytes=GIB * micro_batch, machine=factory.H200X2))
    assert 0.01 < rule_of(store, factory.H200X2).prior_sd < 0.03
