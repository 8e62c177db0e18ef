"""Room perf/common_shift.py where a test run is resumed, and perf/arms.py where the reference cannot be asked."""

from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from perf.arms import Arms
from perf.facts.failure import ReferenceFailure
from perf.facts.measurement import gaps
from perf.judge import baseline as baselines
from perf.judge.rule import Override
from perf.measure.reference import Reference
from perf.settings import Settings
from tests.factory import PLAN, baseline
from tests.scripted_suite import NODE, RECORDED_S, ScriptedRun, alone, go_or_stop, labelled

pytestmark = pytest.mark.usefixtures("alone")
__all__ = ["alone"]


def slower(percent):
    return RECORDED_S * (1 + percent / 100)


def test_machine_that_became_slower_before_a_test_run_went_on_is_seen_as_one(tmp_path):
    """Seven cells, then two more on a machine that is 5 % slower: the control cell is measured again."""
    first = ScriptedRun(tmp_path, labelled(7), lambda *_: slower(0))
    assert set(first.go().values()) == {"PASS"}
    resumed = ScriptedRun(tmp_path, labelled(9), lambda *_: slower(5))
    assert resumed.go() == dict.fromkeys("abcdefg", "PASS") | dict.fromkeys("hi", "ENVIRONMENT")
    assert [made for made in resumed.candidate.made if made[0] not in "hi"] == [("a", 6), ("a", 7), ("a", 8)]
    assert resumed.results.shift().drift == pytest.approx(0.0488, abs=1e-3)


@pytest.fixture
def no_server(tmp_path):
    """Both builds, of which the reference is an interpreter that ends at once."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho started >> {tmp_path}/log; exit 3\n")
    python.chmod(0o755)
    settings = Settings(
        matrix="smoke", plan=PLAN, baselines=tmp_path, state=tmp_path, deadline_s=60.0,
        reference=Reference(said="broken", python=str(python)),
    )  # fmt: skip
    arms = Arms(settings, NODE)
    arms.candidate = SimpleNamespace(imported=None)
    yield arms
    arms.close()


def test_reference_whose_server_does_not_start_is_tried_once_and_no_error_of_the_candidate(tmp_path, no_server):
    for _ in range(2):
        with pytest.raises(ReferenceFailure, match="the reference, broken: "):
            no_server.reference()
    assert (tmp_path / "log").read_text() == "started\n"
    run = ScriptedRun(
        tmp_path, labelled(6), lambda label, _: slower(6 if label in "ab" else 0), reference=lambda *_: slower(0)
    )
    run.suite._arms.reference = no_server.reference
    assert run.go() == dict.fromkeys("ab", "INVALID") | dict.fromkeys("cdef", "PASS")


@pytest.mark.parametrize("pairs", [2, 6])
def test_override_of_the_pairs_is_how_many_runs_a_cell_has(tmp_path, pairs):
    few = Override(cells="*", reason="long steps", changes={"pairs": pairs, "noisy_pairs": pairs, "cap": 0.5})
    run = ScriptedRun(
        tmp_path, labelled(1), lambda *_: slower(0), reference=lambda *_: slower(0),
        side_by_side=True, overrides=(few,), plan=replace(PLAN, runs=4),
    )  # fmt: skip
    assert run.go() == {"a": "PASS"}
    (measurement,) = run.results.measurements()
    assert (len(measurement.runs), measurement.plan.runs, gaps(measurement)) == (pairs, pairs, [])


def test_cell_that_lacks_runs_has_to_fit_into_the_time_that_is_left(tmp_path):
    """Screened once, then to have three runs: there is time for none of them, and none is lost."""
    screened = ScriptedRun(tmp_path, labelled(3), lambda *_: slower(0), plan=replace(PLAN, runs=1))
    screened.go()
    resumed = ScriptedRun(tmp_path, labelled(3), lambda *_: slower(0), time_budget_s=600.0)
    resumed.suite.budget._begun -= 1000
    assert {resumed.trials.postponed(of) is None for of in resumed.cells} == {False}
    done = ScriptedRun(tmp_path, labelled(3), lambda *_: slower(0), time_budget_s=600.0, plan=replace(PLAN, runs=1))
    done.suite.budget._begun -= 1000
    assert {done.trials.postponed(of) for of in done.cells} == {None}, "nothing is left to be done"


@pytest.mark.parametrize("most_runs", [25, 31, 38])
def test_test_run_that_is_slower_everywhere_ends_as_it_would_have_without_the_interruption(tmp_path, most_runs):
    """The control cell is as fast as beside the reference: its own pairs say so, in one piece or in two."""

    slow = dict.fromkeys("abcdef", 17.6) | dict.fromkeys("ac", 5.0)
    arms = slow, dict.fromkeys("abcdef", 5.0) | {"e": 17.6}
    whole = go_or_stop(tmp_path / "whole", *arms)
    assert whole[0]["a"] == "ENVIRONMENT"
    assert whole[0]["b"] == "REGRESSED"
    with pytest.raises(StopIteration):
        go_or_stop(tmp_path / "halves", *arms, most_runs)
    assert go_or_stop(tmp_path / "halves", *arms) == whole


def test_resumed_test_run_is_no_bar_to_itself(tmp_path):
    """Its night was approved, or recorded as a provisional baseline, before it went on: it would agree with itself."""
    first = ScriptedRun(tmp_path, labelled(1), lambda *_: slower(30))
    first.go()
    own = baseline(first.cells[0], nights=((slower(30),) * 3,), machine=NODE.machine_for(first.cells[0]))
    night = replace(own.nights[0], origin=replace(own.nights[0].origin, run_id="run"))
    resumed = ScriptedRun(tmp_path, labelled(1), lambda *_: slower(30))
    baselines.write(tmp_path / "baselines", replace(own, nights=(night,)))
    assert resumed.go() == {"a": "NO_BASELINE"}
    other = replace(own.nights[0], runs=tuple(replace(one, step_times_s=(RECORDED_S,) * 10) for one in night.runs))
    baselines.write(tmp_path / "baselines", replace(own, nights=(other, night)))
    assert ScriptedRun(tmp_path, labelled(1), lambda *_: slower(30)).go() == {"a": "REGRESSED"}, "by the other night"


def test_half_a_pair_gets_no_partner_from_another_time(tmp_path):
    """Neither as a run of a pair nor as a fresh run of the candidate alone."""
    begun = ScriptedRun(tmp_path, labelled(1), lambda *_: slower(0), reference=lambda *_: slower(0))
    of = begun.cells[0]
    begun.suite.measure(of, 3)
    begun.suite._write(begun.reference, begun.reference.run(of, 3, PLAN))
    resumed = ScriptedRun(tmp_path, labelled(1), lambda *_: slower(0), reference=lambda *_: slower(0))
    resumed.suite.measure(of, 6)
    resumed.suite.measure_beside(of, 2)
    assert resumed.candidate.made == [("a", index) for index in (4, 5, 6, 7, 8)]
    assert resumed.reference.made == [("a", 7), ("a", 8)]
