"""Exports to databases: PyTorch's HUD reads one test run, Apache Otava the history of many."""

import csv
import io
import json
from datetime import datetime

import pytest

from perf.facts.outcome import Outcome
from perf.tell.dashboards import OTAVA_CONFIG, hud_json, of_other_recipes, otava_files
from perf.tell.exports import read_test_run
from perf.tell.results import Results
from strategies.spec import StrategyName
from tests import factory
from tests.finished_runs import GIB, ON_GPUS, PASSES, PEAKS, TIMES_S, finished, on_gpus, write_test_run


@pytest.fixture
def ended(tmp_path):
    return read_test_run(Results.open(write_test_run(tmp_path)))


def test_hud_has_a_record_per_metric_with_all_runs_and_the_baseline_as_target(ended):
    records = [one for one in json.loads(hud_json(ended)) if one["model"]["name"] == ON_GPUS.id]
    by_metric = {one["metric"]["name"]: one for one in records}
    assert list(by_metric) == ["step_time_s", "tokens_per_s", "peak_allocated_bytes"]
    assert by_metric["step_time_s"]["metric"]["benchmark_values"] == list(TIMES_S[ON_GPUS.id])
    assert by_metric["step_time_s"]["metric"]["target_value"] == pytest.approx(0.1)
    assert by_metric["peak_allocated_bytes"]["metric"]["benchmark_values"] == list(PEAKS)
    assert "target_value" not in by_metric["tokens_per_s"]["metric"]
    one = by_metric["step_time_s"]
    assert (one["benchmark"]["mode"], one["benchmark"]["dtype"]) == ("training", "bfloat16")
    assert one["model"]["backend"] == "eager"
    assert one["runners"] == [
        {
            "name": "node1",
            "type": "NVIDIA H200",
            "cpu_info": "Test CPU",
            "cpu_count": 2,
            "gpu_info": "NVIDIA H200",
            "gpu_count": 2,
            "avail_gpu_mem_in_gb": 280,
        }
    ]
    assert one["dependencies"]["torch"] == {"repo": "pytorch/pytorch", "version": "2.13.0"}
    extras = [value for part in ("benchmark", "metric") for value in one[part]["extra_info"].values()]
    assert all(isinstance(value, str) for value in extras), "the table has Map(String, String)"


def night(day, step_time_s, *, of=PASSES, outcome=Outcome.PASS, env=None):
    """The test run of a day in November, one step time for all its runs."""
    measurement = factory.measurement(of, step_times_s=(step_time_s,) * 3, env=env)
    started_at = f"2026-11-{day:02d}T02:00:00+00:00"
    return finished(measurement, outcome, run_id=f"night {day}", started_at=started_at)


def rows_of(files, name=f"{factory.CPU.key}/{PASSES.id}.csv"):
    return list(csv.DictReader(io.StringIO(files[name])))


def test_otava_has_a_row_per_test_run_oldest_first():
    nights = [night(3, 0.3), night(1, 0.1, env=factory.environment(commit="abc", dirty=True)), night(2, 0.2)]
    rows = rows_of(otava_files(nights))
    assert [float(row["step_time_s"]) for row in rows] == [0.1, 0.2, 0.3]
    assert [float(row["tokens_per_s"]) for row in rows] == [
        PASSES.workload.tokens_per_step / step_time_s for step_time_s in (0.1, 0.2, 0.3)
    ]
    assert [row["commit"] for row in rows] == ["abc-dirty", "c0ffee", "c0ffee"]
    assert [datetime.fromisoformat(row["time"]).day for row in rows] == [1, 2, 3]


def test_otava_is_told_each_file_its_columns_and_which_way_is_better():
    files = otava_files([finished(on_gpus()), night(1, 0.1)])
    config = json.loads(files[OTAVA_CONFIG])
    assert config["test_groups"] == {
        factory.H200X2.key: [f"{factory.H200X2.key}/{ON_GPUS.id}"],
        factory.CPU.key: [f"{factory.CPU.key}/{PASSES.id}"],
    }
    assert {test["file"] for test in config["tests"].values()} == set(files) - {OTAVA_CONFIG}
    for test in config["tests"].values():
        header = files[test["file"]].splitlines()[0].split(",")
        assert header == [test["time_column"], *test["attributes"], *test["metrics"]]
    assert config["tests"][f"{factory.H200X2.key}/{ON_GPUS.id}"]["metrics"] == {
        "step_time_s": {"direction": -1},
        "tokens_per_s": {"direction": 1},
        "peak_allocated_bytes": {"direction": -1},
    }


def test_otava_gets_no_row_of_a_test_run_in_which_the_cell_has_no_value():
    nights = [night(1, 0.1), night(2, 0.2, outcome=Outcome.WRONG), night(3, 0.3)]
    assert [row["step_time_s"] for row in rows_of(otava_files(nights))] == ["0.1", "0.3"]


def test_otava_gets_no_column_that_one_test_run_cannot_fill():
    env = factory.environment(factory.H200X2)
    nights = [
        finished(on_gpus(), run_id="first"),
        finished(on_gpus(allocated_bytes=(GIB, None, GIB), env=env), run_id="second"),
    ]
    rows = rows_of(otava_files(nights), f"{factory.H200X2.key}/{ON_GPUS.id}.csv")
    assert [list(row) for row in rows] == [["time", "commit", "step_time_s", "tokens_per_s"]] * 2


def test_otava_never_mixes_machines_or_cells():
    nights = [
        night(1, 0.1),
        night(2, 0.2, env=factory.environment(factory.H200X2)),
        night(3, 0.3, of=factory.cell(StrategyName.TP)),
    ]
    files = otava_files(nights)
    assert len(files) == 1 + len(nights)
    assert [len(text.splitlines()) for name, text in files.items() if name != OTAVA_CONFIG] == [2, 2, 2]


def test_history_is_of_the_newest_recipe_and_others_are_named():
    other = factory.cell(micro_batch=1)
    assert other.id == PASSES.id
    nights = [night(1, 0.1), night(2, 0.2, of=other), night(3, 0.3)]
    assert [row["step_time_s"] for row in rows_of(otava_files(nights))] == ["0.1", "0.3"]
    (left_out,) = of_other_recipes(nights)
    assert left_out.endswith("micro_batch: 1 -> 2")


def test_a_test_run_that_is_named_twice_is_refused():
    with pytest.raises(ValueError, match="night 1 is named 2 times"):
        otava_files([night(1, 0.1), night(1, 0.1)])


def test_a_commit_with_commas_quotes_and_lines_stays_one_field():
    commit = 'a,"b"\nc'
    rows = rows_of(otava_files([night(1, 0.1, env=factory.environment(commit=commit))]))
    assert [(row["commit"], row["step_time_s"]) for row in rows] == [(commit, "0.1")]
