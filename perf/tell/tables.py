"""The tables of a report: measurements, reduced to rows of text. Units are those of `perf.tell.render`."""

from collections.abc import Callable, Iterable, Mapping, Sequence

import pandas as pd

from perf.facts import stats
from perf.facts.cell import Cell
from perf.facts.measurement import (
    METRICS,
    PEAK_ALLOCATED,
    PEAK_RESIDENT,
    STEP_TIME,
    THROUGHPUT,
    Measurement,
    Metric,
)
from perf.facts.outcome import Outcome
from perf.facts.record import RunRecord
from perf.judge.verdict import Verdict
from perf.tell.bars import ranks_text, run_value
from perf.tell.render import quantity
from perf.tell.screen import Group, group_of
from strategies.shapes import SIZES
from strategies.value import Value

ABSENT = "-"
NOT_COMPARABLE = frozenset({Outcome.WRONG, Outcome.INVALID, Outcome.ERROR, Outcome.NOT_RUN})
"""The speed of a cell that does not compute the model is no measure for others, nor is that of one nobody judged."""


class Table(Value, frozen=True, kw_only=True):
    """A table as text; columns from `first_number` on hold numbers, but for those in `words`."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    first_number: int = 1
    words: tuple[str, ...] = ("remarks",)


def runs_frame(measurements: Iterable[Measurement]) -> pd.DataFrame:
    """One row per run, in base units; NaN where a run lacks a metric."""
    rows = [_run_row(run) for measurement in measurements for run in measurement.runs]
    numbers: tuple[str, ...] = (*METRICS, *_NUMBER_COLUMNS)
    frame = pd.DataFrame(rows, columns=[*_TEXT_COLUMNS, *numbers])
    return frame.astype(dict.fromkeys(numbers, float))


def planted_faults(frame: pd.DataFrame, cell_id: str) -> list[str]:
    """Each fault that was planted into the cell's runs, in words."""
    faults = frame[frame["cell"] == cell_id]["fault"].dropna().unique()
    return [f"planted fault {fault}" for fault in faults]


def cells_table(frame: pd.DataFrame, cells: Sequence[Cell], verdicts: Mapping[str, Verdict]) -> Table:
    """Every cell of the test run, measured or not, in the manifest's order."""
    rows = []
    for cell in cells:
        own = frame[frame["cell"] == cell.id]
        verdict = verdicts[cell.id]
        peak = _peak(cell)
        remarks = planted_faults(frame, cell.id)
        if verdict.outcome is not Outcome.PASS:
            remarks.append(verdict.outcome.value)
        if own.empty:
            remarks += [short(reason) for reason in verdict.reasons]
        rows.append(
            (
                *_cell_parts(cell),
                spread_text(own, THROUGHPUT),
                spread_text(own, STEP_TIME),
                spread_text(own, peak) + " (resident)" * (peak is PEAK_RESIDENT and not own.empty),
                str(len(own)),
                str(int(own["outlier_steps"].sum())) if len(own) else ABSENT,
                "; ".join(remarks),
            )
        )
    header = (*_CELL_HEADER, "cluster throughput", "step time", "peak memory", "runs", "outlier steps", "remarks")
    return Table(header=header, rows=tuple(rows), first_number=5)


def ratios_table(frame: pd.DataFrame, cells: Sequence[Cell], verdicts: Mapping[str, Verdict]) -> Table:
    """Each cell as a ratio to the fastest and to the smallest of its size, link, ranks and work a step."""
    rows = []
    for alike in comparable(frame, cells, verdicts):
        speeds = {cell.id: median(frame, cell, THROUGHPUT) for cell in alike}
        peaks = {cell.id: median(frame, cell, _peak(cell)) for cell in alike}
        fastest = max((speed for speed in speeds.values() if speed), default=None)
        smallest = min((peak for peak in peaks.values() if peak), default=None)
        rows += [
            (cell.id, _ratio(speeds[cell.id], fastest), _ratio(peaks[cell.id], smallest))
            for cell in sorted(alike, key=lambda cell: -(speeds[cell.id] or 0))
        ]
    return Table(header=("cell", "throughput / fastest", "peak memory / smallest"), rows=tuple(rows))


