"""Room perf/trials.py where everything moves: shifts, drift, failures, resumed test runs; with scripted step times."""

import pytest
from msgspec.structs import replace

from perf.facts import jsonfile
from perf.facts.failure import FailureKind, LaunchError
from perf.facts.record import MemoryPeaks, RunRecord
from perf.judge import baseline as baselines
from tests.factory import PLAN, baseline, change_ranks, gpu_use, run_record
from tests.scripted_suite import NODE, RECORDED_S, ScriptedRun, alone, go_or_stop, labelled

pytestmark = pytest.mark.usefixtures("alone")
__all__ = ["alone"]
CRASH = LaunchError(FailureKind.CRASH, "rank 0: KeyError: 'ep'")
QUIET = dict.fromkeys("abcdef", "PASS")


def slower(percent):
    return RECORDED_S * (1 + percent / 100)


@pytest.mark.parametrize("outlier", ["a", "b"])
def test_resumed_test_run_says_what_it_said_before(tmp_path, outlier):
    """The suite moved by 2 %, one cell by 4.2 %: less the shift, that is no regression, today and when resumed."""
    script = lambda label, _: slower(4.2 if label == outlier else 2.0)  # noqa: E731
    first = ScriptedRun(tmp_path, labelled(8), script)
    outcomes = first.go()
    assert outcomes[outlier] == "ENVIRONMENT"
    resumed = ScriptedRun(tmp_path, labelled(8), script)
    assert resumed.go() == outcomes
    assert resumed.candidate.made == []
    told = resumed.results.shift()
    ScriptedRun(tmp_path, labelled(2), script).go()
    assert resumed.results.shift() == told, "two cells of it cannot take that back"


def resumed_after(first, change):
    """The runs that a resumed test run makes once the third run of cell `a` is a changed one."""
    path = first.results.folder / "runs" / first.cells[0].id / "2.json"
    jsonfile.write(path, change(jsonfile.read(path, RunRecord)))
    again = ScriptedRun(
        first.results.folder.parent.parent, first.cells, lambda *_: slower(30), reference=lambda *_: slower(0)
    )
    again.go()
    return again.candidate.made


def a_step_less_of_warm_up(run):
    """As an earlier version made it: whole, by the plan that it had."""
    one, plan = run.ranks[0], replace(run.plan, warmup_steps=run.plan.warmup_steps - 1)
    return replace(change_ranks(run, losses=one.losses[1:], warmup_times_s=one.warmup_times_s[1:]), plan=plan)


def test_run_of_another_warm_up_is_made_again_and_a_disturbed_one_unless_it_is_of_a_pair(tmp_path):
    hot = replace(gpu_use("GPU-1", used_bytes=2**30), throttled=("hardware thermal slowdown",))
    quick = ScriptedRun(tmp_path / "a", labelled(1), lambda *_: slower(0), reference=lambda *_: slower(0))
    assert quick.go() == {"a": "PASS"}
    assert not quick.reference.made
    assert resumed_after(quick, lambda run: replace(run, gpus=(hot,)))[:1] == [("a", 2)]
    early = ScriptedRun(tmp_path / "b", labelled(1), lambda *_: slower(0), reference=lambda *_: slower(0))
    early.go()
    assert resumed_after(early, a_step_less_of_warm_up)[:1] == [("a", 2)]
    paired = ScriptedRun(tmp_path / "c", labelled(1), lambda *_: slower(30), reference=lambda *_: slower(0))
    assert paired.go() == {"a": "REGRESSED"}
    assert resumed_after(paired, lambda run: replace(run, gpus=(hot,))) == []


@pytest.mark.parametrize("reference", [None, lambda *_: slower(0)], ids=["alone", "beside a good build"])
def test_cell_that_stayed_is_not_red_where_others_became_faster(tmp_path, reference):
    def script(label, index):
        if label != "f":
            return slower(-3)
        return slower(1.6 if index < 3 else 0.2)

    run = ScriptedRun(tmp_path, labelled(6), script, reference=reference)
    assert run.go() == dict.fromkeys("abcde", "IMPROVED") | {"f": "PASS"}
    assert run.results.shift().change < -0.02, "it is told all the same"


def test_machine_that_recovered_makes_no_cell_red(tmp_path):
    script = lambda label, index: slower((2.0 if label == "h" else 1.2) if index < 3 else -0.5)  # noqa: E731
    run = ScriptedRun(tmp_path, labelled(8), script)
    assert set(run.go().values()) == {"PASS"}
    assert run.results.shift().drift < -0.015


