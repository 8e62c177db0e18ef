"""Change points on made-up series, and what is told of the environment between two test runs."""

import subprocess
import sys

import numpy as np
import pytest

from perf.facts.measurement import PEAK_ALLOCATED, STEP_TIME
from perf.measure.connection import ROOT
from perf.tell.change_points import LEAST_POINTS, change_points, changes
from perf.tell.history import gather
from strategies.spec import LinkProfile
from tests import factory
from tests.history_runs import keep, line

NOISE = 0.003
SEEDS = range(100)
ON_GPUS = factory.cell(size="0.6b", link=LinkProfile.NATIVE)


@pytest.fixture
def otava():
    return pytest.importorskip("otava.analysis", reason="the optional extra `history` is not installed")


def noisy(levels, seed, noise=NOISE):
    levels = np.asarray(levels, dtype=float)
    return levels * (1 + noise * np.random.default_rng(seed).standard_normal(len(levels)))


def places(series):
    ids = [point.run_id for point in series.points]
    return [ids.index(point.run_id) for point in change_points(series)]


def test_a_step_of_2_percent_after_20_points_is_found_at_its_place(otava):
    hits = [places(line(noisy([0.1] * 20 + [0.102] * 10, seed))) == [20] for seed in SEEDS]
    assert sum(hits) >= 98


def test_a_change_point_tells_both_levels_and_how_sure_it_is(otava):
    (found,) = change_points(line(noisy([0.1] * 20 + [0.102] * 10, 0)))
    assert found.old == pytest.approx(0.1, rel=2e-3)
    assert found.new == pytest.approx(0.102, rel=2e-3)
    assert found.change == pytest.approx(0.02, abs=3e-3)
    assert found.p_value < 1e-3


@pytest.mark.parametrize("noise", [NOISE, 0.02])
def test_noise_alone_gives_none_in_95_of_100_series(otava, noise):
    quiet = [change_points(line(noisy([0.1] * 30, seed, noise))) == () for seed in SEEDS]
    assert sum(quiet) >= 95


def test_a_slow_drift_of_twelve_times_0_8_percent_is_found_on_its_way(otava):
    levels = [0.1] * 10 + [0.1 * 1.008**step for step in range(1, 13)] + [0.1 * 1.008**12] * 6
    on_its_way = 0
    for seed in SEEDS:
        series = line(noisy(levels, seed))
        found = change_points(series)
        assert found, seed
        assert all(point.change >= 0.01 for point in found)
        on_its_way += all(10 <= place <= 22 for place in places(series))
    assert on_its_way >= 95


def test_a_step_below_1_percent_is_not_told_however_sure(otava):
    assert change_points(line(noisy([0.1] * 20 + [0.1008] * 20, 0, noise=1e-4))) == ()
    assert places(line(noisy([0.1] * 20 + [0.1012] * 20, 0, noise=1e-4))) == [20]


def test_getting_faster_is_a_change_too(otava):
    (found,) = change_points(line(noisy([0.1] * 15 + [0.09] * 15, 0)))
    assert found.change == pytest.approx(-0.1, abs=5e-3)


def test_values_that_repeat_to_the_byte_change_at_their_step(otava):
    peaks = [8 * 2**30] * 12 + [9 * 2**30] * 3
    assert places(line(peaks, metric=PEAK_ALLOCATED, of=ON_GPUS)) == [12]
    assert change_points(line([8 * 2**30] * 12, metric=PEAK_ALLOCATED, of=ON_GPUS)) == ()


def test_a_change_far_beyond_the_first_window_is_found_at_its_place(otava):
    assert places(line(noisy([0.1] * 120 + [0.104] * 30, 0))) == [120]


def test_a_few_test_runs_are_no_evidence():
    assert change_points(line([0.1] * (LEAST_POINTS - 2) + [0.2])) == ()


def test_without_otava_there_is_no_answer_rather_than_none_found():
    code = (
        "import sys; sys.modules['otava'] = None; from perf.tell.change_points import *; "
        "from tests.history_runs import line; "
        f"print(change_points(line([.1] * {LEAST_POINTS})), change_points(line([.1] * {LEAST_POINTS - 1})))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.stdout, done.stderr) == ("None ()\n", "")


def test_what_changed_is_told_at_the_first_test_run_that_has_it():
    old, new = {"torch": "2.12.0", "host": "node1"}, {"torch": "2.13.0", "host": "node1", "NCCL_ALGO": "Ring"}
    (found,) = changes([line([0.1] * 4, environments=[old, old, new, new])])
    assert found.run_id == "2026-09-03T02-00-00"
    assert found.texts == ("torch 2.12.0 -> 2.13.0", "NCCL_ALGO unset -> Ring")
    (_, back) = changes([line([0.1] * 3, environments=[old, new, old])])
    assert back.texts == ("torch 2.13.0 -> 2.12.0", "NCCL_ALGO Ring -> unset")


def test_commits_are_told_when_asked():
    environments = [{"commit": "a"}, {"commit": "b"}]
    series = line([0.1, 0.1], environments=environments)
    assert changes([series]) == ()
    assert changes([series], commits=True)[0].texts == ("commit a -> b",)


def test_another_recipe_is_a_change_between_two_lines():
    first, other = line([0.1, 0.1]), line([0.1], timed_steps=30, first_day=2)
    again = line([0.1], first_day=3)
    lines = [other, line([0.1, 0.1]), again]
    assert [change.texts for change in changes(lines)] == [
        ("recipe timed_steps: 10 -> 30",),
        ("recipe timed_steps: 30 -> 10",),
    ]
    assert changes([first]) == ()


def test_software_host_kernels_variables_and_commit_come_from_the_records(tmp_path):
    software = factory.SOFTWARE.__class__(torch="2.13.0", transformers="5", python="3.12", cuda="13.0", nccl="2.28.3")
    env = factory.environment(software=software, host="node2", commit="0123456789abcdef", dirty=True)
    keep(tmp_path, 0, 0.1)
    keep(tmp_path, 1, 0.1, env=env)
    lines = gather(tmp_path).lines(factory.cell().id, factory.CPU.key, STEP_TIME)
    assert changes(lines, commits=True)[0].texts == (
        "transformers 5.24.0 -> 5",
        "python 3.11.7 -> 3.12",
        "host node1 -> node2",
        "commit c0ffee -> 012345678 with uncommitted changes",
        "cuda unset -> 13.0",
        "nccl unset -> 2.28.3",
    )
