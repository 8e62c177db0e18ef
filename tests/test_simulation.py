"""Room perf/judge/simulation.py: the operating curve of the rule, as far as few trials tell."""

import pytest
from msgspec.structs import replace

from perf.judge.rule import Rule
from perf.judge.simulation import PROFILES, rates

RULE = Rule(least_difference_s=0.0)


def share(profile, slowdown, *, has_reference=True, rule=RULE, num_trials=600):
    found = rates(PROFILES[profile], slowdown, rule, has_reference=has_reference, num_trials=num_trials)
    return found.regressed


@pytest.mark.parametrize(
    ("profile", "slowdown", "least", "most"),
    [
        ("quiet", 0.0, 0.0, 0.0),
        ("quiet", 0.02, 0.38, 0.56),
        ("quiet", 0.03, 0.99, 1.0),
        ("typical", 0.02, 0.27, 0.44),
        ("typical", 0.03, 0.86, 0.96),
        ("noisy", 0.03, 0.39, 0.57),
        ("noisy", 0.10, 0.99, 1.0),
        ("drifting", 0.03, 0.70, 0.85),
    ],
)
def test_regressions_are_found_as_often_as_the_design_says(profile, slowdown, least, most):
    """Known to within four standard errors of 600 trials."""
    assert least <= share(profile, slowdown) <= most


def test_nothing_is_rerun_where_nothing_changed():
    found = rates(PROFILES["quiet"], 0.0, RULE, has_reference=True, num_trials=300)
    assert found.runs < 3.1
    assert found.environment == 0.0


def test_without_a_reference_small_slowdowns_are_found_less_often():
    assert share("typical", 0.03, has_reference=False) < share("typical", 0.03)


def test_broken_rule_bends_the_curve():
    assert share("typical", 0.03, rule=replace(RULE, pair_floor=0.06)) < 0.2
    assert (
        share("noisy", 0.0, rule=replace(RULE, tolerance_errors=0.1, floor=0.0, pair_floor=0.0, pair_errors=0.1)) > 0.1
    )


def test_same_seed_gives_the_same_curve():
    assert share("noisy", 0.03, num_trials=100) == share("noisy", 0.03, num_trials=100)
