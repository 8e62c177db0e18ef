"""Exports: every format has the records' own values in its own units, and no number of what was not measured."""

import csv
import io
import json
import subprocess
import sys
from statistics import median

import msgspec
import pytest

from perf.facts.fault import Fault
from perf.facts.measurement import measure
from perf.facts.outcome import Outcome
from perf.judge.verdict import Verdict
from perf.measure.connection import ROOT
from perf.tell.dashboards import OTAVA_CONFIG, hud_json, otava_files
from perf.tell.exports import action_json, bencher_json, benchmark_json, junit_properties, read_test_run
from perf.tell.results import Results
from tests import factory
from tests.finished_runs import (
    GIB,
    HOSTILE,
    ON_GPUS,
    PASSES,
    TIMES_S,
    TOKENS_PER_STEP,
    WITH_RUNS,
    WITHOUT_RUNS,
    finished,
    on_gpus,
    write_test_run,
)


@pytest.fixture
def ended(tmp_path):
    return read_test_run(Results.open(write_test_run(tmp_path)))


def test_only_cells_with_a_verdict_on_whole_right_runs_have_values(ended):
    outcomes = {measurement.cell.id: verdict.outcome for measurement, verdict in ended.with_values}
    assert outcomes == {PASSES.id: Outcome.PASS, ON_GPUS.id: Outcome.REGRESSED}
    assert set(ended.left_out) == {of.id for of in WITHOUT_RUNS | WITH_RUNS}
    for of, outcome in (WITHOUT_RUNS | WITH_RUNS).items():
        assert ended.left_out[of.id].startswith(f"{outcome}: ")
        assert "\n" not in ended.left_out[of.id]


def named_cells(name, ended):
    """The cells of which a format says anything, and all its numbers."""
    smaller, bigger = (json.loads(action_json(ended, better)) for better in ("lower", "higher"))
    match name:
        case "pytest-benchmark":
            found = json.loads(benchmark_json(ended))["benchmarks"]
            return {one["extra_info"]["cell"] for one in found}, [one["stats"]["data"] for one in found]
        case "bencher":
            found = json.loads(bencher_json(ended))
            return set(found), found
        case "github-action-benchmark":
            return {one["name"].split(" ")[0] for one in smaller + bigger}, [one["value"] for one in smaller + bigger]
        case "pytorch-hud":
            found = json.loads(hud_json(ended))
            return {one["model"]["name"] for one in found}, [one["metric"] for one in found]
        case "otava-csv":
            files = {name: text for name, text in otava_files([ended]).items() if name != OTAVA_CONFIG}
            rows = [row for text in files.values() for row in list(csv.reader(io.StringIO(text)))[1:]]
            numbers = [[float(number) for number in row[2:]] for row in rows]
            return {name.split("/")[1].removesuffix(".csv") for name in files}, numbers


def numbers_of(value):
    if isinstance(value, dict | list):
        return [one for part in (value.values() if isinstance(value, dict) else value) for one in numbers_of(part)]
    return [value] if isinstance(value, int | float) else []


VALUE_FORMATS = ("pytest-benchmark", "bencher", "github-action-benchmark", "pytorch-hud", "otava-csv")


@pytest.mark.parametrize("name", VALUE_FORMATS)
def test_no_format_shows_a_cell_without_values(name, ended):
    cells, numbers = named_cells(name, ended)
    assert cells == {PASSES.id, ON_GPUS.id}
    assert min(numbers_of(numbers)) > 0
    assert 123.0 not in numbers_of(numbers)


def unmeasured():
    times_s = (0.1,) * 9
    whole = [factory.run_record(PASSES, index=index) for index in range(3)]
    broken = [factory.run_record(PASSES, index=2, step_times_s=(*times_s, bad)) for bad in (0.0, -1.0, float("nan"))]
    broken += [factory.run_record(PASSES, index=2, step_times_s=()), factory.change_ranks(whole[2], 1, step_times_s=())]
    broken.append(msgspec.structs.replace(whole[2], fault=Fault.parse("slow_step=0.5")))
    return [measure(PASSES, factory.PLAN, [*whole[:2], run]) for run in broken]


