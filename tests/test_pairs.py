"""Room perf/judge/pairs.py: what a comparison side by side asks of both builds, and what it says."""

import math

import pytest
from msgspec.structs import replace

from perf.facts.measurement import measure
from perf.facts.outcome import Outcome
from perf.facts.provenance import Imported
from perf.judge.pairs import between_runs, confirmed_shift, judge_pairs, reference_errors, unproven
from perf.judge.rule import Rule
from strategies.spec import LinkProfile
from tests.factory import PLAN, SOFTWARE, baseline, cell, change_ranks, environment, invariants, run_record

RULE = Rule(prior_sd=0.002)
MINE = Imported(strategies="/candidate/strategies", torch="/site/torch", digest="aaaa")
OTHER = Imported(strategies="/reference/strategies", torch="/site/torch", digest="bbbb")
GIB = 2**30
CELL, GPU_CELL = cell(), cell(link=LinkProfile.NATIVE)


def arm(name, imported, seconds, *, of=CELL, peak=None, env=None, **changes):
    """Runs of one build, one step time each."""
    runs = []
    for index, step_time_s in enumerate(seconds):
        run = run_record(of, index=index, step_time_s=step_time_s, allocated_bytes=peak, env=env)
        runs.append(replace(change_ranks(run, imported=imported, **changes), arm=name))
    return measure(of, replace(PLAN, runs=len(runs)), runs)


def candidate(*seconds, **changes):
    return arm("candidate", changes.pop("imported", MINE), seconds or (0.1,) * 4, **changes)


def reference(*seconds, **changes):
    return arm("reference", changes.pop("imported", OTHER), seconds or (0.1,) * 4, **changes)


def judged(mine, other, *, stored=None, recorded=None, **settings):
    return judge_pairs(mine, other, stored, recorded, RULE, **settings)


@pytest.mark.parametrize(
    ("new_s", "outcome"),
    [(0.1, "PASS"), (0.1019, "PASS"), (0.1021, "REGRESSED"), (0.0979, "IMPROVED"), (0.2, "REGRESSED")],
)
def test_pairs_are_judged_without_a_baseline(new_s, outcome):
    verdict = judged(candidate(*(new_s,) * 4), reference())
    assert (verdict.outcome, verdict.num_pairs, verdict.num_baseline_runs) == (outcome, 4, 0)
    assert verdict.comparisons[-1].change == pytest.approx(new_s / 0.1 - 1)


def test_machine_that_drifts_moves_both_of_a_pair():
    drifting = [0.1 * (1 + 0.03 * index) for index in range(4)]
    assert judged(candidate(*drifting), reference(*drifting)).outcome is Outcome.PASS
    slower = [0.105 * (1 + 0.03 * index) for index in range(4)]
    assert judged(candidate(*slower), reference(*drifting)).outcome is Outcome.REGRESSED


def test_baseline_that_is_far_off_does_not_decide():
    verdict = judged(candidate(), reference(), stored=baseline(nights=((0.01,) * 3,) * 3), recorded=invariants())
    assert verdict.outcome is Outcome.PASS


def test_too_few_pairs_are_no_verdict():
    verdict = judged(candidate(0.1, 0.1), reference(0.1, 0.1))
    assert (verdict.outcome, verdict.wanted_pairs, verdict.reasons) == (Outcome.NOT_RUN, 4, ("2 of 4 pairs",))
    assert judged(candidate(0.1, 0.1), reference(0.1, 0.1), wanted=2).outcome is Outcome.PASS


def test_noise_of_the_pairs_widens_the_tolerance_and_asks_for_more():
    mine, other = candidate(0.1, 0.11, 0.1, 0.11), reference(0.11, 0.1, 0.11, 0.1)
    assert judged(mine, other).wanted_pairs == RULE.noisy_pairs
    assert judged(mine, other, wanted=4).comparisons[-1].tolerance > 0.04


def test_noise_is_that_of_the_pairs_or_of_the_baseline_where_it_is_larger():
    quiet = [(0.0, 0.0)] * 4
    alone = between_runs(quiet, None, candidate(), RULE)
    noisy = baseline(nights=((0.1, 0.104, 0.096),) * 3)
    assert between_runs(quiet, noisy, candidate(), RULE) > 2 * alone
    other_recipe = baseline(cell(micro_batch=4), nights=((0.1, 0.104, 0.096),) * 3)
    assert between_runs(quiet, other_recipe, candidate(), RULE) == alone
    spread = [(0.0, 0.02), (0.02, 0.0)] * 2
    assert between_runs(spread, None, candidate(), RULE) == pytest.approx(
        math.sqrt((6 * 0.002**2 + 3 * 4 / 3 * 0.02**2 / 2) / 9)
    )