def growth_table(frame: pd.DataFrame, cells: Sequence[Cell], verdicts: Mapping[str, Verdict]) -> Table:
    """Step time over model sizes of the same strategy, mode, ranks and link, where there are at least two sizes."""
    sizes = sorted({cell.size for cell in cells}, key=lambda size: SIZES[size].num_parameters)
    by_variant: dict[str, dict[str, float]] = {}
    for cell in sound(frame, cells, verdicts):
        if time_s := median(frame, cell, STEP_TIME):
            name = f"{cell.variant}, {cell.mode}, {ranks_text(cell.world_size)}, {cell.link}"
            by_variant.setdefault(name, {})[cell.size] = time_s
    several = {name: times for name, times in by_variant.items() if len(times) > 1}
    used = [size for size in sizes if any(size in times for times in several.values())]
    rows = []
    for name, times in several.items():
        present = [times[size] for size in used if size in times]
        texts = (quantity(times[size], STEP_TIME) if size in times else ABSENT for size in used)
        rows.append((name, *texts, _ratio(present[-1], present[0])))
    return Table(header=("variant", *used, "largest / smallest"), rows=tuple(rows))


def time_table(frame: pd.DataFrame, cells: Sequence[Cell]) -> Table:
    """Wall time of the recorded runs, per cell and in total."""
    parts = ["start_up_s", "warm_up_s", "measuring_s"]
    measured = set(frame["cell"])
    rows = [(cell.id, *_time_row(frame[frame["cell"] == cell.id], parts)) for cell in cells if cell.id in measured]
    if rows:
        rows.append(("total", *_time_row(frame, parts)))
    header = ("cell", "start-up", "warm-up", "measuring", "rest", "wall", "measuring / wall")
    return Table(header=header, rows=tuple(rows))


def settings_table(cells: Sequence[Cell]) -> Table:
    """What one step of each size computes."""
    rows: dict[tuple[str, ...], int] = {}
    for cell in cells:
        work = cell.workload
        row = (
            cell.size,
            f"{cell.shape.num_parameters:,}",
            f"{work.sequences} x {work.sequence_length} = {work.tokens_per_step:,}",
            work.compute_dtype.value,
            work.loss.value,
            f"{work.learning_rate:g}",
            str(work.seed),
        )
        rows[row] = cell.shape.num_parameters
    header = ("size", "parameters", "tokens per step", "matrix products in", "loss", "learning rate", "seed")
    return Table(header=header, rows=tuple(sorted(rows, key=rows.__getitem__)))


def comparable(frame: pd.DataFrame, cells: Sequence[Cell], verdicts: Mapping[str, Verdict]) -> list[tuple[Cell, ...]]:
    """Measured cells of the same size, link, ranks and work a step, where at least two may be compared."""
    groups: dict[Group, list[Cell]] = {}
    for cell in sound(frame, cells, verdicts):
        groups.setdefault(group_of(cell)._replace(axis=""), []).append(cell)
    return [tuple(group) for group in groups.values() if len(group) > 1]


def sound(frame: pd.DataFrame, cells: Sequence[Cell], verdicts: Mapping[str, Verdict]) -> list[Cell]:
    """Measured cells whose numbers stand for the model, without a planted fault."""
    usable = set(frame["cell"]) - set(frame[frame["fault"].notna()]["cell"])
    return [cell for cell in cells if cell.id in usable and verdicts[cell.id].outcome not in NOT_COMPARABLE]


def median(frame: pd.DataFrame, cell: Cell, metric: Metric) -> float | None:
    """Over the runs that have the metric; None where none has."""
    value = frame[frame["cell"] == cell.id][metric.name].median()
    return float(value) if pd.notna(value) else None


