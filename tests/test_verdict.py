"""Room perf/judge/verdict.py: the order of the gates, each outcome, inclusive limits, and what is said beside it."""

import itertools
import math

import msgspec
import pytest

from perf.facts.measurement import measure
from perf.facts.outcome import Outcome
from perf.judge.rule import Rule
from perf.judge.verdict import judge
from strategies.spec import LinkProfile
from tests.factory import PLAN, baseline, cell, change_ranks, invariants, measurement, run_record

RULE = Rule()
QUIET = Rule(prior_sd=0.0)
"""No prior: equal baseline runs leave the tolerance at its floor."""
GIB, MIB = 2**30, 2**20
CELL, GPU_CELL = cell(), cell(link=LinkProfile.NATIVE)
GPU_RIGHT = invariants(GPU_CELL)
NIGHTS = ((0.1,) * 3,) * 3


def timed(new_s, *, nights=NIGHTS, rule=RULE):
    """The verdict on three runs of these step times (or of this one) against nights of 0.1 s."""
    times = new_s if isinstance(new_s, tuple) else (new_s,) * 3
    return judge(measurement(step_times_s=times), baseline(nights=nights), invariants(), rule)


def sized(new_bytes, *, old=10 * GIB, rule=RULE, step_s=0.1):
    """The verdict on three runs of these peaks (or of this one) against `old`."""
    peaks = new_bytes if isinstance(new_bytes, tuple) else (new_bytes,) * 3
    of_runs = measurement(GPU_CELL, allocated_bytes=peaks, step_times_s=(step_s,) * 3)
    return judge(of_runs, baseline(GPU_CELL, nights=NIGHTS, allocated_bytes=old), GPU_RIGHT, rule)


def changed(**changes):
    return measure(CELL, PLAN, [change_ranks(run_record(index=index), **changes) for index in range(3)])


def compared(verdict, name):
    return next(c for c in verdict.comparisons if c.metric.name == name)


OTHER_RECIPE = cell(micro_batch=4)
TWO_RUNS = measure(CELL, PLAN, [run_record(), run_record(index=1)])
NAN = changed(losses=(3.0,) * 4 + (None,) * 11)
LEDGERLESS = changed(ledger=())

REACHED = {
    "PASS": (measurement(), baseline(nights=NIGHTS), invariants(), Outcome.PASS),
    "IMPROVED": (measurement(step_times_s=(0.05,) * 3), baseline(nights=NIGHTS), invariants(), Outcome.IMPROVED),
    "REGRESSED": (measurement(step_times_s=(0.2,) * 3), baseline(nights=NIGHTS), invariants(), Outcome.REGRESSED),
    "NOISY": (measurement(), baseline(nights=((0.05, 0.1, 0.2),) * 3), invariants(), Outcome.NOISY),
    "NO_BASELINE": (measurement(), None, None, Outcome.NO_BASELINE),
    "WRONG by itself": (NAN, None, None, Outcome.WRONG),
    "WRONG against the record": (LEDGERLESS, None, invariants(), Outcome.WRONG),
    "INVALID": (TWO_RUNS, None, None, Outcome.INVALID),
}


@pytest.mark.parametrize("case", REACHED)
def test_each_outcome_of_the_judge_is_reached(case):
    of_runs, stored, recorded, outcome = REACHED[case]
    verdict = judge(of_runs, stored, recorded, RULE)
    assert verdict.outcome is outcome
    assert verdict.cell_id == CELL.id
    assert verdict.num_runs == len(of_runs.runs)
    assert verdict.reasons or verdict.comparisons


def test_only_failures_fail():
    assert {name for name, case in REACHED.items() if judge(*case[:3], RULE).is_failure} == {
        "REGRESSED",
        "WRONG by itself",
        "WRONG against the record",
    }