BAD = {
    "wrong numbers of the candidate": (candidate(losses=(3.0,) * 14 + (None,)), reference(), "WRONG", "not finite"),
    "wrong numbers of the reference": (
        candidate(), reference(losses=(3.0,) * 14 + (None,)), "INVALID", "reference: every run: the loss is not finite"
    ),
    "another loss than the reference's": (
        candidate(losses=tuple(1.01 * loss for loss in run_record().ranks[0].losses)), reference(),
        "WRONG", "unlike the reference, every run: loss of step 0"
    ),
    "a truncated run of the reference": (
        candidate(), reference(step_times_s=(0.1,) * 4), "INVALID", "reference: run 0 rank 0 has 4 of 10"
    ),
    "no proof of what was imported": (candidate(imported=None), reference(), "ERROR", "run 0 of the candidate"),
    "the same build twice": (candidate(imported=OTHER), reference(), "ERROR", "nothing is compared with nothing"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_compared_is_said(case):
    mine, other, outcome, says = BAD[case]
    verdict = judged(mine, other)
    assert verdict.outcome == outcome
    assert says in verdict.reasons[0]
    assert verdict.comparisons == ()


def test_only_runs_of_a_pair_have_to_prove_what_they_imported():
    alone = arm("candidate", None, (0.1,) * 6)
    paired = [run if run.index < 2 else replace(change_ranks(run, imported=MINE)) for run in alone.runs]
    beside = [run for run in arm("reference", OTHER, (0.1,) * 6).runs if run.index >= 2]
    mine = measure(CELL, PLAN, paired)
    assert unproven(mine, measure(CELL, PLAN, beside)) is None
    assert "run 0 of the candidate" in unproven(mine, reference(*(0.1,) * 6))


def test_nothing_is_compared_with_a_reference_that_is_wrong_or_incomplete():
    assert reference_errors(reference()) == []
    for changes, says in (
        ({"tokens_per_step": 1}, "tokens a step"),
        ({"losses": ()}, "losses of 0 of 15 steps"),
        ({"step_times_s": (0.1,) * 9}, "9 of 10 measured steps"),
    ):
        found = reference_errors(reference(**changes))
        assert found
        assert found[0].startswith("reference: ")
        assert says in found[0]


def test_shift_is_not_confirmed_by_cells_that_could_not_be_compared():
    wrong = judged(candidate(losses=(3.0,) * 14 + (None,)), reference())
    assert confirmed_shift([wrong]) is None
    assert confirmed_shift([wrong, judged(candidate(*(0.11,) * 4), reference())]) == pytest.approx(0.1)


def test_ranks_that_imported_different_code_prove_nothing():
    mixed = measure(CELL, PLAN, [change_ranks(run, 1, imported=OTHER) for run in candidate().runs])
    assert "differ in, what they imported" in unproven(mixed, reference())


def test_same_code_under_other_variables_is_a_comparison():
    verdict = judged(
        candidate(imported=OTHER, env=environment(variables={"NCCL_P2P_DISABLE": "1"})), reference(imported=OTHER)
    )
    assert verdict.outcome is Outcome.PASS
    assert verdict.environment_changes == ("NCCL_P2P_DISABLE unset -> 1",)


def test_same_code_at_two_places_is_told():
    verdict = judged(candidate(), reference(imported=replace(OTHER, digest=MINE.digest)))
    assert "compares the machine with itself" in verdict.notes[0]
    assert judged(candidate(), reference()).notes == ()


def test_other_torch_is_told():
    verdict = judged(candidate(env=environment(software=replace(SOFTWARE, torch="2.14.0"))), reference())
    assert verdict.environment_changes == ("torch 2.13.0 -> 2.14.0",)


def test_other_collectives_than_the_references_are_told_and_not_red():
    verdict = judged(candidate(ledger=()), reference())
    assert verdict.outcome is Outcome.PASS
    assert "unlike the reference, every run: collectives of ranks 0, 1: all_reduce/dp" in verdict.notes[0]


def test_recorded_invariants_hold_in_a_comparison_too():
    verdict = judged(candidate(ledger=()), reference(ledger=()), recorded=invariants())
    assert verdict.outcome is Outcome.WRONG


def test_memory_is_compared_with_the_references():
    mine, other = candidate(of=GPU_CELL, peak=10 * GIB + 2**26), reference(of=GPU_CELL, peak=10 * GIB)
    assert judged(mine, other).outcome is Outcome.REGRESSED
    assert judged(candidate(of=GPU_CELL, peak=10 * GIB), other).outcome is Outcome.PASS
