"""Room perf/judge/approval.py: what may become a baseline, what starts a series, what is refused, and the cure."""

import pytest
from msgspec.structs import replace

from perf.facts.fault import Fault, FaultKind
from perf.facts.measurement import Measurement
from perf.facts.outcome import Outcome
from perf.facts.record import LedgerEntry
from perf.judge.approval import Consent, propose, propose_ceilings, unfit
from perf.judge.baseline import Baseline, Invariants
from perf.judge.rule import Rule
from tests import nodes
from tests.factory import SOFTWARE, baseline, change_ranks, environment, invariants, measurement

RUN = "2026-11-29T02-00-00"
NOBODY = Consent()
WITH_REASON = Consent(reason="torch 2.14")


def ask(of: Measurement, *, old: Baseline | None = None, known: Invariants | None = None, consent: Consent = NOBODY):
    return propose(of, RUN, baseline=old, invariants=known, consent=consent, rule=Rule())


def broken(**changes: object) -> Measurement:
    whole = measurement()
    return replace(whole, runs=tuple(change_ranks(run, **changes) for run in whole.runs))


def other_build(**times: object) -> Measurement:
    return measurement(env=environment(software=replace(SOFTWARE, torch="2.14.0")), **times)


def test_first_measurement_becomes_a_series_of_one_night():
    proposal = ask(measurement())
    assert proposal.refusal is None
    assert [night.origin.run_id for night in proposal.baseline.nights] == [RUN]
    assert proposal.baseline.recipe == measurement().recipe
    assert proposal.baseline.sealed().is_whole()
    assert proposal.invariants.losses == measurement().runs[0].losses
    assert not proposal.invariants.recipe.differences(measurement().recipe)


@pytest.mark.parametrize("order", [(1, 2, 0), (2, 0, 1), (0, 1, 2)])
def test_last_gradient_norm_is_recorded_of_the_run_in_the_middle(order):
    """A single run's is chaotic in bfloat16: one of six was twice the others."""
    whole = measurement()
    norms = [2.6, 2.601, 2.59]
    runs = [change_ranks(run, end_gradient_norm=norms[at]) for run, at in zip(whole.runs, order, strict=True)]
    assert ask(replace(whole, runs=tuple(runs))).invariants.end_gradient_norm == 2.6


def test_night_of_the_same_build_and_recipe_is_appended():
    proposal = ask(measurement(), old=baseline(), known=invariants())
    assert len(proposal.baseline.nights) == 2
    assert proposal.baseline.nights[0] == baseline().nights[0]
    assert proposal.invariants == invariants(), "unchanged invariants keep their origin"


def test_the_same_test_run_twice_changes_nothing():
    once = ask(measurement(), old=baseline(), known=invariants()).baseline
    again = ask(measurement(), old=once, known=invariants())
    assert (again.baseline, again.invariants, again.refusal) == (None, None, None)


def test_other_build_needs_a_reason_and_starts_a_series_that_keeps_it():
    refused = ask(other_build(), old=baseline(), known=invariants())
    assert "another build" in refused.refusal
    assert "--reason" in refused.refusal
    (night,) = ask(other_build(), old=baseline(), known=invariants(), consent=WITH_REASON).baseline.nights
    assert night.origin.reason == "torch 2.14"
    assert night.origin.software.torch == "2.14.0"


def test_other_recipe_needs_a_reason_and_names_the_difference():
    old = baseline()
    old = replace(old, recipe=replace(old.recipe, timed_steps=20)).sealed()
    assert "timed_steps: 20 -> 10" in ask(measurement(), old=old).refusal
    (night,) = ask(measurement(), old=old, consent=WITH_REASON).baseline.nights
    assert night.origin.run_id == RUN


def test_invariants_of_another_recipe_need_their_own_consent():
    """They are every machine's: replaced in silence, nothing would be compared with them any more."""
    known = invariants()
    known = replace(known, recipe=replace(known.recipe, timed_steps=20)).sealed()
    for old in (None, baseline()):
        assert "--accept-invariants" in ask(measurement(), old=old, known=known, consent=WITH_REASON).refusal
        consent = Consent(reason="longer runs", accept_invariants=True)
        assert ask(measurement(), old=old, known=known, consent=consent).invariants.recipe == measurement().recipe


def test_nights_under_one_reason_are_one_series():
    first = ask(other_build(), old=baseline(), known=invariants(), consent=WITH_REASON).baseline
    other_night = replace(first, nights=(replace(first.nights[0], origin=replace(first.nights[0].origin, run_id="a")),))
    second = ask(other_build(), old=other_night, known=invariants(), consent=WITH_REASON).baseline
    assert [night.origin.reason for night in second.nights] == ["torch 2.14", "torch 2.14"]


