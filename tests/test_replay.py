"""Room perf/tell/replay.py: pytest-benchmark shows the recorded steps, every one, and measures nothing itself."""

import json
import os
import subprocess
import sys

import pytest

from perf.measure.connection import ROOT, python_path
from perf.tell.replay import ReplayClock, replay

EXACT = [0.5, 0.25, 2.0, 0.125]
"""Sums of these are exact in binary."""
ROUNDED = [0.1, 0.3, 0.2, 1234.5, 0.1]

TEST_FILE = f"""
import pytest
from perf.tell.replay import CLOCK, replay

@pytest.mark.benchmark(timer=CLOCK)
@pytest.mark.parametrize("steps", [{EXACT}, {ROUNDED}, [0.5]], ids=["exact", "rounded", "one"])
def test_cell(benchmark, steps):
    replay(benchmark, steps, {{"cell": "ddp", "run_step_times_s": steps[:2]}})

@pytest.mark.benchmark(timer=CLOCK)
def test_nothing(benchmark):
    replay(benchmark, [], {{"cell": "none"}})
    assert benchmark.extra_info == {{}}
"""


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """What pytest-benchmark's JSON says of each test, by its name."""
    folder = tmp_path_factory.mktemp("replay")
    (folder / "test_replayed.py").write_text(TEST_FILE)
    report = folder / "benchmark.json"
    others = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "test_replayed.py", "-p", "no:cacheprovider", f"--benchmark-json={report}"],
        cwd=folder,
        env=others | {"PYTHONPATH": python_path(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "4 passed" in result.stdout
    return {entry["name"]: entry for entry in json.loads(report.read_text())["benchmarks"]}


@pytest.mark.parametrize(("name", "steps"), [("exact", EXACT), ("rounded", ROUNDED), ("one", [0.5])])
def test_benchmark_shows_each_recorded_step_as_a_round(shown, name, steps):
    stats = shown[f"test_cell[{name}]"]["stats"]
    tolerance = 0 if name != "rounded" else 1e-12
    assert stats["data"] == pytest.approx(steps, abs=tolerance, rel=tolerance)
    assert (stats["rounds"], stats["iterations"]) == (len(steps), 1)
    assert stats["min"] == pytest.approx(min(steps), abs=tolerance, rel=tolerance)
    assert stats["max"] == pytest.approx(max(steps), abs=tolerance, rel=tolerance)


def test_benchmark_computes_its_statistics_from_the_recorded_steps(shown):
    assert shown["test_cell[exact]"]["stats"]["median"] == 0.375
    assert shown["test_cell[exact]"]["stats"]["mean"] == 2.875 / 4


def test_benchmark_carries_the_extra_info_of_its_own_test(shown):
    assert shown["test_cell[exact]"]["extra_info"] == {"cell": "ddp", "run_step_times_s": EXACT[:2]}
    assert shown["test_cell[rounded]"]["extra_info"] == {"cell": "ddp", "run_step_times_s": ROUNDED[:2]}


def test_nothing_recorded_leaves_no_benchmark(shown):
    assert sorted(shown) == ["test_cell[exact]", "test_cell[one]", "test_cell[rounded]"]


def test_clock_reads_the_borders_of_each_step_and_then_stands_still():
    clock = ReplayClock()
    assert [clock(), clock()] == [0.0, 0.0]
    clock.load([1.0, 0.5])
    assert [clock() for _ in range(6)] == [0.0, 1.0, 1.0, 1.5, 1.5, 1.5]
    clock.load([2.0])
    assert [clock() for _ in range(3)] == [0.0, 2.0, 2.0]


def test_nothing_to_show_leaves_the_fixture_alone():
    replay(None, [], {"cell": "none"})
