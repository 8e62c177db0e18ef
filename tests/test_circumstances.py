"""Room perf/judge/circumstances.py: what a machine, a reference and the unsharded model change of a verdict."""

import pytest
from msgspec.structs import replace

from perf.facts.measurement import STEP_TIME
from perf.facts.outcome import Outcome
from perf.judge import baseline as baselines
from perf.judge.approval import unfit
from perf.judge.breaker import Shift
from perf.judge.circumstances import doubted, everywhere, incomparable, invalid
from perf.judge.preflight import Doubts
from perf.judge.rule import Rule
from perf.judge.verdict import Course, Verdict, judge
from strategies.spec import StrategyName
from tests.factory import baseline, cell, invariants, measurement, run_record
from tests.scripted_suite import RECORDED_S, ScriptedRun, alone, labelled

pytestmark = pytest.mark.usefixtures("alone")
__all__ = ["alone"]


def judged_slow():
    slow, stored = measurement(step_times_s=(0.2,) * 3), baseline(nights=((0.1,) * 3,) * 3)
    return judge(slow, stored, invariants(), Rule(), Course(runs_a_look=3))


def test_time_on_a_node_below_its_kind_is_not_comparable_and_memory_is():
    undecided = judged_slow()
    assert undecided.more_runs == 3
    verdict = incomparable(undecided, ["GEMM 640 is 80.7 % of the recorded 793"])
    assert (verdict.outcome, verdict.more_runs) == (Outcome.ENVIRONMENT, 0)
    assert verdict.reasons == ("not comparable: GEMM 640 is 80.7 % of the recorded 793",)
    hungry = replace(undecided, comparisons=tuple(
        replace(row, outcome=Outcome.REGRESSED) if row.metric != STEP_TIME else row for row in undecided.comparisons
    ))  # fmt: skip
    assert incomparable(hungry, ["slow"]).outcome is Outcome.REGRESSED
    wrong = replace(undecided, outcome=Outcome.WRONG, comparisons=())
    assert incomparable(wrong, ["slow"]).outcome is Outcome.WRONG


def test_slow_host_is_held_against_what_it_limits_and_told_of_the_rest():
    undecided = judged_slow()
    slow_host = Doubts(of_host_bound_cells=("launch rate 65 k/s is 48.5 % of the recorded 134",))
    limited = doubted(undecided, slow_host, is_host_bound=True)
    assert (limited.outcome, limited.more_runs) == (Outcome.ENVIRONMENT, 0)
    other = doubted(undecided, slow_host, is_host_bound=False)
    assert (other.outcome, other.more_runs) == (undecided.outcome, 3), "judged as ever"
    assert other.notes[-1].endswith("does not wait for: launch rate 65 k/s is 48.5 % of the recorded 134")
    slow_gpu = Doubts(of_all_cells=("GEMM 640 is 80.7 % of the recorded 793",))
    assert doubted(undecided, slow_gpu, is_host_bound=False).outcome is Outcome.ENVIRONMENT
    assert doubted(undecided, Doubts(), is_host_bound=True) == undecided


def test_suspicious_cell_of_a_suite_that_the_build_slowed_down_is_red_without_more_runs():
    shift = Shift(num_cells=5, num_suspicious=5, change=0.7, beside=0.7)
    verdict = everywhere(judged_slow(), shift)
    assert (verdict.outcome, verdict.more_runs, verdict.reasons) == (Outcome.REGRESSED, 0, (shift.text,))


def test_cell_beside_a_reference_that_is_none_is_no_measurement():
    verdict = invalid(judged_slow(), ["reference: run 0 has no losses"])
    assert (verdict.outcome, verdict.comparisons, verdict.more_runs) == (Outcome.INVALID, (), 0)


def test_node_below_its_kind_gives_no_first_baseline():
    """An outcome of its own: the runs of a NO_BASELINE cell become the bar."""
    first = Verdict(cell_id="a", outcome=Outcome.NO_BASELINE, reasons=("no timing baseline for this machine",))
    below = doubted(first, Doubts(of_all_cells=("GEMM is 80 %",)), is_host_bound=False)
    assert (below.outcome, below.reasons) == (Outcome.ENVIRONMENT, ("not comparable: GEMM is 80 %", *first.reasons))
    assert doubted(first, Doubts(of_host_bound_cells=("launch rate",)), is_host_bound=False).outcome == first.outcome


@pytest.mark.parametrize(("norm", "outcome"), [(2.5, "NO_BASELINE"), (2.6, "WRONG")])
def test_cell_of_which_nothing_is_recorded_has_to_compute_what_the_unsharded_model_does(tmp_path, norm, outcome):
    run = ScriptedRun(tmp_path, labelled(1), lambda *_: RECORDED_S)
    for path in (tmp_path / "baselines").rglob("*.json"):
        path.unlink()
    baselines.write(tmp_path / "baselines", invariants(cell(StrategyName.SINGLE, world_size=1)))
    run.candidate.changes = {("a", index): {"start_gradient_norm": norm} for index in range(3)}
    assert run.go() == {"a": outcome}


@pytest.mark.parametrize(
    "changes",
    [{"start_gradient_norm": 2.52}, {"losses": "1.01"}, {"end_gradient_norm": 260.0}, {"ledger": ()}],
    ids=lambda changes: next(iter(changes)),
)
def test_runs_that_differ_among_themselves_are_wrong_and_never_recorded(tmp_path, changes):
    """As those of a model that leaps from its first step: the next night would be held to one of them."""
    run = ScriptedRun(tmp_path, labelled(1), lambda *_: RECORDED_S, keep_provisional=True)
    for path in (tmp_path / "baselines").rglob("*.json"):
        path.unlink()
    if "losses" in changes:
        *others, last = run_record().ranks[0].losses
        changes = {"losses": (*others, 1.01 * last)}
    run.candidate.changes = {("a", 0): changes}
    assert run.go() == {"a": "WRONG"}
    (verdict,) = run.results.verdicts()
    assert verdict.reasons[0].startswith("equal runs differ: run 0: ")
    assert unfit(run.results.measurements()[0]) == verdict.reasons[0]
    assert not list((tmp_path / "state").rglob("*.json"))


def test_cell_beside_nothing_at_all_says_so(tmp_path):
    run = ScriptedRun(tmp_path, labelled(1), lambda *_: RECORDED_S)
    for path in (tmp_path / "baselines").rglob("*.json"):
        path.unlink()
    run.go()
    (verdict,) = run.results.verdicts()
    assert verdict.notes[0] == "losses and norms were compared with nothing: no unsharded tiny is recorded"
    longer = replace(cell(StrategyName.SINGLE, world_size=1), workload=replace(cell().workload, sequence_length=128))
    baselines.write(tmp_path / "baselines", invariants(longer))
    run.go()
    (verdict,) = run.results.verdicts()
    assert verdict.notes[0].endswith("no unsharded tiny with this workload is recorded")