@pytest.mark.parametrize("measurement", unmeasured(), ids=["zero", "negative", "nan", "none", "one rank", "planted"])
@pytest.mark.parametrize("name", VALUE_FORMATS)
def test_zero_nan_a_missing_step_and_a_planted_fault_are_no_values(name, measurement):
    assert named_cells(name, finished(measurement)) == (set(), [] if name != "bencher" else {})
    names = [name for name, _ in junit_properties(Verdict(cell_id=PASSES.id, outcome=Outcome.PASS), measurement)]
    assert names == ["machine", "commit", "torch"]


@pytest.mark.parametrize("lacking", [(None, None, None), (GIB, None, GIB), (GIB, 0, GIB)])
def test_memory_that_a_run_lacks_is_left_out_and_the_times_stay(lacking):
    one = finished(on_gpus(allocated_bytes=lacking))
    assert set(json.loads(bencher_json(one))[ON_GPUS.id]) == {"latency", "throughput"}
    assert [entry["unit"] for entry in json.loads(action_json(one, "lower"))] == ["ms"]
    assert [record["metric"]["name"] for record in json.loads(hud_json(one))] == ["step_time_s", "tokens_per_s"]
    files = otava_files([one])
    assert [text.splitlines()[0] for name, text in files.items() if name != OTAVA_CONFIG] == [
        "time,commit,step_time_s,tokens_per_s"
    ]
    assert "peak" not in files[OTAVA_CONFIG]
    properties = dict(junit_properties(one.verdicts[0], one.measurements[0]))
    assert "peak_allocated_bytes" not in properties
    assert properties["step_time_s"] == "0.25"


def test_benchmark_json_has_every_timed_step_in_seconds(ended):
    found = json.loads(benchmark_json(ended))
    by_cell = {one["param"]: one for one in found["benchmarks"]}
    for of, times_s in TIMES_S.items():
        one = by_cell[of]
        steps = [seconds for seconds in times_s for _ in range(factory.PLAN.timed_steps)]
        assert one["stats"]["data"] == steps
        assert (one["stats"]["min"], one["stats"]["max"]) == (min(times_s), max(times_s))
        assert one["stats"]["median"] == pytest.approx(median(steps))
        assert one["extra_info"]["run_step_times_s"] == pytest.approx(times_s)
    assert by_cell[ON_GPUS.id]["extra_info"]["outcome"] == "REGRESSED"
    assert set(found["left_out"]) == {of.id for of in WITHOUT_RUNS | WITH_RUNS}


