"""Room perf/judge/decision.py: the sequential rule, against an independent reference, at its limits, and broken."""

import inspect
import math
import types
from collections import Counter
from pathlib import Path

import pytest
from msgspec.structs import replace

from perf.facts.outcome import Outcome
from perf.judge import decision as room
from perf.judge.decision import Judge, compare_pairs, num_pairs
from perf.judge.rule import Rule
from tests.decision_cases import decision_cases

RULE = Rule(least_difference_s=0.0)
"""As the reference has it, which knows no least difference."""
QUIET = Rule(prior_sd=0.0)
CASES = list(
    zip(
        decision_cases(),
        (Path(__file__).parent / "data" / "decisions.txt").read_text(encoding="utf-8").splitlines(),
        strict=True,
    )
)


def decided(case, judge=Judge, rule=RULE):
    """The decision on a case, measured for as long as the rule asks, and how many runs that took."""
    baseline = [level for night in case.nights for level in night]
    num_runs, num_beside = 3, 0
    while True:
        pairs = case.pairs[:num_beside] if case.has_reference else None
        decision = judge(case.runs[:num_runs], baseline, rule).in_stages(pairs)
        if decision.outcome is not None:
            return decision, num_runs
        assert bool(decision.more_runs) is not bool(decision.pairs)
        num_runs, num_beside = num_runs + decision.more_runs, decision.pairs
        assert num_runs <= len(case.runs)
        assert num_beside <= len(case.pairs)


def disagreements(judge=Judge, cases=CASES):
    found = []
    for number, (case, line) in enumerate(cases):
        outcome, num_runs, change = line.split()
        decision, took = decided(case, judge)
        same = decision.outcome == outcome and (change == "-" or abs(decision.change - float(change)) < 1e-8)
        if not same or (took != int(num_runs) and outcome != "NOISY"):
            found.append((number, line, decision))
    return found


def test_ten_thousand_decisions_are_those_of_the_reference():
    assert disagreements() == []


def test_cases_of_the_reference_reach_every_end_of_the_rule():
    ends = Counter(
        (line.split()[0], int(line.split()[1]), case.has_reference) for case, line in CASES if "NOISY" not in line
    )
    alone = {("PASS", 3), ("PASS", 6), ("PASS", 9), ("IMPROVED", 3), ("REGRESSED", 6), ("REGRESSED", 9)}
    beside = {("PASS", 3), ("PASS", 6), ("IMPROVED", 3), ("REGRESSED", 6), ("ENVIRONMENT", 6)}
    assert {end[:2] for end in ends if not end[2]} == alone
    assert {end[:2] for end in ends if end[2]} == beside
    assert min(ends.values()) >= 20