SLOW = baseline(nights=((0.01,) * 3,) * 3)
WORSE = {
    "wrong numbers before a missing run": (
        measure(CELL, PLAN, NAN.runs[:2]), SLOW, invariants(), Outcome.WRONG, "not finite"
    ),
    "a missing run before another recipe": (
        TWO_RUNS, baseline(OTHER_RECIPE), invariants(), Outcome.INVALID, "2 of 3 runs"
    ),
    "another recipe of the invariants before their values": (
        LEDGERLESS, SLOW, invariants(OTHER_RECIPE), Outcome.NO_BASELINE,
        "invariants were recorded with another recipe"
    ),
    "another recipe of the baseline before its values": (
        measurement(), baseline(OTHER_RECIPE), invariants(), Outcome.NO_BASELINE,
        "baseline was recorded with another recipe: micro_batch: 4 -> 2"
    ),
    "recorded values before the speed": (LEDGERLESS, SLOW, invariants(), Outcome.WRONG, "all_reduce"),
    "recorded values before the missing baseline": (LEDGERLESS, None, invariants(), Outcome.WRONG, "all_reduce"),
    "a missing baseline": (measurement(), None, invariants(), Outcome.NO_BASELINE, "no timing baseline for"),
    "missing invariants": (measurement(), baseline(), None, Outcome.NO_BASELINE, "no recorded invariants"),
    "a missing rank is a gap": (
        measure(CELL, PLAN, [msgspec.structs.replace(run, ranks=run.ranks[:1]) for run in measurement().runs]),
        None, None, Outcome.INVALID, "records of ranks [0]"
    ),
    "losses missing on one rank are a gap": (
        measure(CELL, PLAN, [change_ranks(run, 1, losses=()) for run in measurement().runs]),
        SLOW, invariants(), Outcome.INVALID, "rank 1 has losses of 0 of 15 steps"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WORSE)
def test_earlier_gate_speaks_first(case):
    of_runs, stored, recorded, outcome, text = WORSE[case]
    verdict = judge(of_runs, stored, recorded, RULE)
    assert verdict.outcome is outcome
    assert text in verdict.reasons[0]
    assert verdict.comparisons == ()


@pytest.mark.parametrize(
    ("at_limit_s", "beyond_s", "beyond"),
    [(1.05, 1.0501, "REGRESSED"), (0.95, 0.9499, "IMPROVED"), (1.05, 1.05 + 1e-7, "REGRESSED")],
)
def test_tolerance_of_5_percent_exactly_met_passes_and_just_above_does_not(at_limit_s, beyond_s, beyond):
    rule, nights = Rule(prior_sd=0, floor=0.05), ((1.0,) * 3,) * 3
    assert timed(at_limit_s, nights=nights, rule=rule).outcome == "PASS"
    assert timed(beyond_s, nights=nights, rule=rule).outcome == beyond


@pytest.mark.parametrize(("change", "outcome"), [(0.0249, "PASS"), (0.0251, "REGRESSED"), (-0.0251, "IMPROVED")])
def test_tolerance_of_9_quiet_baseline_runs_is_the_floor(change, outcome):
    verdict = timed(0.1 * (1 + change))
    assert verdict.outcome == outcome
    time = compared(verdict, "step_time_s")
    assert (time.change, time.tolerance) == (pytest.approx(change), 0.025)
    assert time.interval[0] < time.change < time.interval[1]


@pytest.mark.parametrize(
    ("new_s", "outcome"), [(0.0109, "PASS"), (0.0111, "REGRESSED"), (0.0091, "PASS"), (0.0089, "IMPROVED")]
)
def test_tiny_step_needs_a_millisecond_too(new_s, outcome):
    assert timed(new_s, nights=((0.01,) * 3,) * 3, rule=QUIET).outcome == outcome


@pytest.mark.parametrize("least_s", [0.0009, 0.0011])
def test_least_difference_is_the_rules(least_s):
    rule = Rule(prior_sd=0.0, least_difference_s=least_s)
    verdict = timed(0.011, nights=((0.01,) * 3,) * 3, rule=rule)
    assert verdict.outcome is (Outcome.REGRESSED if least_s < 0.001 else Outcome.PASS)


@pytest.mark.parametrize(("share", "suspicious"), [(0.59, False), (0.61, True), (2.0, True), (-2.0, False)])
def test_suspicious_is_what_is_slower_than_6_tenths_of_the_tolerance(share, suspicious):
    assert timed(0.1 * (1 + share * 0.025), rule=QUIET).suspicious is suspicious


def test_one_slow_run_of_three_does_not_decide():
    assert timed((0.1, 0.1, 0.5)).outcome is Outcome.PASS
    assert timed((0.1, 0.5, 0.5)).outcome is Outcome.REGRESSED


def test_noisy_cell_is_not_called_slow_but_its_memory_still_counts():
    nights = ((0.05, 0.1, 0.2),) * 3
    verdict = timed(0.3, nights=nights)
    assert (verdict.outcome, verdict.suspicious) == (Outcome.NOISY, False)
    of_runs = measurement(GPU_CELL, allocated_bytes=(20 * GIB,) * 3)
    stored = baseline(GPU_CELL, nights=nights, allocated_bytes=10 * GIB)
    assert judge(of_runs, stored, GPU_RIGHT, RULE).outcome is Outcome.REGRESSED


@pytest.mark.parametrize(("nights", "provisional"), [(NIGHTS[:1], True), (NIGHTS, False)])
def test_provisional_baseline_gates_and_says_so(nights, provisional):
    for new_s, outcome in ((0.1, Outcome.PASS), (0.2, Outcome.REGRESSED)):
        verdict = timed(new_s, nights=nights)
        assert (verdict.outcome, verdict.provisional) == (outcome, provisional)
        assert verdict.num_baseline_runs == 3 * len(nights)


def test_fewer_baseline_runs_widen_the_tolerance():
    verdicts = [timed(0.1, nights=nights, rule=Rule(floor=0)) for nights in (NIGHTS[:1], NIGHTS)]
    few, many = (compared(verdict, "step_time_s").tolerance for verdict in verdicts)
    assert few == pytest.approx(3 * 1.25 * 0.008 * math.sqrt(6 / 8) * math.sqrt(2 / 3))
    assert many == pytest.approx(3 * 1.25 * 0.008 * math.sqrt(6 / 14) * math.sqrt(1 / 3 + 1 / 9))


def test_other_attention_kernel_than_the_baselines_is_told():
    verdict = judge(changed(attention=("cudnn_attention",)), baseline(nights=NIGHTS), invariants(), RULE)
    assert verdict.outcome is Outcome.PASS
    assert verdict.environment_changes == ("attention flash_attention -> cudnn_attention",)


@pytest.mark.parametrize(("issue_time_s", "is_told"), [(0.098, True), (0.096, False), (None, False)])
def test_host_that_hardly_issues_the_step_in_time_is_told(issue_time_s, is_told):
    verdict = judge(changed(issue_time_s=issue_time_s), baseline(nights=NIGHTS), invariants(), RULE)
    assert any("the host takes 98 ms to issue a step" in note for note in verdict.notes) is is_told


def test_wrong_gradient_norm_is_said_before_lost_throughput_and_grown_memory():
    runs = measurement(GPU_CELL, step_times_s=(0.1145,) * 3, allocated_bytes=(int(249 * GIB),) * 3).runs
    recorded = msgspec.structs.replace(GPU_RIGHT, end_gradient_norm=16.6)
    stored = baseline(GPU_CELL, nights=NIGHTS, allocated_bytes=int(243.9 * GIB))
    raced = measure(GPU_CELL, PLAN, [change_ranks(run, end_gradient_norm=95.5) for run in runs])
    verdict = judge(raced, stored, recorded, RULE)
    assert verdict.outcome is Outcome.WRONG
    assert verdict.reasons[0] == "every run: end gradient norm 16.6 -> 95.5 (more than a factor of 1.01 apart)"
    assert judge(measure(GPU_CELL, PLAN, list(runs)), stored, GPU_RIGHT, RULE).outcome is Outcome.REGRESSED


def test_fixed_bar_catches_a_slow_drift_that_a_rolling_one_never_sees():
    """Twelve builds, each 1 % less throughput: +5.2 % step time at the fifth."""
    rule = Rule(prior_sd=0, floor=0.05)
    seconds = [0.1 / 0.99**build for build in range(13)]
    fixed = [timed(new_s, rule=rule).outcome for new_s in seconds]
    rolling = [timed(new, nights=((old,) * 3,) * 3, rule=rule).outcome for old, new in itertools.pairwise(seconds)]
    assert fixed == [Outcome.PASS] * 5 + [Outcome.REGRESSED] * 8
    assert set(rolling) == {Outcome.PASS}


def test_accepted_improvement_is_the_new_bar():
    """From 1000 to 1200 tok/s and back to 1020: 15 % less than the accepted value, though better than the first."""
    assert timed(0.1 / 1.2).outcome is Outcome.IMPROVED
    assert timed(0.1 / 1.02).outcome is Outcome.PASS
    assert timed(0.1 / 1.02, nights=((0.1 / 1.2,) * 3,) * 3).outcome is Outcome.REGRESSED


@pytest.mark.parametrize(
    "bad",
    [{"floor": -0.05}, {"floor": 0.09}, {"cap": 1.5}, {"memory_share": -1}, {"prior_sd": -1}, {"reserved_bytes": -1}],
)
def test_rule_that_cannot_be_meant_is_refused(bad):
    with pytest.raises(ValueError, match="tolerance"):
        Rule(**bad)


def test_tolerance_as_text_is_refused():
    with pytest.raises(msgspec.ValidationError, match="floor"):
        msgspec.convert({"floor": "5 %"}, Rule)


def test_tolerance_0_is_exact_and_more_than_all_memory_is_allowed():
    assert timed(0.1, rule=Rule(floor=0, cap=0, prior_sd=0, least_difference_s=0)).outcome is Outcome.PASS
    assert timed(0.1000001, rule=Rule(floor=0, cap=0, prior_sd=0, least_difference_s=0)).outcome is Outcome.REGRESSED
    assert sized(20 * GIB, rule=Rule(memory_share=1.5, reserved_share=1.5)).outcome is Outcome.PASS
