"""Room perf/judge/selftest.py: the operating curve from recorded runs, made up and real."""

import math
import operator
import random
import re

import pytest
from msgspec.structs import replace

from perf.facts import jsonfile
from perf.facts.fault import Fault, FaultKind
from perf.facts.stats import robust_sd
from perf.gate import memory_found, numbers_off
from perf.judge.selftest import Sample, SelfTest, evaluate, fit, planted, samples_of, table
from perf.measure.connection import ROOT
from strategies.spec import LinkProfile
from tests.factory import cell, change_ranks, run_record
from tests.suite_runs import DDP

RECORDED = sorted((ROOT / "docs/two-h200/selftest").glob("*.json"))


def pool(*, between=0.002, step=0.005, slowdowns=(0.01, 0.03, 0.10), num_runs=20, honest=True):
    """Runs of 300 ms with each slowdown planted, twice as many without; `honest` False: nothing was really planted."""
    source, runs = random.Random(1), []
    for fault in planted(slowdowns, num_runs, memory=False):
        level = 0.3 * (1 + (fault.amount if fault and honest else 0)) * (1 + source.gauss(0, between))
        times = tuple(level * (1 + source.gauss(0, step)) for _ in range(10))
        runs.append(replace(run_record(index=len(runs), step_times_s=times), fault=fault))
    return samples_of(runs)


SWING = tuple(1 + 0.05 * math.sin(step) for step in range(10))


@pytest.mark.parametrize("shared", [(1.0,) * 10, SWING], ids=["steady", "swinging"])
def test_noise_of_a_pool_is_found_again(shared):
    """Also where the steps of every run swing by 5 % in the same way."""
    unchanged = [sample for sample in pool(between=0.01, num_runs=200) if not sample.planted]
    scaled = [tuple(map(operator.mul, sample.step_times_s, shared)) for sample in unchanged]
    noise = fit([replace(sample, step_times_s=times) for sample, times in zip(unchanged, scaled, strict=True)])
    assert noise.between_runs == pytest.approx(0.01, rel=0.15)
    assert noise.step == pytest.approx(0.005, rel=0.1)


def test_sound_gate_finds_what_is_planted_and_nothing_else():
    found = evaluate(DDP, pool(), 0.002, True)
    assert found.faults == []
    assert [point.planted for point in found.points] == [0.0, 0.01, 0.03, 0.10]
    none, one, three, ten = found.points
    assert (none.num_runs, one.num_runs) == (40, 20)
    assert none.alone == 0.0
    assert none.beside < 0.01
    assert one.alone < 0.05
    assert one.beside > 0.9, "the sensitive preset side by side"
    assert three.alone > 0.95
    assert ten.alone == ten.beside == 1.0
    assert ten.change == pytest.approx(0.10, abs=0.005)
    for point in found.points:
        assert point.alone == pytest.approx(point.simulated, abs=0.1)


def test_gate_that_finds_nothing_is_not_sound():
    faults = evaluate(DDP, pool(honest=False), 0.002, False).faults
    assert faults[0].startswith("10 % slower is found in ")
    assert faults[1] == "64 MiB more memory are not found"


def test_false_alarms_are_told():
    point = evaluate(DDP, pool(num_runs=5), 0.002, None).points[0]
    found = SelfTest(
        cell_id=DDP, noise=fit(pool(num_runs=5)), prior_sd=0.002, noisy=0.0, memory_found=None, samples=(),
        points=(replace(point, alone=0.02), replace(point, planted=0.1, alone=1.0)),
    )  # fmt: skip
    assert found.faults == ["2.0 % false alarms alone, with nothing planted"]
    assert "NOT SOUND: 2.0 % false alarms" in table(found)
    assert "not judged" not in table(found)


def test_run_that_is_called_wrong_though_it_computes_the_same_is_a_false_alarm():
    found = evaluate(DDP, pool(num_runs=5), 0.002, None, ["run 7: end gradient norm 1.9 -> 9"])
    assert found.faults[0] == "a run that computes the same is WRONG: run 7: end gradient norm 1.9 -> 9"
    assert "numbers: 1 difference\n" in table(found)
    assert "numbers: no differences" in table(replace(found, wrong=()))
    assert "numbers: not asked" in table(replace(found, wrong=None))


