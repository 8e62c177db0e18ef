"""A test run in words: its headline, what to know before any number, which cell leads, what may not be concluded."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

import pandas as pd

from perf.facts.cell import Cell
from perf.facts.measurement import PEAK_ALLOCATED, PEAK_RESIDENT, STEP_TIME, THROUGHPUT, Measurement, Metric
from perf.facts.outcome import VERDICTS, Outcome
from perf.facts.record import RunRecord
from perf.judge.rule import Rule
from perf.judge.verdict import Verdict
from perf.tell import tables
from perf.tell.bars import ranks_text
from perf.tell.render import counts, quantity, runs_text
from perf.tell.screen import AXIS_NAMES, axis_of, group_of

MOST_IN_A_LINE = 10
"""Cells whose order a reader can still take in."""


def headline(verdicts: Collection[Verdict]) -> str:
    """`2 of 6 cells failed: 1 ERROR, 1 REGRESSED, 3 PASS, 1 UNSUPPORTED.`"""
    failed = sum(verdict.is_failure for verdict in verdicts)
    undecided = sum(not verdict.is_failure and verdict.outcome not in VERDICTS for verdict in verdicts)
    if not verdicts:
        return "Nothing ran: this test run selected no cells."
    if failed:
        said = f"{failed} of {len(verdicts)} cells failed"
    elif undecided:
        said = f"No cell failed, {undecided} of {len(verdicts)} have no verdict"
    else:
        said = f"All {len(verdicts)} cells are green"
    return f"{said}: {counts(verdicts)}."


def status(verdicts: Collection[Verdict]) -> str:
    """Which colour the headline has."""
    outcomes = {verdict.outcome for verdict in verdicts}
    if any(verdict.is_failure for verdict in verdicts):
        return "failed"
    return "green" if outcomes and outcomes <= VERDICTS | {Outcome.UNSUPPORTED} else "undecided"


def warnings(measurements: Sequence[Measurement], verdicts: Iterable[Verdict]) -> list[str]:
    """What a reader must know before any number."""
    runs = [run for measurement in measurements for run in measurement.runs]
    found = []
    if planted := sorted({f"{run.fault.text} in {run.cell.id}" for run in runs if run.fault is not None}):
        found.append(f"Planted faults, so these cells are broken on purpose: {', '.join(planted)}.")
    if any(run.environment.dirty for run in runs):
        found.append("The measured source tree had uncommitted changes: these numbers belong to no commit.")
    if runs and any(run.environment.commit is None for run in runs):
        found.append("The commit of the measured source tree is unknown.")
    for name, values in environment_values(runs).items():
        if len(values) > 1 and name in ("commit", "host", "torch", "transformers", "python"):
            found.append(f"The runs differ in {name}: {', '.join(values)}.")
    if hung := sorted({run.cell.id for run in runs if run.teardown_hang}):
        found.append(f"Processes did not end by themselves after measuring: {', '.join(hung)}.")
    if provisional := sum(verdict.provisional for verdict in verdicts):
        found.append(f"{provisional} verdicts rest on a provisional baseline (few nights or few runs).")
    return found


def orders(frame: pd.DataFrame, cells: Sequence[Cell], verdicts: Mapping[str, Verdict]) -> list[str]:
    """Per size, ranks, link and work: cells by throughput and by peak memory; `~` where two are too close.

    Where there are many, the fastest of each axis stand for it, and each axis has an order of its own.
    """
    found = []
    several_links = len({cell.link for cell in cells if cell.device_kind == "cuda"}) > 1
    works: dict[str, set[str]] = {}
    for cell in cells:
        works.setdefault(cell.size, set()).add(group_of(cell).workload)
    for alike in tables.comparable(frame, cells, verdicts):
        first = alike[0]
        device, peak = ("CPU", PEAK_RESIDENT) if first.device_kind == "cpu" else ("GPU", PEAK_ALLOCATED)
        where = f"{first.size}, {ranks_text(first.world_size)} on {device}{f' over {first.link}' * several_links}"
        where += f", {group_of(first).workload}" * (len(works[first.size]) > 1)
        by_axis: dict[str, list[Cell]] = {}
        for cell in sorted(alike, key=lambda cell: -(tables.median(frame, cell, THROUGHPUT) or 0)):
            by_axis.setdefault(AXIS_NAMES[axis_of(cell)], []).append(cell)
        by_axes = len(alike) > MOST_IN_A_LINE and len(by_axis) > 1
        shown = [own[0] for own in by_axis.values()] if by_axes else alike
        whose = "the best of each axis, " if by_axes else ""
        for first_said, metric, sign in (("fastest", THROUGHPUT, " > "), (f"least {peak.title}", peak, " < ")):
            order = _order(frame, shown, verdicts, metric, sign, with_axis=by_axes)
            found.append(f"{where}, {whose}{first_said} first: {order}")
        several = {axis: own for axis, own in by_axis.items() if len(own) > 1}
        if by_axes and several:
            told = (f"{axis}: {_order(frame, own, verdicts, THROUGHPUT, ' > ')}" for axis, own in several.items())
            found.append(f"{where}, within each axis, fastest first: {'; '.join(told)}")
    return found


def has_single_runs(frame: pd.DataFrame) -> bool:
    """Whether some cells have one run and others more: then the orders mark those that do."""
    counts = set(frame.groupby("cell").size())
    return 1 in counts and len(counts) > 1


def run_counts(measurements: Sequence[Measurement], cells: Collection[Cell]) -> str:
    """`52 cells have 3 runs; 80 cells have 1 run, as asked for; 2 cells have none`.

    A matrix is measured in pieces, its candidates once and the fastest of them more often, so what was asked for is
    what the runs themselves say.
    """
    counted: Counter[tuple[int, str]] = Counter()
    for measurement in measurements:
        number, asked = len(measurement.runs), max(run.plan.runs for run in measurement.runs)
        remark = f" of the {asked} that were asked for" if number < asked else ", as asked for" if asked == 1 else ""
        counted[number, runs_text(number) + remark * (number <= asked)] += 1
    counted[0, "none"] += len(cells) - len(measurements)
    parts = [
        f"{num_cells} cell{'s have' if num_cells > 1 else ' has'} {said}"
        for (_, said), num_cells in sorted(counted.items(), reverse=True)
        if num_cells
    ]
    return "; ".join(parts) or "there are no cells"


def limits(measurements: Sequence[Measurement], cells: Collection[Cell]) -> list[str]:
    """What may not be concluded."""
    floor = f"{100 * Rule().floor:g} %"
    found = [
        (
            f"Each run is made in a fresh process group, and n is how many runs a cell has: "
            f"{run_counts(measurements, cells)}. The run is the unit of evidence; the steps of one run share its luck."
        ),
        (
            "Error bars and brackets are the smallest and the largest run, not a confidence interval; with few runs "
            "the next one may well fall outside. A value of one run has neither, because its spread is not known."
        ),
        (
            f"Differences below a cell's tolerance ({floor} of the step time where none is stated) are not to be read. "
            "The orders above write ~ between neighbours that differ by less, or whose runs overlap."
        ),
        "Only a verdict compares with the past. Ratios compare cells of this test run with each other.",
        (
            "Peak allocated is what tensors took; the allocator holds more (peak reserved), and what must fit into a "
            "GPU is the reserved size plus what the driver and NCCL take."
        ),
        (
            "Everything holds for this machine, these links, this sequence length and this batch; it does not carry "
            "over to more ranks, another interconnect or longer sequences."
        ),
        "A cell that was skipped or failed says nothing about the speed it would have had.",
    ]
    if any(measurement.cell.device_kind == "cpu" for measurement in measurements):
        found.append(
            "Cells on gloo run on CPU ranks that share one machine: they watch the code of a strategy, and say nothing "
            "about its speed or memory on GPUs."
        )
    return found


def environment_values(runs: Iterable[RunRecord]) -> dict[str, list[str]]:
    """Name -> the different values in the order in which they were met."""
    found: dict[str, dict[str, None]] = {}
    for environment in (run.environment for run in runs):
        machine, software = environment.machine, environment.software
        parts = [f"{machine.key}: {machine.device}, {machine.count} used"]
        parts += [f"{machine.memory_gib} GiB each"] * (machine.memory_gib is not None)
        parts += [f"power limit {machine.power_limit_w} W"] * (machine.power_limit_w is not None)
        pairs: dict[str, object] = {"machine": ", ".join(parts), "host": environment.host}
        pairs |= {"CPU": f"{environment.cpu}, {environment.cpu_cores} usable cores"}
        pairs |= {name: getattr(software, name) for name in software.__struct_fields__}
        pairs |= {"commit": environment.commit or "unknown", "uncommitted changes": _yes_or_no(environment.dirty)}
        pairs |= {f"variable {name}": value for name, value in sorted(environment.variables.items())}
        for name, value in pairs.items():
            if value is not None:
                found.setdefault(name, {})[str(value)] = None
    return {name: list(values) for name, values in found.items()}


def _order(
    frame: pd.DataFrame,
    alike: Sequence[Cell],
    verdicts: Mapping[str, Verdict],
    metric: Metric,
    sign: str,
    *,
    with_axis: bool = False,
) -> str:
    ranked = [(value, cell) for cell in alike if (value := tables.median(frame, cell, metric)) is not None]
    ranked.sort(key=lambda pair: -pair[0] if metric.better == "higher" else pair[0])
    text = ""
    marks = has_single_runs(frame)
    for index, (value, cell) in enumerate(ranked):
        if index:
            before, other = ranked[index - 1]
            tolerance = max(_tolerance(verdicts[cell.id]), _tolerance(verdicts[other.id]))
            close = abs(value - before) <= tolerance * max(value, before)
            text += " ~ " if close or _overlap(frame, cell, other, metric) else sign
        text += f"{AXIS_NAMES[axis_of(cell)]} " * with_axis + f"{cell.variant} {cell.mode} {quantity(value, metric)}"
        text += " (n=1)" * (marks and len(frame[frame["cell"] == cell.id]) == 1)
    return text or "no run has it"


def _overlap(frame: pd.DataFrame, cell: Cell, other: Cell, metric: Metric) -> bool:
    mine, theirs = (frame[frame["cell"] == one.id][metric.name] for one in (cell, other))
    return bool(mine.min() <= theirs.max() and theirs.min() <= mine.max())


def _tolerance(verdict: Verdict) -> float:
    """Of the cell's step time, as a fraction."""
    stated = [comparison.tolerance for comparison in verdict.comparisons if comparison.metric == STEP_TIME]
    return stated[0] if stated and stated[0] is not None else Rule().floor


def _yes_or_no(value: bool | None) -> str | None:
    return None if value is None else "yes" if value else "no"
