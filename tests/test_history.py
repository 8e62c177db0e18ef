"""The history: one value for each test run and cell; what cannot be compared is not joined, what is broken is named."""

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from PIL import Image

from perf.facts.measurement import PEAK_ALLOCATED, PEAK_RESIDENT, STEP_TIME, THROUGHPUT
from perf.facts.outcome import Outcome
from perf.judge import baseline as baselines
from perf.judge.band import band, rule_of
from perf.judge.baseline import Store
from perf.tell.gathering import gather as gather_results
from perf.tell.history import gather
from perf.tell.results import Results
from strategies.spec import LinkProfile, Mode
from tests import factory
from tests.history_runs import keep
from tests.history_runs import line as series
from tools.history import bands

ROOT = Path(__file__).parents[1]
DDP = factory.cell()
COMPILED = factory.cell(mode=Mode.COMPILE)
ON_GPUS = factory.cell(size="0.6b", link=LinkProfile.NATIVE)


def lines(history, metric=STEP_TIME, cell_id=DDP.id, machine=factory.CPU):
    return history.lines(cell_id, machine.key, metric)


def medians(history, metric=STEP_TIME):
    return [[point.median for point in line.points] for line in lines(history, metric)]


def test_a_test_run_is_one_value_the_median_with_the_smallest_and_the_largest_run(tmp_path):
    keep(tmp_path, 0, 0.1, 0.13, 0.09)
    keep(tmp_path, 1, 0.2)
    history = gather(tmp_path)
    (line,) = lines(history)
    assert [(p.median, p.low, p.high, p.num_runs) for p in line.points] == [(0.1, 0.09, 0.13, 3), (0.2, 0.2, 0.2, 1)]
    assert line.points[0].run_id == "2026-09-01T02-00-00"
    (line,) = lines(history, THROUGHPUT)
    assert [(p.median, p.low, p.high) for p in line.points] == [(5120, 512 / 0.13, 512 / 0.09), (2560, 2560, 2560)]


def test_memory_is_told_where_it_was_measured(tmp_path):
    keep(tmp_path, 0, 0.1)
    keep(tmp_path, 1, 0.1, of=ON_GPUS, allocated_bytes=2**33, env=factory.environment(factory.H200X2))
    history = gather(tmp_path)
    assert medians(history, PEAK_RESIDENT) == [[400 * 2**20]]
    assert lines(history, PEAK_ALLOCATED) == ()
    (line,) = lines(history, PEAK_ALLOCATED, ON_GPUS.id, factory.H200X2)
    assert [point.median for point in line.points] == [2**33]


def test_points_stand_in_the_order_of_time_whatever_the_folders_are_called(tmp_path):
    for day, name in ((2, "a"), (0, "c"), (1, "b")):
        keep(tmp_path, day, 0.1 + day, name=name)
    assert medians(gather(tmp_path)) == [[0.1, 1.1, 2.1]]


def test_another_recipe_starts_a_new_line_and_an_old_one_goes_on(tmp_path):
    for day, steps in enumerate((10, 10, 30, 10)):
        keep(tmp_path, day, 0.1 + day, timed_steps=steps)
    assert medians(gather(tmp_path)) == [[0.1, 1.1, 3.1], [2.1]]
    assert [line.recipe.timed_steps for line in lines(gather(tmp_path))] == [10, 30]


def test_machines_are_never_joined(tmp_path):
    other = msgspec.structs.replace(factory.CPU, count=4)
    keep(tmp_path, 0, 0.1)
    keep(tmp_path, 1, 0.2, env=factory.environment(other))
    history = gather(tmp_path)
    assert medians(history) == [[0.1]]
    assert history.places == ((DDP.id, "cpu-test-cpu-2c"), (DDP.id, "cpu-test-cpu-4c"))


def test_planted_and_unsound_test_runs_are_left_out_and_counted(tmp_path):
    keep(tmp_path, 0, 0.1)
    keep(tmp_path, 1, 0.2, fault="slow_step=0.5", outcome=Outcome.REGRESSED)
    for day, outcome in enumerate((Outcome.WRONG, Outcome.INVALID, Outcome.ERROR), start=2):
        keep(tmp_path, day, 0.3, outcome=outcome)
    for day, outcome in enumerate((Outcome.NOISY, Outcome.REGRESSED, Outcome.NO_BASELINE, None), start=5):
        keep(tmp_path, day, 0.4, outcome=outcome)
    history = gather(tmp_path)
    assert medians(history) == [[0.1, 0.4, 0.4, 0.4, 0.4]]
    reasons = ["planted fault slow_step", "WRONG", "INVALID", "ERROR"]
    assert [one.reason for one in history.left_out_of(DDP.id, factory.CPU.key)] == reasons


