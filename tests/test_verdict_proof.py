"""Room perf/judge/verdict.py, proven: it agrees with an independent reference, and a broken judge is found out."""

import inspect
import json
import math
import types
from pathlib import Path

import msgspec
import pytest

from perf.facts.measurement import measure
from perf.judge import decision
from perf.judge import verdict as room
from perf.judge.decision import NINE_IN_TEN
from perf.judge.rule import Rule
from perf.judge.verdict import judge
from strategies.spec import LinkProfile, Mode
from tests.factory import (
    CPU,
    PLAN,
    baseline,
    cell,
    change_ranks,
    environment,
    invariants,
    measurement,
    origin,
    run_record,
)

RULE = Rule()
CASES = json.loads((Path(__file__).parent / "data" / "stage1_cases.json").read_text(encoding="utf-8"))
"""Made once by an independent reference of stage 1: logs of step times in, the decision and its numbers out."""
GIB = 2**30
GPU_CELL = cell(link=LinkProfile.NATIVE)


def judged(case):
    """A case of the reference through the judge: each log level becomes a run of steps of that length."""
    nights = tuple(tuple(math.exp(level) for level in night) for night in case["baseline"])
    of_runs = measurement(step_times_s=tuple(math.exp(level) for level in case["runs"]))
    return judge(of_runs, baseline(nights=nights), invariants(), RULE)


def test_stage_1_agrees_with_the_reference():
    for number, case in enumerate(CASES):
        verdict = judged(case)
        time = verdict.comparisons[-1]
        assert time.change == pytest.approx(case["change"], abs=1e-9), number
        assert time.tolerance == pytest.approx(case["tolerance"], abs=1e-9), number
        num_baseline_runs = sum(map(len, case["baseline"]))
        error = 1.25 * case["sd"] * math.sqrt(1 / 3 + 1 / num_baseline_runs)
        difference = math.log1p(case["change"])
        limits = [math.expm1(difference + sign * 1.96 * error) for sign in (-1, 1)]
        assert time.interval == pytest.approx(limits, abs=1e-9), number
        assert verdict.sensitivity == pytest.approx(case["tolerance"] + NINE_IN_TEN * error), number
        assert verdict.suspicious is case["suspicious"], number
        assert (verdict.outcome == "NOISY") is case["noisy"], number
        assert (verdict.outcome == "IMPROVED") is case["improved"], number
        regressed = not case["noisy"] and case["change"] > case["tolerance"]
        assert (verdict.outcome == "REGRESSED") is regressed, number


def test_cases_of_the_reference_reach_every_branch():
    assert len(CASES) == 300
    for name in ("noisy", "suspicious", "improved"):
        assert {case[name] for case in CASES} == {True, False}
    tolerances = {case["tolerance"] for case in CASES}
    assert min(tolerances) == RULE.floor
    assert max(tolerances) == RULE.cap
    assert len(tolerances) > 50


def planted(of=None, *, step_s=0.1, peak=10 * GIB, **changes):
    """Three runs on GPUs, with something planted in every rank of each."""
    of = of or GPU_CELL
    whole = measurement(of, step_times_s=(step_s,) * 3, allocated_bytes=(peak,) * 3)
    return measure(of, PLAN, [change_ranks(run, **changes) if changes else run for run in whole.runs])


RIGHT = run_record(GPU_CELL).ranks[0]
PLANTED = {
    "nothing": (planted(), "PASS"),
    "twice as fast": (planted(step_s=0.05), "IMPROVED"),
    "half the memory": (planted(peak=5 * GIB), "IMPROVED"),
    "twice as slow": (planted(step_s=0.2), "REGRESSED"),
    "5 % slower": (planted(step_s=0.105), "REGRESSED"),
    "twice the memory": (planted(peak=20 * GIB), "REGRESSED"),
    "64 MiB more memory": (planted(peak=10 * GIB + 2**26), "REGRESSED"),
    "twice as fast with twice the memory": (planted(step_s=0.05, peak=20 * GIB), "REGRESSED"),
    "half the memory twice as slow": (planted(step_s=0.2, peak=5 * GIB), "REGRESSED"),
    "NaN loss": (planted(losses=(*RIGHT.losses[:7], *(None for _ in RIGHT.losses[7:]))), "WRONG"),
    "another loss curve": (planted(losses=tuple(loss * 1.001 for loss in RIGHT.losses)), "WRONG"),
    "gradients 1.5 times too large": (planted(start_gradient_norm=2.5 * 1.5), "WRONG"),
    "no collective": (planted(step_s=0.05, ledger=()), "WRONG"),
    "tokens counted twice": (planted(tokens_per_step=512), "WRONG"),
    "missing losses": (planted(losses=()), "INVALID"),
    "truncated run": (planted(step_times_s=(0.01,) * 4), "INVALID"),
    "another recipe": (planted(cell(link=LinkProfile.NATIVE, micro_batch=4), step_s=0.05), "NO_BASELINE"),
}
STORED = baseline(GPU_CELL, nights=((0.1,) * 3,) * 3, allocated_bytes=10 * GIB)
RECORDED = invariants(GPU_CELL)