def spread_text(own: pd.DataFrame, metric: Metric) -> str:
    """`51.2 ms [50.9, 52.0]`: median, smallest and largest run. Of one run the value alone: its spread is not 0."""
    values = own[metric.name].dropna()
    if values.empty:
        return ABSENT
    if len(values) == 1:
        return quantity(values.iloc[0], metric)
    middle, low, high = (quantity(value, metric) for value in (values.median(), values.min(), values.max()))
    unit = f" {middle.rpartition(' ')[2]}"
    if low.endswith(unit) and high.endswith(unit):
        low, high = low.removesuffix(unit), high.removesuffix(unit)
    return f"{middle} [{low}, {high}]"


def short(text: str, most: int = 160) -> str:
    """The first line, cut where it is very long."""
    first = text.strip().partition("\n")[0]
    return first if len(first) <= most else first[: most - 3] + "..."


def _cell_parts(cell: Cell) -> tuple[str, ...]:
    return (
        cell.variant,
        cell.size,
        cell.mode.value,
        str(cell.world_size),
        cell.link.value,
        str(cell.workload.micro_batch),
    )


_CELL_HEADER = ("strategy", "size", "mode", "ranks", "link", "micro-batch")


def _peak(cell: Cell) -> Metric:
    return PEAK_RESIDENT if cell.device_kind == "cpu" else PEAK_ALLOCATED


def _ratio(value: float | None, reference: float | None) -> str:
    return f"{value / reference:.2f} x" if value and reference else ABSENT


def _time_row(own: pd.DataFrame, parts: Sequence[str]) -> tuple[str, ...]:
    wall_s = float(own["wall_s"].sum())
    spent_s = [float(own[part].sum()) for part in parts]
    rest_s = max(0.0, wall_s - sum(spent_s))
    share = f"{100 * spent_s[-1] / wall_s:.0f} %" if wall_s > 0 else ABSENT
    return (*(f"{seconds:,.1f} s" for seconds in (*spent_s, rest_s, wall_s)), share)


def _or_none(read: Callable[[], float | None]) -> float | None:
    """The value, or None where the run has no ranks or its ranks do not fit together."""
    try:
        return read()
    except ValueError:
        return None


def _run_row(run: RunRecord) -> dict[str, object]:
    """A row of `runs.csv`."""
    cell, environment = run.cell, run.environment
    row: dict[str, object] = {"cell": cell.id, **dict(zip(_CELL_HEADER, _cell_parts(cell), strict=True))}
    row |= {
        "run": run.index,
        "started_at": run.started_at,
        "fault": run.fault.text if run.fault is not None else None,
        "machine": environment.machine.key,
        "host": environment.host,
        "torch": environment.software.torch,
        "commit": environment.commit,
        "dirty": environment.dirty,
    }
    row |= {name: run_value(run, metric) for name, (metric, _) in METRICS.items()}
    allocated = [rank.memory.allocated_bytes for rank in run.ranks if rank.memory.allocated_bytes is not None]
    told = [(gpu.used_bytes, gpu.total_bytes) for gpu in run.gpus if gpu.used_bytes and gpu.total_bytes]
    row |= {
        "outlier_steps": _or_none(lambda: stats.outlier_count(run.step_times_s)),
        "allocated_gib_per_rank": " ".join(f"{peak / 2**30:.2f}" for peak in allocated),
        "driver_used_bytes": max((used for used, _ in told), default=None),
        "driver_left_bytes": min((total - used for used, total in told), default=None),
        "allocator_retries": sum(rank.memory.allocator_retries or 0 for rank in run.ranks),
        "issue_time_s": run.issue_time_s,
        "start_up_s": _or_none(lambda: run.start_up_s),
        "warm_up_s": _or_none(lambda: run.warm_up_s),
        "measuring_s": _or_none(lambda: run.measuring_s),
        "wall_s": run.wall_s,
    }
    return row


_TEXT_COLUMNS = (
    *("cell", *_CELL_HEADER, "run", "started_at", "fault"),
    *("machine", "host", "torch", "commit", "dirty", "allocated_gib_per_rank"),
)
_NUMBER_COLUMNS = (
    *("outlier_steps", "driver_used_bytes", "driver_left_bytes", "allocator_retries"),
    *("issue_time_s", "start_up_s", "warm_up_s", "measuring_s", "wall_s"),
)