def test_reason_of_any_night_continues_its_series():
    known = {"old": baseline(), "known": invariants()}
    first = ask(other_build(), **known, consent=WITH_REASON).baseline
    night = first.nights[0]
    unsaid = replace(night, origin=replace(night.origin, run_id="b", reason=None))
    both = replace(first, nights=(replace(night, origin=replace(night.origin, run_id="a")), unsaid))
    assert len(ask(other_build(), old=both, known=invariants(), consent=WITH_REASON).baseline.nights) == 3


def test_accepted_regression_starts_a_series_though_the_reason_is_the_same():
    """Appended, its runs and the better ones were too far apart to gate the next night."""
    ask_again = {"known": invariants(), "consent": Consent(reason="why it may be slower", accept_regression=True)}
    first = ask(measurement(step_times_s=(0.12,) * 3), old=baseline(), **ask_again).baseline
    (night,) = first.nights
    first = replace(first, nights=(replace(night, origin=replace(night.origin, run_id="a")),))
    (night,) = ask(measurement(step_times_s=(0.15,) * 3), old=first, **ask_again).baseline.nights
    assert night.runs[0].step_times_s[0] == 0.15


def test_worse_value_is_also_what_the_test_run_called_worse():
    said = {"baseline": baseline(), "invariants": invariants(), "consent": NOBODY, "rule": Rule()}
    refused = propose(measurement(step_times_s=(0.102,) * 3), RUN, said=Outcome.REGRESSED, **said)
    assert "--accept-regression" in refused.refusal
    assert propose(measurement(step_times_s=(0.102,) * 3), RUN, said=Outcome.PASS, **said).refusal is None


@pytest.mark.parametrize(("step_s", "refused"), [(0.107, False), (0.12, True)])
def test_worse_value_of_a_noisy_cell_is_one_beyond_the_largest_tolerance(step_s, refused):
    noisy = baseline(nights=((0.06, 0.1, 0.15), (0.07, 0.1, 0.14)))
    proposal = ask(measurement(step_times_s=(step_s,) * 3), old=noisy, known=invariants())
    assert (proposal.refusal is not None) is refused


def test_worse_value_needs_its_own_consent():
    slower = other_build(step_times_s=(0.15, 0.15, 0.15))
    assert "--accept-regression" in ask(slower, old=baseline(), known=invariants(), consent=WITH_REASON).refusal
    consent = Consent(reason="safer kernel", accept_regression=True)
    accepted = ask(slower, old=baseline(), known=invariants(), consent=consent).baseline
    assert len(accepted.nights) == 1
    assert accepted.runs[0].step_times_s[0] == 0.15


def test_improvement_of_the_same_build_is_a_night_and_needs_no_consent():
    assert len(ask(measurement(step_times_s=(0.05,) * 3), old=baseline(), known=invariants()).baseline.nights) == 2


def test_changed_collectives_need_their_own_consent():
    entry = LedgerEntry(op="all_reduce", axis="dp", dtype="float32", count=2, bytes=1_117_440)
    changed = broken(ledger=(entry,))
    refused = ask(changed, old=baseline(), known=invariants(), consent=WITH_REASON).refusal
    assert "1 calls" in refused
    assert "2 calls" in refused
    assert "--accept-invariants" in refused
    consent = Consent(reason="bigger buckets", accept_invariants=True)
    accepted = ask(changed, old=baseline(), known=invariants(), consent=consent)
    assert accepted.invariants.ledger[0].entries == (entry,)
    assert accepted.invariants.origin.reason == "bigger buckets"


@pytest.mark.parametrize(
    ("of", "says"),
    [
        (broken(losses=(None,) * 15), "not finite"),
        (broken(num_parameters=7), "parameters"),
        (broken(step_times_s=(0.1,) * 4), "4 of 10 measured steps"),
        (replace(measurement(), runs=measurement().runs[:2]), "2 of 3 runs"),
    ],
)
def test_what_is_wrong_by_itself_is_never_stored(of, says):
    everything = Consent(reason="please", accept_regression=True, accept_invariants=True)
    proposal = ask(of, consent=everything)
    assert says in proposal.refusal
    assert (proposal.baseline, proposal.invariants) == (None, None)


def test_planted_fault_can_never_become_a_baseline():
    planted = tuple(replace(run, fault=Fault(kind=FaultKind.DELAY)) for run in measurement().runs)
    assert "planted fault (delay)" in unfit(replace(measurement(), runs=planted))
    assert unfit(measurement()) is None


