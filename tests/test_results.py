"""Room perf/tell/results.py: the folder of a test run gives back what was written, or says what is damaged."""

import re
from datetime import UTC, datetime

import msgspec
import pytest

from perf.facts import jsonfile
from perf.facts.fault import Fault
from perf.judge.rule import Rule
from perf.judge.verdict import judge
from perf.tell import results as room
from perf.tell.results import Manifest, Results, new_run_id
from strategies.spec import Mode, StrategyName
from tests import nodes
from tests.factory import PLAN, baseline, cell, environment, invariants, measurement, run_record, write_text

CELLS = (cell(StrategyName.FSDP2), cell(), cell(mode=Mode.COMPILE))
MANIFEST = Manifest(
    run_id="2026-11-29T14-03-22", started_at="2026-11-29T14:03:22+00:00", matrix="smoke", plan=PLAN, cells=CELLS
)


@pytest.fixture
def results(tmp_path):
    """A test run with a manifest and no run yet."""
    results = Results(tmp_path / MANIFEST.run_id)
    results.write_manifest(MANIFEST)
    return results


def test_manifest_is_read_back(results):
    assert Results.open(results.folder).manifest() == MANIFEST


def test_runs_are_read_back_in_their_order(results):
    runs = [run_record(index=index, step_time_s=0.1 + index) for index in (10, 2, 0)]
    for run in runs:
        results.write_run(run)
    assert results.runs(cell().id) == runs[::-1]
    assert results.runs(CELLS[0].id) == []


@pytest.mark.parametrize("place", ["runs", "reference", "selftest"])
@pytest.mark.parametrize("name", ["0 copy.json", "._0.json", "-1.json", "notes.json", "\u0663.json"])
def test_stray_file_among_the_runs_is_named_with_the_cure(results, place, name):
    path = results.folder / place / cell().id / name
    path.parent.mkdir(parents=True)
    path.write_text("{}")
    read = {"runs": results.runs, "reference": results.reference_runs, "selftest": results.samples}[place]
    with pytest.raises(ValueError, match=re.escape(f"{path}: is no run") + ".*; move it elsewhere"):
        read(cell().id)


def test_raw_steps_and_a_planted_fault_are_kept(results):
    fault = Fault.parse("slow_step=0.05@1")
    run = msgspec.structs.replace(run_record(step_times_s=(0.1, 1 / 3, 1e-7)), fault=fault, teardown_hang=True)
    results.write_run(run)
    (read,) = results.runs(cell().id)
    assert read == run
    assert read.fault == fault


@pytest.mark.parametrize("step_s", [0.05, 0.1, 0.2])
def test_verdict_is_read_back(results, step_s):
    verdict = judge(measurement(step_times_s=(step_s,) * 3), baseline(), invariants(), Rule())
    results.write_verdict(verdict)
    assert results.verdicts() == [verdict]


def test_second_verdict_on_a_cell_replaces_the_first(results):
    for step_s in (0.1, 0.2):
        verdict = judge(measurement(step_times_s=(step_s,) * 3), baseline(), invariants(), Rule())
        results.write_verdict(verdict)
    assert results.verdicts() == [verdict]


def test_measurements_are_those_of_cells_that_ran_in_the_manifests_order(results):
    for of in (CELLS[1], CELLS[0]):
        for run in measurement(of).runs:
            results.write_run(run)
    assert results.measurements() == [measurement(CELLS[0]), measurement(CELLS[1])]


def test_run_without_results_has_no_measurement_verdict_or_environment(results):
    assert (results.measurements(), results.verdicts(), results.environment()) == ([], [], None)


def test_environment_is_that_of_the_newest_run(results):
    for index, host in enumerate(("old", "new")):
        results.write_run(run_record(CELLS[1 - index], index=index, env=environment(host=host)))
    assert results.environment().host == "new"


@pytest.mark.parametrize("name", ["empty", "missing"])
def test_folder_that_is_not_a_test_run_is_refused(tmp_path, name):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=rf"{name} is not a test run: it has no manifest\.json; pass a folder"):
        Results.open(tmp_path / name)