def test_numbers_of_each_run_are_held_to_those_of_all():
    of = cell(size="0.6b", link=LinkProfile.NATIVE)
    runs = [run_record(of, index=index) for index in range(5)]
    usual = runs[0].ranks[0].end_gradient_norm
    slow = Fault(kind=FaultKind.SLOW_STEP, amount=1)
    runs[4] = replace(change_ranks(runs[4], end_gradient_norm=4 * usual), fault=slow)
    runs[0] = change_ranks(runs[0], end_gradient_norm=usual / 2)
    assert numbers_off(of, runs) == [], "one that is off and last is not what the others are held to"
    runs[3] = change_ranks(runs[3], end_gradient_norm=6 * usual)
    (error,) = numbers_off(of, runs)
    assert error.startswith(f"equal runs differ: run 3: end gradient norm {usual:.6g} -> {6 * usual:.6g} ")
    runs[1] = change_ranks(runs[1], tokens_per_step=1)
    assert numbers_off(of, runs)[0].startswith("run 1: "), "what is wrong by itself is said alone"


def test_noisy_cell_is_said_not_to_be_gated():
    found = evaluate(DDP, pool(between=0.08, num_runs=10), 0.04, None)
    assert not found.is_gated
    assert "too noisy to gate" in table(found)
    assert "not judged" in table(found)
    assert "NOT SOUND" not in table(found)
    assert found.faults == []
    assert replace(found, wrong=("run 7: ...",)).faults == ["a run that computes the same is WRONG: run 7: ..."]


def test_everything_is_planted_in_turn_and_memory_three_times():
    one_round = [None, None, Fault(kind=FaultKind.SLOW_STEP, amount=0.01)]
    more = Fault(kind=FaultKind.EXTRA_MEMORY, amount=64.0)
    assert planted((0.01,), 1, memory=False) == one_round
    assert planted((0.01,), 4, memory=True) == [*[*one_round, more] * 3, *one_round]


def test_self_test_of_a_real_cell_measures_and_shows_its_curve(suite_runs):
    options = ("--perf-selftest", "--perf-selftest-runs=3", "--perf-selftest-slowdowns=1.0", "-k", "ddp")
    outcomes = suite_runs.run(*options)
    assert "self-test of the gate" in outcomes.text
    assert f"{DDP}: between runs" in outcomes.text
    (folder,) = (suite_runs.root / "results").glob("*/selftest")
    assert len(list(folder.glob(f"{DDP}/*.json"))) == 9
    assert (folder / f"{DDP}.json").exists()
    assert outcomes.exit_code in (0, 1, 8), "one cell alone may be as noisy as it likes"
    assert (outcomes.exit_code == 8) is ("not judged" in outcomes.text)
    found = jsonfile.read(folder / f"{DDP}.json", SelfTest)
    assert found.wrong == ()
    assert evaluate(DDP, found.samples, found.prior_sd, found.memory_found, ()) == found, "the file can be judged again"
    records = {path: path.read_bytes() for path in folder.glob(f"{DDP}/*.json")}
    (folder / DDP / "8.json").unlink()
    again = suite_runs.run(*options, f"--perf-resume={folder.parent}", "-n1")
    assert f"{DDP}: between runs" in again.text, "also of what a worker of xdist has found"
    assert (again.exit_code == 8) is ("not judged" in again.text)
    kept = {path: path.read_bytes() for path in records if path.name != "8.json"}
    assert kept.items() <= records.items(), "what was measured before the interruption stays"
    assert (folder / DDP / "8.json").exists()
    other = suite_runs.run(*options[:2], "--perf-selftest-slowdowns=2.0", "-k", "ddp", f"--perf-resume={folder.parent}")
    assert re.search(r"run 2 is of .*amount=1\.0.*, not .*amount=2\.0.*; start a new self-test", other.text)
    assert other.exit_code == 1
    none = suite_runs.run(*options, f"--perf-resume={suite_runs.root}")
    assert none.exit_code == pytest.ExitCode.USAGE_ERROR
    assert "is no self-test: it has no selftest/" in none.text