@pytest.mark.parametrize("flag", ["accept_regression", "accept_invariants"])
@pytest.mark.parametrize("reason", [None, " "])
def test_consent_to_worse_values_needs_words(flag, reason):
    with pytest.raises(ValueError, match="needs a --reason"):
        Consent(reason=reason, **{flag: True})


MEANT = Consent(reason="new cooling", accept_regression=True)


def ask_of_node(preflight, *, old=None, consent: Consent = NOBODY):
    return propose_ceilings(preflight, RUN, recorded=old, consent=consent)


def gemm(tflop_per_s: float, **others: object):
    rates = {"gemm_flop_per_s": nodes.rate(tflop_per_s * 1e12, 1)} | others
    return nodes.preflight(ceilings=nodes.ceilings(**rates))


def test_first_preflight_becomes_the_machines_ceilings():
    proposal = ask_of_node(nodes.preflight())
    assert proposal.refusal is None
    assert proposal.record.ceilings == nodes.ceilings()
    assert (proposal.record.machine, proposal.record.driver) == (nodes.H200S, "580.10")
    assert (proposal.record.origin.run_id, proposal.record.origin.date) == (RUN, "2026-11-29")
    assert proposal.record.sealed().is_whole()


@pytest.mark.parametrize("tflop_per_s", [793, 754, 834])
def test_ceilings_within_tolerance_stay_as_recorded_so_that_they_cannot_creep(tflop_per_s):
    for consent in (NOBODY, WITH_REASON, MEANT):
        proposal = ask_of_node(gemm(tflop_per_s), old=nodes.recorded(), consent=consent)
        assert (proposal.record, proposal.refusal) == (None, None)


def test_lower_ceiling_needs_consent_and_keeps_its_reason():
    for consent in (NOBODY, WITH_REASON):
        proposal = ask_of_node(gemm(640), old=nodes.recorded(), consent=consent)
        assert proposal.record is None
        assert proposal.refusal.startswith("GEMM 640 TFLOP/s is 80.7 % of the recorded 793")
        assert proposal.refusal.endswith("if meant: --accept-regression --reason ...")
    lowered = ask_of_node(gemm(640), old=nodes.recorded(), consent=MEANT).record
    assert lowered.ceilings.gemm_flop_per_s.median == 640e12
    assert lowered.origin.reason == "new cooling"


def test_higher_ceiling_is_taken_with_all_others_as_measured():
    """Rates that are equal but for noise are never all at or above their record."""
    mixed = ask_of_node(gemm(900, p2p_bytes_per_s=nodes.rate(379e9)), old=nodes.recorded()).record
    assert (mixed.ceilings.gemm_flop_per_s.median, mixed.ceilings.p2p_bytes_per_s.median) == (900e12, 379e9)
    fallen = gemm(900, p2p_bytes_per_s=nodes.rate(300e9))
    assert "p2p of 256 MiB 300 GB/s" in ask_of_node(fallen, old=nodes.recorded()).refusal
    assert ask_of_node(fallen, old=nodes.recorded(), consent=MEANT).record.ceilings.p2p_bytes_per_s.median == 300e9


def test_host_that_launches_faster_raises_no_record():
    """On one node alone it was 106 to 139 thousand a second from start to start."""
    usual = nodes.ceilings().launches_per_s.median
    quick = nodes.preflight(ceilings=nodes.ceilings(launches_per_s=nodes.rate(1.5 * usual)))
    assert ask_of_node(quick, old=nodes.recorded()).record is None
    slow = nodes.preflight(ceilings=nodes.ceilings(launches_per_s=nodes.rate(0.7 * usual)))
    assert ask_of_node(slow, old=nodes.recorded()).refusal is not None


def test_ceilings_of_an_ill_node_or_with_one_missing_are_never_stored():
    ill = nodes.preflight(gpus=(nodes.gpu_health(foreign_pids=(4711,)), nodes.gpu_health(1)))
    missing = nodes.preflight(ceilings=nodes.ceilings(p2p_bytes_per_s=nodes.rate(None)))
    nothing = nodes.preflight(ceilings=None, failure="OOM")
    for preflight, says in (
        (ill, "4711"),
        (missing, "p2p of 256 MiB: not measured"),
        (nothing, "nothing was measured"),
    ):
        proposal = ask_of_node(preflight, consent=MEANT)
        assert proposal.record is None
        assert says in proposal.refusal


def test_ceilings_of_a_cpu_are_held_to_nothing_so_none_are_stored():
    proposal = ask_of_node(nodes.cpu_preflight(), consent=MEANT)
    assert (proposal.record, proposal.refusal) == (None, None)
    assert "whose cores are shared" in proposal.summary