@pytest.mark.parametrize(
    ("place", "read"),
    [
        ("manifest.json", lambda results: results.manifest()),
        (f"runs/{cell().id}/1.json", lambda results: results.runs(cell().id)),
        (f"runs/{cell().id}/1.json", lambda results: results.measurements()),
        (f"verdicts/{cell().id}.json", lambda results: results.verdicts()),
    ],
    ids=["manifest", "run", "run of a measurement", "verdict"],
)
def test_damaged_record_is_named(results, place, read):
    for run in measurement().runs:
        results.write_run(run)
    results.write_verdict(judge(measurement(), baseline(), invariants(), Rule()))
    assert read(results)
    path = results.folder / place
    write_text(path, path.read_text(encoding="utf-8")[:300])
    with pytest.raises(ValueError, match=re.escape(f"{path}:")):
        read(results)


@pytest.mark.parametrize(("kind", "record"), [(Manifest, MANIFEST), (type(run_record()), run_record())])
def test_record_of_another_version_is_refused(tmp_path, kind, record):
    text = jsonfile.dumps(record).replace('"schema_version": 1', '"schema_version": 2', 1)
    with pytest.raises(ValueError, match=r"x\.json: schema_version 2, this version of the suite reads 1"):
        jsonfile.read(write_text(tmp_path / "x.json", text), kind)


def test_run_ids_sort_by_time_and_are_file_names():
    moments = [datetime(2026, 11, 29, 14, 3, 22, tzinfo=UTC), datetime(2026, 12, 1, tzinfo=UTC)]
    ids = [new_run_id(moment) for moment in moments]
    assert ids == ["2026-11-29T14-03-22", "2026-12-01T00-00-00"] == sorted(ids)
    assert re.fullmatch(r"[0-9T-]{19}", new_run_id())


def test_test_runs_of_the_same_second_get_folders_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setattr(room, "new_run_id", lambda: "2026-11-29T14-03-22")
    begun = [Results.new(tmp_path) for _ in range(3)]
    assert not list(tmp_path.iterdir()), "nothing is made before it is needed"
    for _ in range(2):
        for results in begun:
            results.claim()
    other = Results.new(tmp_path)
    other.leave_if_empty()
    names = [results.folder.name for results in begun]
    assert all(results.folder.is_dir() for results in begun), "it has claimed none"
    assert names == ["2026-11-29T14-03-22", "2026-11-29T14-03-22-2", "2026-11-29T14-03-22-3"]


def test_preflight_lies_beside_the_runs_and_is_none_where_none_was_made(results):
    assert results.preflight() is None
    path = results.write_preflight(nodes.preflight())
    assert path == results.folder / "preflight.json"
    assert results.preflight() == nodes.preflight()
    path.write_text(path.read_text()[:-20])
    with pytest.raises(ValueError, match=r"preflight\.json"):
        results.preflight()


def test_time_of_a_cell_is_that_of_the_runs_and_arms_which_it_lacks(tmp_path):
    """By its own runs, or those of the newest test run beside that has some; an arm without runs is as the other."""
    mine, older, newer = (Results(tmp_path / name) for name in ("3", "1", "2"))
    name = cell().id
    assert mine.expected_s(name, 3) is None
    for results, wall_s in ((older, 50.0), (newer, 20.0)):
        results.write_run(msgspec.structs.replace(run_record(), wall_s=wall_s, priming_s=7.0, server_start_up_s=1.0))
    assert mine.expected_s(name, 3) == 68.0
    assert mine.expected_s(name, 3, (room.RUNS, room.REFERENCE)) == 136.0
    slow = msgspec.structs.replace(run_record(), wall_s=40.0, priming_s=0.0, server_start_up_s=0.0)
    newer.write_reference_run(slow)
    assert mine.expected_s(name, 3, (room.RUNS, room.REFERENCE)) == 68.0 + 120.0
    mine.write_run(slow)
    assert mine.expected_s(name, 2) == 80.0