MUTANTS = {
    "no second look": ("if len(self._levels) < second:", "if False:"),
    "a suspicious cell is red at once": ("if not self._look(second):", "if False:"),
    "fresh runs do not count": ("self._exceeds(fresh, share, least_s=0.0)", "True"),
    "the last look never decides": ("still = num_runs >= most or", "still ="),
    "twice as many looks": ("most = self._rule.most_looks * self._runs\n        while", "most = 18\n        while"),
    "pairs upside down": ("median(new - old for old, new in pairs)", "median(old - new for old, new in pairs)"),
    "a slow machine blames the build": (
        "outcome = Outcome.ENVIRONMENT if is_over",
        "outcome = Outcome.REGRESSED if is_over",
    ),
    "a slow machine passes": ("outcome = Outcome.ENVIRONMENT if is_over", "outcome = Outcome.PASS if is_over"),
    "pairs are judged by one run's noise": ("* math.sqrt(2 / len(pairs))", "* math.sqrt(1 / len(pairs))"),
    "more pairs for the quiet": ("if sd > rule.noisy_sd", "if sd < rule.noisy_sd"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_broken_rule_disagrees(name):
    (old, new), source = MUTANTS[name], inspect.getsource(room)
    assert source.count(old) == 1, "the source has changed: write this mutant anew"
    mutant = types.ModuleType("perf.mutant")
    exec(compile(source.replace(old, new), name, "exec"), mutant.__dict__)
    try:
        found = disagreements(mutant.Judge, CASES[:3000])
    except (AssertionError, IndexError, ValueError):
        return  # it asked for runs that no rule asks for
    assert found


def staged(*seconds, baseline_s=1.0, rule=QUIET, pairs=None, shift=0.0):
    """The decision on runs of these step times against nine equal ones."""
    levels = [math.log(value) for value in seconds]
    return Judge(levels, [math.log(baseline_s)] * 9, rule, shift=shift).in_stages(pairs)


def test_quiet_cell_passes_at_its_first_look():
    decision = staged(1.014, 1.014, 1.014)
    assert (decision.outcome, decision.suspicious, len(decision.looks)) == (Outcome.PASS, False, 1)


def test_suspicious_cell_is_undecided_until_it_was_looked_at_again():
    first = staged(1.016, 1.016, 1.016)
    assert (first.outcome, first.suspicious, first.more_runs) == (None, True, 3)
    assert staged(1.016, 1.016, 1.016, 1.0).more_runs == 2, "interrupted in the middle of a look"
    again = staged(1.016, 1.016, 1.016, 1.0, 1.0, 1.0)
    assert (again.outcome, again.suspicious, len(again.looks)) == (Outcome.PASS, True, 2)


def test_regression_without_a_reference_needs_a_second_look_that_agrees():
    assert staged(*(1.03,) * 6).outcome is Outcome.REGRESSED
    assert staged(*(1.03,) * 3, *(1.02,) * 3).outcome is None, "6 runs say 2.5 % and no more"
    assert staged(*(1.03,) * 3, *(1.02,) * 3).more_runs == 3
    assert staged(*(1.03,) * 3, *(1.02,) * 6).outcome is Outcome.PASS
    assert staged(*(1.03,) * 3, *(1.02,) * 3, *(1.04,) * 3).outcome is Outcome.REGRESSED


def test_limit_of_a_look_is_inclusive():
    rule = Rule(prior_sd=0, floor=0.05)
    assert staged(*(1.05,) * 9, rule=rule).outcome is Outcome.PASS
    assert staged(*(1.0501,) * 9, rule=rule).outcome is Outcome.REGRESSED
    assert staged(1.03, 1.03, 1.03, rule=rule).outcome is Outcome.PASS, "6 tenths of 5 % are met, not exceeded"
    assert staged(1.0301, 1.0301, 1.0301, rule=rule).outcome is None


def test_reference_is_asked_for_as_many_pairs_as_the_noise_needs():
    six = (1.03,) * 6
    assert staged(*six, pairs=()).pairs == QUIET.pairs
    assert num_pairs(0.0121, QUIET) == QUIET.noisy_pairs
    assert num_pairs(0.012, QUIET) == QUIET.pairs


def log_pairs(old_s, new_s, count=4):
    return [(math.log(old_s), math.log(new_s))] * count


def test_pairs_tell_the_build_from_the_machine():
    six = (1.04,) * 6
    built = staged(*six, pairs=log_pairs(1.0, 1.04))
    assert built.outcome is Outcome.REGRESSED
    assert built.change == pytest.approx(0.04)
    moved = staged(*six, pairs=log_pairs(1.04, 1.04))
    assert moved.outcome is Outcome.ENVIRONMENT
    assert moved.change == pytest.approx(0.0), (
        "the estimate is that of the pairs: the screen's was chosen for being high"
    )
    gone = staged(*six, pairs=log_pairs(0.95, 0.95, 6) + log_pairs(0.95, 0.95, 1))
    assert gone.outcome is Outcome.PASS


def test_limit_of_pairs_is_inclusive_and_both_ways():
    for new_s, outcome in ((1.02, "PASS"), (1.0201, "REGRESSED"), (0.98, "PASS"), (0.9799, "IMPROVED")):
        assert compare_pairs(log_pairs(1.0, new_s), 0.0, QUIET).outcome == outcome


def test_pairs_that_are_too_far_apart_decide_nothing():
    assert compare_pairs(log_pairs(1.0, 2.0), 0.05, QUIET).outcome is Outcome.NOISY


@pytest.mark.parametrize("pairs", [None, log_pairs(0.010, 0.0108)])
def test_call_needs_a_millisecond_too(pairs):
    """+8 % of 10 ms are 0.8 ms: suspicious, looked at again, and then no call."""
    assert staged(*(0.0108,) * 9, baseline_s=0.010, pairs=pairs).outcome is not Outcome.REGRESSED
    assert staged(*(0.0108,) * 9, baseline_s=0.010, pairs=pairs, rule=replace(QUIET, least_difference_s=0)).outcome is (
        Outcome.REGRESSED
    )
    assert staged(0.0105, 0.0105, 0.0105, baseline_s=0.010).outcome is Outcome.PASS, "0.5 ms can never become a call"


def test_shift_of_the_suite_is_not_the_cells():
    shifted = staged(*(1.05,) * 3, shift=math.log(1.05))
    assert (shifted.outcome, shifted.suspicious) == (Outcome.PASS, False)
    assert staged(*(1.08,) * 6, shift=math.log(1.05)).outcome is Outcome.REGRESSED


def test_looks_are_as_long_as_the_first_one():
    one = Judge([0.1], [0.0] * 9, QUIET, runs_a_look=1).in_stages()
    assert (one.outcome, one.more_runs) == (None, 1)


def test_sensitivity_is_that_of_the_last_look_or_of_the_pairs():
    rule = Rule(prior_sd=0.002)
    sd = 0.002 * math.sqrt(6 / 14)
    last = 1.25 * sd * math.sqrt(1 / 9 + 1 / 9)
    assert staged(1.0, 1.0, 1.0, rule=rule).sensitivity == pytest.approx(0.025 + 1.28 * last)
    beside = 1.25 * sd * math.sqrt(2 / 4)
    assert staged(1.0, 1.0, 1.0, rule=rule, pairs=()).sensitivity == pytest.approx(0.02 + 1.28 * beside)