def test_comparisons_side_by_side_are_no_points_of_it(tmp_path):
    """What was on trial there may be another build, or this one under a variable."""
    keep(tmp_path, 0, 0.1)
    compared = keep(tmp_path, 1, 0.2)
    beside = "every cell of this checkout with NCCL_P2P_DISABLE=1 beside itself without"
    compared.write_manifest(msgspec.structs.replace(compared.manifest(), beside=beside, side_by_side=True))
    history = gather(tmp_path)
    assert medians(history) == [[0.1]]
    assert [one.reason for one in history.left_out_of(DDP.id, factory.CPU.key)] == [beside]


def test_one_planted_run_of_three_is_enough(tmp_path):
    results = keep(tmp_path, 0, 0.1, 0.1)
    planted = keep(tmp_path / "elsewhere", 0, 0.1, fault="slow_step=0.5").runs(DDP.id)[0]
    results.write_run(msgspec.structs.replace(planted, index=2))
    history = gather(tmp_path)
    assert (history.series, len(history.left_out)) == ((), 1)


def test_damaged_and_foreign_folders_are_named_and_skipped(tmp_path):
    keep(tmp_path, 0, 0.1)
    (tmp_path / "notes").mkdir()
    broken = {
        "manifest.json": "{",
        f"runs/{DDP.id}/0.json": '{"schema_version": 1, "cell": ',
        f"runs/{DDP.id}/first.json": "{}",
        f"verdicts/{DDP.id}.json": "<<<<<<< ours",
    }
    for day, (name, text) in enumerate(broken.items(), start=1):
        factory.write_text(keep(tmp_path, day, 0.2).folder / name, text)
    deep = keep(tmp_path, 5, 0.2)
    factory.write_text(deep.folder / "runs" / DDP.id / "0.json", "[" * 100_000)
    timeless = keep(tmp_path, 6, 0.2)
    timeless.write_manifest(msgspec.structs.replace(timeless.manifest(), started_at="yesterday"))
    of_another_version = keep(tmp_path, 7, 0.2).folder / "runs" / DDP.id / "0.json"
    of_another_version.write_text(
        of_another_version.read_text().replace('"schema_version": 1', '"schema_version": 0', 1)
    )
    history = gather(tmp_path)
    assert medians(history) == [[0.1]]
    assert len(history.unreadable) == 8
    parts = ("notes is not a test run", "manifest.json:1: broken", "0.json:1: broken", "first", "conflict", "yesterday")
    for part in (*parts, "schema_version 0"):
        assert any(part in text for text in history.unreadable), part


def test_a_damaged_cell_takes_no_other_with_it(tmp_path):
    results = keep(tmp_path, 0, 0.1)
    results.write_manifest(msgspec.structs.replace(results.manifest(), cells=(COMPILED, DDP)))
    factory.write_text(results.folder / "runs" / COMPILED.id / "0.json", "")
    history = gather(tmp_path)
    assert medians(history) == [[0.1]]
    assert len(history.unreadable) == 1


def test_runs_that_are_not_of_their_cell_or_of_two_machines_are_named(tmp_path):
    keep(tmp_path, 0, 0.1).write_run(factory.run_record(factory.cell(micro_batch=4), index=1))
    env = factory.environment(factory.H200X2)
    keep(tmp_path, 1, 0.1).write_run(factory.run_record(DDP, index=1, env=env))
    history = gather(tmp_path)
    assert history.series == ()
    assert "is a record of" in history.unreadable[0]
    assert "several machines" in history.unreadable[1]


def test_files_and_hidden_folders_are_not_looked_at(tmp_path):
    keep(tmp_path, 0, 0.1)
    (tmp_path / "README.md").write_text("")
    (tmp_path / ".cache").mkdir()
    assert gather(tmp_path).unreadable == ()


def test_a_copy_is_no_other_test_run(tmp_path):
    parts = [keep(tmp_path, 0, 0.1), keep(tmp_path, 1, 0.1, of=COMPILED)]
    gather_results([Results(part.folder) for part in parts], tmp_path / "whole")
    assert medians(gather(tmp_path)) == [[0.1]]


def test_it_reads_what_is_wanted_and_no_more(tmp_path):
    for day in range(5):
        keep(tmp_path, day, 0.1 + day, of=COMPILED if day == 4 else DDP)
    until = "2026-09-03T02:00:00+00:00"
    assert medians(gather(tmp_path, until=until)) == [[0.1, 1.1, 2.1]]
    assert medians(gather(tmp_path, until="2026-09-03T02:00:00")) == [[0.1, 1.1, 2.1]]
    assert medians(gather(tmp_path, wanted=lambda cell: cell.id == DDP.id, newest=2)) == [[2.1, 3.1]]
    assert gather(tmp_path, wanted=lambda cell: cell.id == COMPILED.id, until=until).series == ()