def missed(judge):
    """What is planted and not called by its name."""
    return [
        name
        for name, (of_runs, outcome) in PLANTED.items()
        if judge(of_runs, STORED, RECORDED, RULE).outcome != outcome
    ]


def test_everything_planted_is_called_by_its_name():
    assert missed(judge) == []


GROWN = "2 * sum(value > highest + room for value in values)"
MUTANTS = {
    "slower passes, faster fails": ("sign * math.expm1(change) > limit", "sign * math.expm1(change) < limit"),
    "old and new swapped": ("- self._old\n\n    def _error", "* -1 + self._old\n\n    def _error"),
    "slower is never called": ("Outcome.REGRESSED if is_slower else", "Outcome.PASS if is_slower else"),
    "faster is never called": ("Outcome.IMPROVED if self._exceeds", "Outcome.PASS if self._exceeds"),
    "a millisecond of either sign": ("sign * difference_s > least_s", "sign * difference_s < least_s"),
    "tolerance without a cap of sense": (
        "return self._rule.tolerance(self._sd, num_runs, self._num_baseline)",
        "return 0.5",
    ),
    "less memory fails": ("value > highest + room", "value < highest + room"),
    "share of runs inverted": (f"{GROWN} > len(values)", f"{GROWN} < len(values)"),
    "memory of baseline and run swapped": (
        "old, new = baseline.median(metric.name), measurement.median(metric)",
        "new, old = baseline.median(metric.name), measurement.median(metric)",
    ),
    "green hides red": ("ORDER = (\n", "ORDER = (\n    Outcome.PASS,\n"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_broken_comparison_is_found_out(monkeypatch, name):
    old, new = MUTANTS[name]
    sources = {of: inspect.getsource(of) for of in (decision, room)}
    (broken,) = [of for of, source in sources.items() if old in source]
    assert sources[broken].count(old) == 1, "the source has changed: write this mutant anew"
    mutant = types.ModuleType("perf.mutant")
    exec(compile(sources[broken].replace(old, new), name, "exec"), mutant.__dict__)
    if broken is decision:
        monkeypatch.setattr(room, "Judge", mutant.Judge)
    assert missed(judge if broken is decision else mutant.judge) != []


@pytest.mark.parametrize(
    ("gate", "planted_names"),
    [
        ("intrinsic_errors", {"tokens counted twice"}),
        ("gaps", {"missing losses", "truncated run"}),
        ("differences", {"another loss curve", "gradients 1.5 times too large", "no collective"}),
    ],
)
def test_missing_gate_is_found_out(monkeypatch, gate, planted_names):
    monkeypatch.setattr(room, gate, lambda *_: [])
    assert set(missed(judge)) == planted_names


def test_memory_that_is_not_compared_is_found_out(monkeypatch):
    monkeypatch.setattr(room, "_compare_memory", lambda *_: None)
    assert set(missed(judge)) >= {"twice the memory", "64 MiB more memory"}


def notes_of(of_runs):
    recorded = msgspec.structs.replace(invariants(of_runs.cell), graph_breaks=3)
    return judge(of_runs, baseline(of_runs.cell, nights=((0.1,) * 3,) * 3), recorded, RULE).notes


def test_notes_tell_outliers_stragglers_and_graph_breaks():
    assert notes_of(measurement()) == ()
    outlier = change_ranks(run_record(), step_times_s=(0.1,) * 9 + (1.2,))
    late = change_ranks(run_record(index=2), 1, arrivals_s=(100.2,))
    notes = notes_of(measure(cell(), PLAN, [outlier, run_record(index=1), late]))
    assert notes == (
        "1 outlier step (more than 1.5 x the median)",
        "rank 1 keeps the others waiting: 200 ms late at a collective",
    )
    compiled = cell(mode=Mode.COMPILE)
    state = msgspec.structs.replace(run_record(compiled).ranks[0].compile, graph_breaks=3)
    runs = [change_ranks(run, 0, compile=state) for run in measurement(compiled).runs]
    assert notes_of(measure(compiled, PLAN, runs)) == ("3 graph breaks",)


def test_changes_of_the_environment_since_the_newest_night_are_told():
    software = msgspec.structs.replace(origin().software, torch="2.14.0", nccl="2.29")
    now = environment(CPU, host="node2", software=software, variables={"OMP_NUM_THREADS": "1"})
    verdict = judge(measurement(env=now), baseline(nights=((0.1,) * 3,) * 3), invariants(), RULE)
    assert verdict.environment_changes == (
        "torch 2.13.0 -> 2.14.0",
        "nccl None -> 2.29",
        "host node1 -> node2",
        "OMP_NUM_THREADS unset -> 1",
    )
    assert judge(measurement(), baseline(), invariants(), RULE).environment_changes == ()