def test_pytest_benchmark_compares_an_export_with_another(ended, tmp_path):
    slower = finished(factory.measurement(PASSES, step_times_s=(0.2, 0.2, 0.2)))
    paths = [tmp_path / "now.json", tmp_path / "slower.json"]
    for path, one in zip(paths, (ended, slower), strict=True):
        path.write_text(benchmark_json(one))
    table = tmp_path / "table.csv"
    command = [sys.executable, "-m", "pytest_benchmark", "compare", *map(str, paths), "--group-by=fullname"]
    result = subprocess.run(
        [*command, "--columns=median,rounds", f"--csv={table}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert f"'perf/test_cells.py::test_cell[{PASSES.id}]': 2 tests" in result.stdout
    with table.open() as file:
        rows = [(row["name"], float(row["median"]), row["rounds"]) for row in csv.DictReader(file)]
    name = "perf/test_cells.py::test_cell[{}]".format
    assert sorted(rows) == [
        (name(ON_GPUS.id), 0.25, "30"),
        (name(PASSES.id), 0.1, "30"),
        (name(PASSES.id), 0.2, "30"),
    ]


def test_the_suite_takes_an_export_to_compare_with(ended, tmp_path):
    path = tmp_path / "export.json"
    path.write_text(benchmark_json(ended))
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "perf", "--collect-only", "-q", f"--benchmark-compare={path}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "Comparing against benchmarks from" in result.stdout + result.stderr


def test_bencher_has_nanoseconds_tokens_and_bytes_with_the_extreme_runs_as_bounds(ended):
    of = json.loads(bencher_json(ended))
    tokens = TOKENS_PER_STEP[ON_GPUS.id]
    assert of[ON_GPUS.id] == {
        "latency": {"value": 250e6, "lower_value": 125e6, "upper_value": 500e6},
        "throughput": {"value": tokens / 0.25, "lower_value": tokens / 0.5, "upper_value": tokens / 0.125},
        "peak-allocated-bytes": {"value": 41 * GIB, "lower_value": 40 * GIB, "upper_value": 42 * GIB},
    }
    assert set(of[PASSES.id]) == {"latency", "throughput"}


def test_github_action_benchmark_has_milliseconds_mebibytes_and_tokens(ended):
    smaller, bigger = (json.loads(action_json(ended, better)) for better in ("lower", "higher"))
    by_name = {entry["name"]: entry for entry in smaller}
    assert len(by_name) == len(smaller) == 3
    time, peak = by_name[f"{ON_GPUS.id} step time"], by_name[f"{ON_GPUS.id} peak allocated"]
    assert (time["value"], time["unit"], time["range"]) == (250, "ms", "125 to 500")
    assert (peak["value"], peak["unit"], peak["range"]) == (41 * 1024, "MiB", "40960 to 43008")
    assert time["extra"] == f"REGRESSED, median of 3 runs\n{factory.H200X2.key}, torch 2.13.0, c0ffee"
    assert [(entry["name"], entry["unit"]) for entry in bigger] == [
        (f"{PASSES.id} cluster throughput", "tokens/s"),
        (f"{ON_GPUS.id} cluster throughput", "tokens/s"),
    ]
    assert bigger[1]["value"] == TOKENS_PER_STEP[ON_GPUS.id] / 0.25


def test_junit_has_plain_numbers_in_base_units(ended):
    pairs = dict(zip([measurement.cell.id for measurement, _ in ended.with_values], ended.with_values, strict=True))
    measurement, verdict = pairs[ON_GPUS.id]
    found = junit_properties(verdict, measurement)
    assert [name for name, _ in found][:5] == [
        "step_time_s",
        "tokens_per_s",
        "peak_allocated_bytes",
        "change",
        "tolerance",
    ]
    properties = dict(found)
    assert len(properties) == len(found)
    assert float(properties["step_time_s"]) == 0.25
    assert float(properties["tokens_per_s"]) == TOKENS_PER_STEP[ON_GPUS.id] / 0.25
    assert float(properties["peak_allocated_bytes"]) == 41 * GIB
    assert float(properties["change"]) == pytest.approx(1.5)
    assert 0.02 < float(properties["tolerance"]) < 0.09
    assert properties["machine"] == factory.H200X2.key
    assert (properties["commit"], properties["torch"]) == ("c0ffee", "2.13.0")


@pytest.mark.parametrize(
    ("changes", "commit"), [({"dirty": True}, "c0ffee-dirty"), ({"commit": None}, "unknown"), ({}, "c0ffee")]
)
def test_junit_says_when_the_commit_is_not_what_was_measured(changes, commit):
    verdict = Verdict(cell_id=PASSES.id, outcome=Outcome.PASS)
    measurement = factory.measurement(PASSES, env=factory.environment(**changes))
    assert dict(junit_properties(verdict, measurement))["commit"] == commit


@pytest.mark.parametrize("outcome", [Outcome.WRONG, Outcome.INVALID, Outcome.ERROR])
def test_junit_has_no_number_of_a_cell_that_measured_something_else(outcome):
    verdict = Verdict(cell_id=PASSES.id, outcome=outcome, reasons=(HOSTILE,))
    names = [name for name, _ in junit_properties(verdict, factory.measurement(PASSES))]
    assert names == ["machine", "commit", "torch"]
    assert junit_properties(verdict, None) == []
