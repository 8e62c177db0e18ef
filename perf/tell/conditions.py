"""The tables of a report on the conditions of the runs: mode in effect, memory and state of the GPUs, decay."""

import statistics
from collections.abc import Iterable, Sequence

import msgspec
import pandas as pd

from perf.facts.cell import Cell, SamplingPlan
from perf.facts.measurement import PEAK_ALLOCATED, PEAK_RESERVED, STEP_TIME, Measurement
from perf.facts.record import RunRecord
from perf.measure.evidence import Evidence
from perf.tell.decay import decay
from perf.tell.render import percent, quantity
from perf.tell.tables import ABSENT, Table, runs_frame, spread_text


def memory_table(frame: pd.DataFrame, cells: Sequence[Cell]) -> Table:
    """GPU cells: what tensors took on each rank, what the allocator held, and what the driver counted and had left."""
    rows = []
    for cell in cells:
        own = frame[frame["cell"] == cell.id]
        if cell.device_kind == "cpu" or own.empty:
            continue
        used, left = own["driver_used_bytes"].max(), own["driver_left_bytes"].min()
        rows.append(
            (
                cell.id,
                ", ".join(f"{ranks} GiB" for ranks in own["allocated_gib_per_rank"].unique()),
                spread_text(own, PEAK_RESERVED),
                quantity(used, PEAK_RESERVED) if pd.notna(used) else ABSENT,
                quantity(left, PEAK_RESERVED) if pd.notna(left) else ABSENT,
                str(int(own["allocator_retries"].sum())),
            )
        )
    header = (
        "cell",
        "allocated, each rank",
        "reserved, fullest rank",
        "driver's, fullest GPU",
        "left on it",
        "retries",
    )
    return Table(header=header, rows=tuple(rows))


def mode_table(measurements: Iterable[Measurement]) -> Table:
    """Per cell, over its ranks and runs: what was compiled, captured, attended with, how long issuing a step took."""
    rows = []
    for measurement in measurements:
        ranks = [rank for run in measurement.runs for rank in run.ranks]
        issue_times_s = [time_s for run in measurement.runs if (time_s := run.issue_time_s) is not None]
        step_time_s = measurement.median(STEP_TIME)
        rows.append(
            (
                measurement.cell.id,
                " ".join(sorted({kernel for rank in ranks for kernel in rank.attention})) or ABSENT,
                _range([rank.compile.graphs for rank in ranks]),
                _range([rank.compile.graph_breaks for rank in ranks]),
                _range([rank.compile.recompiles_after_warmup for rank in ranks]),
                _range([rank.replays for rank in ranks]),
                quantity(max(issue_times_s), STEP_TIME) if issue_times_s else ABSENT,
                quantity(step_time_s, STEP_TIME) if step_time_s else ABSENT,
            )
        )
    counts = ("graphs", "graph breaks", "recompiles", "replays")
    header = ("cell", "attention", *counts, "issued by the host in", "step time")
    return Table(header=header, rows=tuple(rows), first_number=2)


def state_table(measurements: Iterable[Measurement]) -> Table:
    """GPU cells: what the driver said of the GPUs while they ran; `unknown` where it said nothing."""
    rows = []
    for measurement in measurements:
        gpus = [gpu for run in measurement.runs for gpu in run.gpus]
        if not gpus:
            continue
        clocks = [clock for gpu in gpus for clock in gpu.sm_clock_mhz or ()]
        capped = [gpu.power_capped for gpu in gpus if gpu.power_capped is not None]
        foreign = [gpu.foreign_pids for gpu in gpus if gpu.foreign_pids is not None]
        rows.append(
            (
                measurement.cell.id,
                _told(clocks, " MHz"),
                _told([gpu.memory_clock_mhz for gpu in gpus if gpu.memory_clock_mhz is not None], " MHz"),
                _told([gpu.temperature_c for gpu in gpus if gpu.temperature_c is not None], " C"),
                _told([gpu.power_w for gpu in gpus if gpu.power_w is not None], " W"),
                f"{sum(capped)} of {len(capped)}" if capped else _UNKNOWN,
                ", ".join(sorted({reason for gpu in gpus for reason in gpu.throttled})) or "none",
                str(sum(map(len, foreign))) if foreign else _UNKNOWN,
            )
        )
    header = ("cell", "SM clock", "memory clock", "hottest", "most power", "at the power limit", "throttled", "others")
    return Table(header=header, rows=tuple(rows))


