"""Exports to databases that keep a history: PyTorch's HUD, and Apache Otava's change points. As `perf.tell.exports`."""

import csv
import io
import statistics
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from perf.facts import jsonfile
from perf.facts.measurement import Measurement, Metric
from perf.facts.record import Environment
from perf.judge.verdict import Verdict
from perf.tell.exports import EXPORTED, FinishedTestRun, commit_text, shown_values
from strategies.value import Value

OTAVA_CONFIG = "otava.yaml"


def hud_json(test_run: FinishedTestRun) -> str:
    """Records of PyTorch's benchmark database, version 3: a list with one for each cell and metric.

    Format: https://github.com/pytorch/pytorch/wiki/PyTorch-OSS-benchmark-infra#benchmark-results-format; table:
    clickhouse_db_schema/benchmark.oss_ci_benchmark_v3/schema.sql of https://github.com/pytorch/test-infra. Its action
    upload-benchmark-results adds what the workflow knows (repository, commit, job, time). `benchmark_values` are those
    of all runs in base units, `target_value` is the baseline's where the metric was compared with one (the table has 0
    where it is missing). The model's name is the cell's id: the dashboards tell series apart by it. Values of an
    `extra_info` are text in the table.
    """
    records = [
        _hud_record(measurement, verdict, metric)
        for measurement, verdict in test_run.with_values
        for metric in EXPORTED
        if shown_values(measurement, metric)
    ]
    return jsonfile.dumps(records)


class _Row(Value, frozen=True, kw_only=True):
    """One cell in one test run."""

    started_at: str
    measurement: Measurement

    @property
    def machine(self) -> str:
        return self.measurement.runs[-1].environment.machine.key

    @property
    def place(self) -> tuple[str, str]:
        return self.machine, self.measurement.cell.id


def otava_files(test_runs: Sequence[FinishedTestRun]) -> dict[str, str]:
    """The history of every cell on every machine for Apache Otava: file name -> text.

    `<machine key>/<cell id>.csv` has a row per test run, oldest first: `time` (UTC), `commit`, and for each metric the
    median over the runs, in base units (https://github.com/apache/otava/blob/master/docs/CSV.md). Otava wants a number
    in every row: a column that some test run cannot fill is left out, and so are a test run without the cell's step
    time, and one of another recipe than the cell's newest: its times are another history. `otava.yaml` names the files,
    and which way is better; YAML reads JSON. In the folder with these files: `otava analyze --config-file otava.yaml
    <machine key>`, or one `<machine key>/<cell id>`.

    Raises:
        ValueError: a test run is named twice.
    """
    named = [(test_run.manifest.run_id, test_run.manifest.started_at) for test_run in test_runs]
    if twice := [run_id for run_id, started_at in named if named.count((run_id, started_at)) > 1]:
        raise ValueError(f"the test run {twice[0]} is named {len(twice)} times; name it once")
    files: dict[str, str] = {}
    tests: dict[str, Any] = {}
    rows = _rows(test_runs)
    for place, group in groupby(rows, key=lambda row: row.place):
        measured, name = list(group), "/".join(place)
        history = [row for row in measured if not _changes(row, measured[-1])]
        metrics = [metric for metric in EXPORTED if all(shown_values(row.measurement, metric) for row in history)]
        files[f"{name}.csv"] = _otava_csv(history, metrics)
        tests[name] = {
            "type": "csv",
            "file": f"{name}.csv",
            "time_column": "time",
            "attributes": ["commit"],
            "metrics": {metric.name: {"direction": -1 if metric.better == "lower" else 1} for metric in metrics},
        }
    groups = {row.machine: [name for name in tests if name.startswith(f"{row.machine}/")] for row in rows}
    return files | {OTAVA_CONFIG: jsonfile.dumps({"tests": tests, "test_groups": groups})}


def of_other_recipes(test_runs: Sequence[FinishedTestRun]) -> list[str]:
    """What `otava_files` leaves out since the cell was measured otherwise later, in words."""
    found: list[str] = []
    for _, group in groupby(_rows(test_runs), key=lambda row: row.place):
        measured = list(group)
        found += [
            f"{row.measurement.cell.id} of {row.started_at}: {', '.join(changes)}"
            for row in measured
            if (changes := _changes(row, measured[-1]))
        ]
    return found


def _rows(test_runs: Sequence[FinishedTestRun]) -> list[_Row]:
    """By place, oldest first."""
    rows = [
        _Row(started_at=test_run.manifest.started_at, measurement=measurement)
        for test_run in sorted(test_runs, key=lambda test_run: test_run.manifest.started_at)
        for measurement, _ in test_run.with_values
    ]
    return sorted(rows, key=lambda row: row.place)


def _otava_csv(history: Sequence[_Row], metrics: Sequence[Metric]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["time", "commit", *(metric.name for metric in metrics)])
    for row in history:
        medians = [statistics.median(shown_values(row.measurement, metric)) for metric in metrics]
        writer.writerow([row.started_at, commit_text(row.measurement.runs[-1].environment), *map(repr, medians)])
    return text.getvalue()


def _changes(row: _Row, newest: _Row) -> list[str]:
    return row.measurement.recipe.differences(newest.measurement.recipe)


def _hud_record(measurement: Measurement, verdict: Verdict, metric: Metric) -> dict[str, Any]:
    cell, environment = measurement.cell, measurement.runs[-1].environment
    described: dict[str, Any] = {"name": metric.name, "benchmark_values": shown_values(measurement, metric)}
    for comparison in verdict.comparisons:
        if comparison.metric == metric:
            described["target_value"] = comparison.old
    return {
        "benchmark": {
            "name": "Shardmark",
            "mode": "training",
            "dtype": cell.workload.compute_dtype.value,
            "extra_info": {
                "outcome": verdict.outcome.value,
                "strategy": str(cell.strategy),
                "ranks": str(cell.world_size),
                "link": cell.link.value,
                "options": cell.options.label,
                "sequences": str(cell.workload.sequences),
                "sequence_length": str(cell.workload.sequence_length),
                "machine": environment.machine.key,
                "measured_commit": commit_text(environment),
            },
        },
        "model": {
            "name": cell.id,
            "type": f"Qwen3 {cell.size}",
            "backend": cell.mode.value,
        },
        "metric": described | {"extra_info": {"unit": metric.unit, "better": metric.better}},
        "runners": [_runner(environment)],
        "dependencies": {
            "torch": {"repo": "pytorch/pytorch", "version": environment.software.torch},
            "transformers": {"repo": "huggingface/transformers", "version": environment.software.transformers},
        },
    }


def _runner(environment: Environment) -> dict[str, Any]:
    """The node; memory in the table's GB, which are those of its own gatherer: 2^30 bytes, over all GPUs used."""
    machine = environment.machine
    runner: dict[str, Any] = {
        "name": environment.host,
        "type": machine.device,
        "cpu_info": environment.cpu,
        "cpu_count": environment.cpu_cores,
    }
    if machine.memory_gib is not None:
        runner |= {
            "gpu_info": machine.device,
            "gpu_count": machine.count,
            "avail_gpu_mem_in_gb": machine.memory_gib * machine.count,
        }
    return runner
