"""Room perf/facts/outcome.py: what is red, what is green, and that most is neither."""

from perf.facts.outcome import FAILURES, VERDICTS, Outcome


def test_outcomes_are_a_failure_or_green_or_without_a_verdict():
    assert {Outcome.REGRESSED, Outcome.WRONG, Outcome.ERROR} == FAILURES
    assert {Outcome.PASS, Outcome.IMPROVED} == VERDICTS
    assert not FAILURES & VERDICTS
    assert len(set(Outcome) - FAILURES - VERDICTS) == 6