def test_whole_suite_that_is_slower_beside_the_reference_is_red_and_asks_why(tmp_path):
    """Also the cells that were not among the quiet ones which asked the reference."""
    run = ScriptedRun(tmp_path, labelled(6), lambda *_: slower(6), reference=lambda *_: slower(0))
    assert set(run.go().values()) == {"REGRESSED"}
    beside = {label for label, _ in run.reference.made}
    assert len(beside) == 4
    asked = [cell for cell in run.cells if run.results.reference_runs(cell.id)]
    assert {cell.label for cell in asked} == beside


def test_compiler_that_got_worse_is_no_machine_that_moved(tmp_path):
    """Five of eight cells are slower beside the reference, three of the four quietest are not; `c` was unlucky once."""

    def script(label, index):
        if label == "c":
            return slower(2.2 if index < 3 else 0)
        return slower(0 if label in "ab" else 3)

    run = ScriptedRun(tmp_path, labelled(8), script, reference=lambda *_: slower(0))
    assert run.go() == dict.fromkeys("abc", "PASS") | dict.fromkeys("defgh", "REGRESSED")
    assert run.results.shift().is_part_of_the_build
    compared = {label for label, _ in run.reference.made}
    assert compared >= set("cdefgh"), "each by pairs of its own"


def test_reference_that_gives_no_record_is_not_asked_of_more_cells(tmp_path):
    """Eight of twelve cells moved; the four quietest are not among them, and the reference fails in each of these."""

    def broken(*_):
        raise CRASH

    script = lambda label, _: slower(0 if label in "abcd" else 3)  # noqa: E731
    run = ScriptedRun(tmp_path, labelled(12), script, reference=broken)
    run.go()
    assert (run.results.shift().beside, run.results.shift().suspicious_beside) == (None, None)
    assert {label for label, _ in run.reference.made} == set("abcd")


def test_sensitive_preset_side_by_side_needs_no_baseline_that_carries_it(tmp_path):
    cells = labelled(5)
    run = ScriptedRun(
        tmp_path, cells, lambda label, _: slower(1.5 if label == "a" else 0), reference=lambda *_: slower(0),
        side_by_side=True, preset="sensitive",
    )  # fmt: skip
    one_night = baseline(cells[0], nights=((RECORDED_S,) * 3,), machine=NODE.machine_for(cells[0]))
    baselines.write(tmp_path / "baselines", one_night)
    assert run.go() == dict.fromkeys("bcde", "PASS") | {"a": "REGRESSED"}


def test_test_run_that_was_interrupted_in_the_pairs_finds_the_shift_that_it_would_have_found(tmp_path):
    """The breaker is given first looks, although pairs with another change are there already."""

    arms = {"a": 10, "b": 5, "c": 8, "d": -2}, {"a": 10, "b": 5, "c": 5, "d": 5}
    whole = go_or_stop(tmp_path / "whole", *arms)
    with pytest.raises(StopIteration):
        go_or_stop(tmp_path / "halves", *arms, 33)
    assert go_or_stop(tmp_path / "halves", *arms) == whole


@pytest.mark.parametrize("hungry", "af")
def test_cell_that_needs_more_memory_does_not_hide_that_all_became_slower(tmp_path, hungry):
    """Its verdict needs no more runs; the breaker waits for the first looks of the others even then."""
    cells = labelled(6)
    run = ScriptedRun(tmp_path, cells, lambda *_: slower(5))
    for one in cells:
        nights, machine = ((RECORDED_S,) * 3,) * 3, NODE.machine_for(one)
        recorded = baseline(one, nights=nights, machine=machine, allocated_bytes=4 * 2**30)
        baselines.write(tmp_path / "baselines", recorded)
        allocated_bytes = 4 * 2**30 + (200 * 2**20 if one.label == hungry else 0)
        memory = MemoryPeaks(
            allocated_bytes=allocated_bytes, reserved_bytes=5 * 2**30, resident_bytes=2**29, allocator_retries=0
        )
        run.candidate.changes |= {(one.label, index): {"memory": memory} for index in range(9)}
    assert run.go() == dict.fromkeys("abcdef", "ENVIRONMENT") | {hungry: "REGRESSED"}