def test_self_test_of_which_nothing_can_run_here_is_not_green(suite_runs, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    on_a_gpu = suite_runs.matrix.read_text().replace('"gloo"', '"native"')
    suite_runs.matrix.write_text(on_a_gpu)
    outcomes = suite_runs.run("--perf-selftest", "-k", "ddp")
    assert outcomes.exit_code == 8, outcomes.text
    assert not list((suite_runs.root / "results").glob("*"))


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("--perf-steps=1", "--perf-steps 1: a self-test needs at least 2 timed steps"),
        ("--perf-soak=1", "--perf-soak 1: a self-test needs at least 2 timed steps"),
        *(
            (f"--perf-selftest-slowdowns=0.01,{odd}", "write fractions above 0")
            for odd in ("nan", "inf", "-1", "1e300")
        ),
        ("--perf-time-budget=1h", "--perf-time-budget plans whole cells"),
        ("--perf-plant=slow_step=1", "a self-test plants its own faults"),
        ("--perf-selftest-slowdowns=fast", "write fractions above 0"),
        ("--perf-selftest-slowdowns=0.0", "write fractions above 0"),
        ("--perf-selftest-runs=2", "must be at least 3"),
    ],
)
def test_self_test_that_cannot_be_meant_is_refused(suite_runs, option, says):
    outcomes = suite_runs.run("--perf-selftest", option)
    assert outcomes.exit_code == pytest.ExitCode.USAGE_ERROR
    assert says in outcomes.text


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_recorded_self_tests_of_gpus_are_what_their_runs_say_today(path):
    recorded = jsonfile.read(path, SelfTest)
    found = evaluate(recorded.cell_id, recorded.samples, recorded.prior_sd, recorded.memory_found)
    assert [(point.alone, point.beside) for point in found.points] == [
        (point.alone, point.beside) for point in recorded.points
    ]
    assert found.noise.step == pytest.approx(recorded.noise.step)
    assert found.faults == []
    none, one, three = found.points
    assert (none.num_runs, one.num_runs, three.num_runs) == (40, 20, 20)
    assert (none.planted, one.planted, three.planted) == (0.0, 0.01, 0.03)
    assert (none.alone, none.beside) == (0.0, 0.0)
    assert three.alone == 1.0, "found by the default preset in every resample"
    assert one.beside >= 0.9, "found side by side by the sensitive preset"
    assert three.simulated == pytest.approx(three.alone, abs=0.02)
    assert found.memory_found


def test_readme_says_what_the_recorded_self_tests_say():
    assert len(RECORDED) >= 2
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for path in RECORDED:
        recorded = jsonfile.read(path, SelfTest)
        none, one, three = recorded.points
        apart = robust_sd([sample.level for sample in recorded.samples if not sample.planted])
        row = [
            f"`{recorded.cell_id.split('-')[0]}`",
            *(f"{100 * sd:.2f} %" for sd in (apart, recorded.noise.between_runs, recorded.noise.step)),
            f"{100 * none.alone:.1f} %, side by side {100 * none.beside:.1f} %",
            *(f"+{100 * one.change:.2f} %", f"{100 * one.beside:.1f} %"),
            *(f"+{100 * three.change:.2f} %", f"{100 * three.alone:.1f} %"),
        ]
        assert f"| {' | '.join(row)} |" in readme


def test_samples_are_the_runs_whose_steps_mean_something():
    faults = planted((0.01,), 1, memory=True)
    runs = [replace(run_record(index=index), fault=fault) for index, fault in enumerate(faults)]
    times = runs[0].step_times_s
    assert samples_of(runs) == tuple(Sample(planted=slowdown, step_times_s=times) for slowdown in (0.0, 0.0, 0.01))


@pytest.mark.parametrize(
    ("peak_gib", "more_mib", "found"), [(50, 64, True), (50, 0, False), (62, 64, True), (63, 64, None)]
)
def test_extra_memory_is_asked_of_cells_in_which_it_is_beyond_the_tolerance(peak_gib, more_mib, found):
    of, peak = cell(link=LinkProfile.NATIVE), peak_gib * 2**30
    runs = [run_record(of, index=index, allocated_bytes=peak) for index in range(3)]
    assert memory_found(of, runs) is None
    fault = Fault(kind=FaultKind.EXTRA_MEMORY, amount=64.0)
    more = [run_record(of, index=index, allocated_bytes=peak + more_mib * 2**20) for index in range(3, 6)]
    assert memory_found(of, [*runs, *(replace(run, fault=fault) for run in more)]) is found