def arms_table(pairs: Iterable[tuple[Measurement, Sequence[RunRecord]]]) -> Table:
    """Cells that were measured beside a reference build: both builds, and which code they ran."""
    rows = []
    for measurement, reference in pairs:
        beside = {run.index for run in reference}
        candidate = [run for run in measurement.runs if run.index in beside]
        for name, runs in (("reference", reference), ("candidate", candidate)):
            if runs:
                rows.append((measurement.cell.id, name, *_build(runs[-1]), *_paired(measurement, runs)))
    header = ("cell", "build", "commit", "torch", "code", "runs", "step time", PEAK_ALLOCATED.title)
    return Table(header=header, rows=tuple(rows), first_number=5)


def _build(run: RunRecord) -> tuple[str, str, str]:
    """Commit, torch, and the digest of the imported sources."""
    environment, imported = run.environment, run.ranks[0].imported
    commit = (environment.commit or _UNKNOWN)[:12] + " with changes" * bool(environment.dirty)
    return commit, environment.software.torch, _UNKNOWN if imported is None else imported.digest


def _paired(measurement: Measurement, runs: Sequence[RunRecord]) -> tuple[str, str, str]:
    """Number of runs, step time and peak over them."""
    frame = runs_frame([msgspec.structs.replace(measurement, runs=tuple(runs))])
    return str(len(runs)), spread_text(frame, STEP_TIME), spread_text(frame, PEAK_ALLOCATED)


def decay_table(measurements: Iterable[Measurement]) -> Table:
    """Cells with a run that is long enough: its last third against its first; no rows where every run is short."""
    rows = []
    for measurement in measurements:
        found = [one for run in measurement.runs if (one := decay(run)) is not None]
        if found:
            rows.append(
                (
                    measurement.cell.id,
                    _range([one.num_steps for one in found]),
                    quantity(statistics.median(one.first_s for one in found), STEP_TIME),
                    quantity(statistics.median(one.last_s for one in found), STEP_TIME),
                    ", ".join(percent(one.change) for one in found),
                    ", ".join(f"{one.bound * 100:.1f} %" for one in found),
                    f"{sum(one.slower for one in found)} of {len(found)} runs",
                )
            )
    header = ("cell", "timed steps", "first third", "last third", "change, each run", "bound, each run", "slower")
    return Table(header=header, rows=tuple(rows))


def split_table(evidences: Iterable[Evidence]) -> Table:
    """Where the shortest profiled step of each cell goes, on the rank that waits least, in ms and % of it."""
    rows = []
    for evidence in evidences:
        rank = evidence.critical
        step, plain = rank.shortest, rank.plain_step_times_s
        optimizer = step.optimizer_s if evidence.tells_optimizer else None
        parts, step_s = (step.compute_s, step.exposed_communication_s, optimizer, step.idle_s), step.step_time_s
        told = (ABSENT if part is None else f"{part * 1e3:.1f} ms, {100 * part / step_s:.0f} %" for part in parts)
        usual = quantity(statistics.median(plain), STEP_TIME) if plain else ABSENT
        rows.append((evidence.cell.id, usual, quantity(step_s, STEP_TIME), *told))
    header = ("cell", "step", "profiled step", "compute", "exposed communication", "optimizer", "idle")
    return Table(header=header, rows=tuple(rows))


_UNKNOWN = "unknown"


def warm_up(measurements: Iterable[Measurement], plan: SamplingPlan) -> str:
    """Its steps; a GPU takes more of them than the plan has, and a captured step more again."""
    return _range([one.plan.warmup_steps for one in measurements] or [plan.warmup_steps])


def _range(values: Sequence[int]) -> str:
    """`2`, or `0-2` where ranks or runs differ."""
    if not values:
        return ABSENT
    return str(min(values)) if min(values) == max(values) else f"{min(values)}-{max(values)}"


def _told(values: Sequence[int], unit: str) -> str:
    return _range(values) + unit if values else _UNKNOWN