def test_failure_is_told_although_no_time_is_left(tmp_path):
    """A hang takes the whole budget, and is no cell for which there was no time."""

    def script(label, _):
        if label == "b":
            run.suite.budget._begun -= 1000
            raise CRASH
        return slower(0)

    run = ScriptedRun(tmp_path, labelled(3), script, time_budget_s=600.0)
    assert run.go() == {"a": "PASS", "b": "ERROR", "c": "NOT_RUN"}


def test_reference_that_fails_is_no_error_of_the_candidate(tmp_path):
    def broken(*_):
        raise CRASH

    script = lambda label, _: slower(1.7 if label == "a" else 0)  # noqa: E731
    run = ScriptedRun(tmp_path, labelled(3), script, reference=broken)
    assert run.go() == {"a": "INVALID", "b": "PASS", "c": "PASS"}
    verdict = run.results.verdicts()[0]
    assert verdict.reasons[0].startswith("the reference gave no record: CRASH: rank 0: KeyError: 'ep'")


def control_of(tmp_path):
    """Label of the cell that a test run of four measures first and last."""
    asked = ScriptedRun(tmp_path / "asked", labelled(4), lambda *_: slower(0))
    return asked.trials.common.choose_control(labelled(4)).label


@pytest.mark.parametrize(
    ("changes", "outcome", "says"),
    [
        ({"losses": (None,) * 15}, "WRONG", "WRONG ddp-tiny-eager-w2-gloo"),
        ({"losses": tuple(1.01 * loss for loss in run_record().ranks[0].losses)}, "WRONG", "measured again: "),
        ({"step_times_s": (0.11,) * 4}, "PASS", "whether the machine drifted is not known"),
    ],
    ids=["not finite", "another curve", "cut off"],
)
def test_control_cell_that_is_wrong_when_measured_again_is_said_to_be(tmp_path, changes, outcome, says):
    label = control_of(tmp_path)
    run = ScriptedRun(tmp_path, labelled(4), lambda *_: slower(0))
    run.candidate.changes = {(label, index): changes for index in (3, 4, 5)}
    assert run.go() == dict.fromkeys("abcd", "PASS") | {label: outcome}
    (remark,) = run.trials.common.remarks
    assert says in remark
    assert run.results.shift() is None


def test_control_cell_that_fails_when_measured_again_is_an_error_of_its_own(tmp_path):
    """The suspicious cell that made it run again is judged on."""
    label = control_of(tmp_path)
    suspicious = next(cell.label for cell in labelled(4) if cell.label != label)

    def script(of, index):
        if of == label and index >= 3:
            raise CRASH
        return slower(4 if of == suspicious else 0)

    run = ScriptedRun(tmp_path, labelled(4), script)
    outcomes = run.go()
    assert outcomes[label] == "ERROR"
    assert outcomes[suspicious] == "REGRESSED"
    assert "KeyError: 'ep'" in run.trials.common.remarks[0]


def test_half_a_pair_is_left_alone_when_a_test_run_goes_on(tmp_path):
    """Interrupted between the two runs of a pair: their neighbours in time are gone."""
    script = lambda label, _: slower(1.7 if label == "a" else 0)  # noqa: E731
    begun = ScriptedRun(tmp_path, labelled(3), script, reference=script)
    for of in begun.cells:
        begun.suite.measure(of, 6)
    begun.suite._write(begun.reference, begun.reference.run(begun.cells[0], 6, PLAN))
    resumed = ScriptedRun(tmp_path, labelled(3), script, reference=script)
    assert set(resumed.go().values()) == {"PASS"}
    pairs = [("a", index) for index in (7, 8, 9, 10)]
    assert (resumed.reference.made, resumed.candidate.made) == (pairs, pairs)


def test_machine_that_moved_is_the_same_to_a_resumed_test_run_with_a_reference(tmp_path):
    script = lambda *_: slower(2.0)  # noqa: E731
    first = ScriptedRun(tmp_path, labelled(6), script, reference=script)
    outcomes = first.go()
    assert set(outcomes.values()) == {"ENVIRONMENT"}
    resumed = ScriptedRun(tmp_path, labelled(6), script, reference=script)
    assert resumed.go() == outcomes
    assert resumed.results.shift().change == pytest.approx(0.0198, abs=1e-3)
    assert (resumed.candidate.made, resumed.reference.made) == ([], [])