WITHOUT = """
import runpy, sys

class Absent:
    def find_spec(self, name, *_):
        if name in {absent}:
            raise ImportError(name)

sys.meta_path.insert(0, Absent())
sys.argv[0] = "history"
runpy.run_module("tools.history", run_name="__main__")
"""


def tool(*arguments, absent=("torch",)):
    return subprocess.run(
        [sys.executable, "-c", WITHOUT.format(absent=absent), *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


@pytest.fixture
def results(tmp_path):
    found = tmp_path / "results"
    for day in range(6):
        keep(found, day, 0.1, 0.11, 0.1)
    keep(found, 6, 0.1, fault="slow_step=0.5")
    keep(found, 7, 0.1, of=COMPILED)
    (found / "notes").mkdir()
    return found


def test_the_tool_draws_a_picture_for_each_cell_and_says_what_it_skipped(results, tmp_path):
    done = tool("--results", results, "-o", tmp_path / "drawn", absent=("torch", "otava"))
    assert done.returncode == 0, done.stderr
    names = [f"{cell.id}--cpu-test-cpu-2c.png" for cell in (COMPILED, DDP)]
    assert sorted(path.name for path in (tmp_path / "drawn").iterdir()) == names
    assert f"{names[1]}: 6 test runs, 2026-09-01T02-00-00 to 2026-09-06T02-00-00" in done.stdout
    assert "  left out: 1 x planted fault slow_step\n" in done.stdout
    assert f"skipped: {results / 'notes'} is not a test run" in done.stderr
    assert done.stdout.count("change points need apache-otava: ") == 1


def test_the_tool_draws_what_it_is_asked_for(results, tmp_path):
    sizes = []
    for metrics in (("step-time",), ("step-time", "peak-resident")):
        options = [option for metric in metrics for option in ("--metric", metric)]
        done = tool("--results", results, "-k", "tiny-eager", *options, "-o", tmp_path / "drawn")
        assert done.returncode == 0, done.stderr
        (path,) = (tmp_path / "drawn").iterdir()
        with Image.open(path) as image:
            sizes.append(image.height)
    assert sizes[1] > 1.4 * sizes[0]


def test_nothing_to_draw_is_8_and_says_why(results, tmp_path):
    for arguments, words in (
        (("--results", tmp_path / "none"), "none is no folder"),
        (("--results", tmp_path), f"no usable test run in {tmp_path}"),
        (("--results", results, "-k", "fsdp2"), "of a cell with 'fsdp2' in its name"),
        (
            ("--results", results, "-k", "eager", "--metric", "peak-allocated"),
            "has peak-allocated; 1 left out, such as",
        ),
    ):
        done = tool(*arguments, "-o", tmp_path / "drawn")
        assert (done.returncode, done.stdout) == (8, ""), done.stderr
        assert words in done.stderr
    assert not (tmp_path / "drawn").exists()


def test_the_tool_names_a_damaged_baseline_once_and_draws_without_it(results, tmp_path):
    baselines.write(tmp_path, factory.baseline(DDP))
    path = tmp_path / factory.CPU.key / f"{DDP.id}.json"
    path.write_text(path.read_text().replace("0.1", "0.2", 1))
    done = tool("--results", results, "-k", "eager", "--baselines", tmp_path, "-o", tmp_path / "drawn")
    assert done.returncode == 0
    assert done.stderr.count("no baseline shown: ") == 1
    assert "does not fit the content" in done.stderr


def test_a_line_has_the_band_of_its_own_baseline_and_recipe_for_as_many_runs_as_its_newest_test_run(tmp_path):
    baseline = factory.baseline(DDP, nights=((0.1, 0.1, 0.1),) * 3)
    baselines.write(tmp_path, baseline)
    band_of = bands(Store(tmp_path))
    line = series([0.1, 0.1])
    expected = band(baseline, STEP_TIME, rule_of(Store(tmp_path), factory.CPU), 3)
    assert not expected.noisy
    assert band_of(line) == expected
    newest = msgspec.structs.replace(line.points[-1], num_runs=1)
    assert band_of(msgspec.structs.replace(line, points=(line.points[0], newest))) != expected
    assert band_of(series([0.1, 0.1], timed_steps=30)) is None
    assert band_of(series([0.1], of=COMPILED)) is None


def test_a_folder_that_cannot_be_read_or_written_is_2(results, tmp_path):
    (tmp_path / "file").write_text("")
    for arguments in (("--results", results, "-o", tmp_path / "file"), ("--results", 300 * "a")):
        done = tool(*arguments)
        assert done.returncode == 2
        assert done.stderr.startswith("error: ")
        assert done.stderr.count("\n") == 1
