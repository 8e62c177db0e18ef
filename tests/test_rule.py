"""Room perf/judge/rule.py: presets, what the sensitive one needs, and overrides with their reasons."""

import random

import pytest

from perf.facts.outcome import Outcome
from perf.judge.decision import compare_pairs, num_pairs
from perf.judge.rule import PRESETS, Rule, overrides, rule_for
from tests.factory import baseline, write_text

CELL = "ddp-tiny-eager-w2-gloo"
QUIET_SD = 0.002


def nights(count, *, step=0.0):
    return tuple((0.1 * (1 + step), 0.1, 0.1 * (1 - step)) for _ in range(count))


def test_presets_are_rules_of_their_own():
    floors = {
        name: (rule.floor, rule.pair_floor)
        for name in PRESETS
        for rule, _ in [rule_for(CELL, name, None, (), QUIET_SD)]
    }
    assert floors == {"default": (0.025, 0.02), "sensitive": (0.01, 0.005), "lenient": (0.04, 0.035)}


@pytest.mark.parametrize("sd", [0.002, 0.003])
def test_sensitive_pairs_find_one_percent_and_no_more_than_there_is(sd):
    """Two H200s were so far apart. Four pairs and two errors would call 1.1 % of what did not change at 0.3 %."""
    source = random.Random(0)
    rule, _ = rule_for(CELL, "sensitive", None, (), sd)
    num_trials, found = 4000, {}
    for slowdown in (0.0, 0.01):
        pairs = [
            [(source.gauss(0, sd), source.gauss(slowdown, sd)) for _ in range(num_pairs(sd, rule))]
            for _ in range(num_trials)
        ]
        outcomes = [compare_pairs(of_one, sd, rule).outcome for of_one in pairs]
        found[slowdown] = outcomes.count(Outcome.REGRESSED) / num_trials
    assert found[0.0] <= 0.0025
    assert found[0.01] >= 0.97


@pytest.mark.parametrize(
    ("stored", "prior_sd", "says"),
    [
        (baseline(nights=nights(3)), QUIET_SD, None),
        (baseline(nights=((0.1,) * 9,)), QUIET_SD, "needs 9 runs from 2 nights, the baseline has 9 from 1"),
        (baseline(nights=nights(2)), QUIET_SD, "needs 9 runs from 2 nights, the baseline has 6 from 2"),
        (baseline(nights=nights(3)), 0.008, "asks for a tolerance of 1.3 %, above 1 %"),
        (baseline(nights=nights(3, step=0.02)), QUIET_SD, "above 1 %"),
    ],
    ids=["carries it", "one night", "six runs", "unknown noise", "noisy"],
)
def test_sensitive_preset_needs_a_baseline_that_carries_it(stored, prior_sd, says):
    rule, remarks = rule_for(CELL, "sensitive", stored, (), prior_sd)
    if says is None:
        assert (rule.floor, remarks) == (0.01, ())
    else:
        assert rule.floor == Rule().floor
        assert remarks[0].startswith("judged by the default preset: ")
        assert says in remarks[0]


OVERRIDE = """
[[override]]
cells = "ddp-*-eager-*"
floor = 0.04
pairs = 8
reason = "the host's clock moves it"
"""


def test_override_holds_for_its_cells_and_is_shown_with_its_reason(tmp_path):
    chosen = overrides(write_text(tmp_path / "overrides.toml", OVERRIDE))
    rule, remarks = rule_for(CELL, "default", None, chosen, QUIET_SD)
    assert (rule.floor, rule.pairs, rule.prior_sd) == (0.04, 8, QUIET_SD)
    assert remarks == ("override floor 0.04, pairs 8: the host's clock moves it",)
    rule, remarks = rule_for("fsdp2-tiny-eager-w2-gloo", "default", None, chosen, QUIET_SD)
    assert (rule.floor, remarks) == (0.025, ())
    assert overrides(tmp_path / "none.toml") == ()


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('reason = "the host\'s clock moves it"', "", "override 1: needs a reason"),
        ('"the host\'s clock moves it"', '" "', "override 1: needs a reason"),
        ('cells = "ddp-*-eager-*"', "", "needs cells"),
        ("floor = 0.04\npairs = 8", "", "at least one number of the rule"),
        ("floor = 0.04", "flor = 0.04", "unknown field `flor`"),
        ("floor = 0.04", "floor = 0.5", "floor 0.5 <= cap 0.08"),
        ("floor = 0.04", "floor = -0.1", "floor -0.1"),
        ("floor = 0.04", "memory_share = nan", "memory_share nan is no number"),
        ("floor = 0.04", "suspicious_share = 3.0", "suspicious_share 3.0: a share of the tolerance"),
        ("floor = 0.04", "suspicious_share = 0.0", "suspicious_share 0.0: a share of the tolerance"),
        ("floor = 0.04", 'floor = "4 %"', "Expected `float`"),
        ("floor = 0.04", "floor = 0.09", "floor 0.09 <= cap 0.08"),
        ("floor = 0.04", "cap = 0.01", "floor 0.025 <= cap 0.01"),
        ("floor = 0.04", "prior_sd = 11", "prior_sd 11.0: a fraction of the step time, at most 10"),
        ("floor = 0.04", "prior_df = 0", "prior_df 0.0: one run alone has no noise"),
        ("pairs = 8", f"pairs = 1{'0' * 400}", "override 1.*numbers of the rule: floor"),
        ("floor = 0.04", f"floor = 1{'0' * 400}", "override 1.*numbers of the rule: floor"),
        ("pairs = 8", f"pairs = 1{'0' * 5000}", "overrides.toml: Exceeds the limit"),
        ("floor = 0.04\n", "floor = " + "[" * 2000 + "]" * 2000 + "\n", "overrides.toml: "),
        ('"ddp-*-eager-*"', "5", "Expected `str`, got `int`"),
        ("[[override]]", "[override]", r"holds \[\[override\]\] tables"),
        ("[[override]]", "[[override", "overrides.toml"),
    ],
)
def test_override_that_cannot_be_meant_is_refused_with_its_place(tmp_path, old, new, says):
    assert OVERRIDE.count(old) == 1
    with pytest.raises(ValueError, match=says):
        overrides(write_text(tmp_path / "overrides.toml", OVERRIDE.replace(old, new)))


@pytest.mark.parametrize("text", ["override = [1]", "override = [[]]", 'override = ["x"]', "override = [1.5, {}]"])
def test_override_that_is_no_table_is_refused_with_its_place(tmp_path, text):
    with pytest.raises(ValueError, match=r"overrides\.toml: override 1: .* is not an \[\[override\]\] table"):
        overrides(write_text(tmp_path / "overrides.toml", text))


def test_overrides_of_one_cell_that_contradict_each_other_are_named_with_it(tmp_path):
    text = OVERRIDE + '[[override]]\ncells = "*-tiny-*"\nfloor = 0.02\ncap = 0.03\nreason = "a"\n'
    text += '[[override]]\ncells = "ddp-*"\nfloor = 0.05\nreason = "b"\n'
    chosen = overrides(write_text(tmp_path / "overrides.toml", text))
    with pytest.raises(ValueError, match=rf"{CELL}: its overrides .* floor 0.05 <= cap 0.03 .*: a; .*: b"):
        rule_for(CELL, "default", None, chosen, QUIET_SD)
