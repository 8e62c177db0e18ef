"""The report of one test run, from its folder: Markdown, one self-contained HTML page, charts, the runs as CSV.

Of the folders beside it, it shows the history of its cells, and nothing else depends on them.

Imports matplotlib and pandas: whoever wants no report should not import this. Needs no torch.
"""

import base64
from collections.abc import Iterable, Mapping, Sequence, Set
from pathlib import Path

import jinja2
import msgspec
import pandas as pd

from perf.facts.cell import Cell, SamplingPlan
from perf.facts.measurement import Measurement, measure
from perf.facts.outcome import MEASURED, VERDICTS, Outcome
from perf.judge.verdict import Verdict
from perf.measure.connection import ROOT
from perf.tell import axes, conditions, reading, tables
from perf.tell.axes_chart import TITLE as AXES_TITLE
from perf.tell.axes_chart import write_axes_chart
from perf.tell.bars import CHARTS
from perf.tell.charts import write_charts
from perf.tell.exports import FinishedTestRun
from perf.tell.history_section import write_section
from perf.tell.markdown import fence, one_line, printable, without_tags
from perf.tell.published import PublishedTable, published_rows, published_tables
from perf.tell.ranking import ranking
from perf.tell.render import (
    TABLE_HEADER,
    accept_command,
    comparison_text,
    evidence_text,
    in_order,
    markdown_table,
    table_rows,
)
from perf.tell.results import Manifest, Results
from strategies.value import Value

TEMPLATES = Path(__file__).parent / "templates"
MOST_ALIKE = 10
"""Rows of a table that say the same."""
_QUIET = frozenset({Outcome.NO_BASELINE, Outcome.NOT_RUN, Outcome.UNSUPPORTED})
_NO_VERDICT = "no verdict was recorded: the test run ended before this cell was judged"


class Finding(Value, frozen=True, kw_only=True):
    """A failing cell or one without a verdict, told in full; cells refused for the same reason share one."""

    outcome: Outcome
    cell_ids: tuple[str, ...]
    reasons: tuple[str, ...]
    """May have many lines: a traceback, say."""
    remarks: tuple[str, ...]
    command: str | None
    """What would accept it."""


class Why(Value, frozen=True, kw_only=True):
    """What the profiled runs of a cell say."""

    cell_id: str
    lines: tuple[str, ...]
    traces: tuple[tuple[str, str], ...]
    """Name and place of each, seen from the report."""


def write_report(results: Results) -> list[Path]:
    """Writes report.md, report.html, runs.csv and the charts into the folder of a test run; gives their paths.

    Equal records and neighbours give equal bytes. A chart for which no run has a value is not written.

    Raises:
        ValueError: the folder is no test run, or one of its files is damaged.
    """
    folder = Results.open(results.folder).folder
    manifest = results.manifest()
    measurements = [found for cell in manifest.cells if (found := _measurement(results, cell, manifest.plan))]
    frame = tables.runs_frame(measurements)
    verdicts = _verdicts(results, manifest.cells, frame)
    beside = [(one, results.reference_runs(one.cell.id)) for one in measurements]
    references = [measure(one.cell, one.plan, runs) for one, runs in beside if runs]
    test_run = FinishedTestRun(manifest=manifest, verdicts=tuple(verdicts.values()), measurements=tuple(measurements))
    charts = write_charts([*measurements, *references], folder)
    standings = axes.standings(frame, manifest.cells, verdicts)
    axes_charts = write_axes_chart(frame, standings, folder)
    histories = write_section(results, measurements, verdicts)
    page = {
        **_told(results, manifest, verdicts, measurements, frame),
        "charts": [(chart.title, chart.file_name) for chart in CHARTS if folder / chart.file_name in charts],
        "axes": axes.axes_table(frame, standings),
        "axes_growth": axes.growth_table(frame, standings),
        "axes_chart": {"title": AXES_TITLE, "file_name": axes_charts[0].name} if axes_charts else None,
        "cells": tables.cells_table(frame, manifest.cells, verdicts),
        "ratios": tables.ratios_table(frame, manifest.cells, verdicts),
        "growth": tables.growth_table(frame, manifest.cells, verdicts),
        "memory": conditions.memory_table(frame, manifest.cells),
        "modes": conditions.mode_table(measurements),
        "states": conditions.state_table(measurements),
        "arms": conditions.arms_table(beside),
        "decay": conditions.decay_table(measurements),
        "histories": histories,
        "time": tables.time_table(frame, manifest.cells),
        "settings": tables.settings_table(manifest.cells),
        "published": [(table, published_rows(table), ranking(table, test_run)) for table in _published(measurements)],
        "environment": environment_table(measurements),
    }
    brief = _brief(verdicts.values())
    plain = markdown_table(without_tags(verdict) for verdict in brief)
    drawn = [*axes_charts, *charts, *(folder / one.file_name for one in histories)]
    images = {path.relative_to(folder).as_posix(): base64.b64encode(path.read_bytes()).decode() for path in drawn}
    rows = [(row[0], row) for row in table_rows(brief)]
    texts = {
        "report.md": _template("report.md.j2").render(page, verdict_table=plain),
        "report.html": _template("report.html.j2").render(page, header=TABLE_HEADER, rows=rows, images=images),
        "runs.csv": frame.to_csv(index=False, lineterminator="\n"),
    }
    return [_write(folder / name, text) for name, text in texts.items()] + drawn


def _told(
    results: Results,
    manifest: Manifest,
    verdicts: Mapping[str, Verdict],
    measurements: Sequence[Measurement],
    frame: pd.DataFrame,
) -> dict[str, object]:
    """What the report says in words."""
    shown_folder = _shown(results.folder.resolve())
    asked = whys(results, verdicts.values())
    return {
        "manifest": manifest,
        "folder": shown_folder,
        "headline": reading.headline(verdicts.values()),
        "status": reading.status(verdicts.values()),
        "warnings": [*_shift(results), *reading.warnings(measurements, verdicts.values())],
        "findings": findings(verdicts.values(), shown_folder, set(frame[frame["fault"].notna()]["cell"])),
        "most_alike": MOST_ALIKE,
        "whys": asked,
        "splits": conditions.split_table(filter(None, (results.evidence(why.cell_id, "candidate") for why in asked))),
        "warm_up": conditions.warm_up(measurements, manifest.plan),
        "orders": reading.orders(frame, manifest.cells, verdicts),
        "once": reading.has_single_runs(frame),
        "limits": reading.limits(measurements, manifest.cells),
        "run_counts": reading.run_counts(measurements, manifest.cells),
    }


def findings(verdicts: Iterable[Verdict], run_folder: str, planted: Set[str]) -> list[Finding]:
    """Every cell that is not green, most urgent first. What a planted fault did cannot be accepted."""
    found: dict[tuple[object, ...], Finding] = {}
    for verdict in in_order(verdict for verdict in verdicts if verdict.outcome not in VERDICTS):
        remarks = [comparison_text(comparison) for comparison in verdict.comparisons]
        if verdict.comparisons:
            remarks.append(evidence_text(verdict))
        remarks += verdict.notes
        since = "the baseline" if verdict.num_baseline_runs else "the reference"
        remarks += [f"changed since {since}: {change}" for change in verdict.environment_changes]
        if verdict.outcome is Outcome.NO_BASELINE:
            remarks = []  # there is nothing to explain, and the table above has the notes
        acceptable = verdict.outcome is Outcome.REGRESSED and verdict.cell_id not in planted
        acceptable = acceptable and verdict.num_baseline_runs > 0
        finding = Finding(
            outcome=verdict.outcome,
            cell_ids=(verdict.cell_id,),
            reasons=verdict.reasons,
            remarks=tuple(remarks),
            command=accept_command(run_folder) if acceptable else None,
        )
        key = (verdict.outcome, verdict.reasons, () if not remarks else verdict.cell_id)
        if key in found:
            finding = msgspec.structs.replace(finding, cell_ids=(*found[key].cell_ids, verdict.cell_id))
        found[key] = finding
    return list(found.values())


def whys(results: Results, verdicts: Iterable[Verdict]) -> list[Why]:
    """Of every cell that was profiled. Another outcome may have come later, of runs that were not."""
    measured = [verdict.cell_id for verdict in in_order(verdicts) if verdict.outcome in MEASURED]
    return [
        Why(
            cell_id=cell_id,
            lines=lines,
            traces=tuple((path.name, path.relative_to(results.folder).as_posix()) for path in results.traces(cell_id)),
        )
        for cell_id in measured
        if (lines := results.explanation(cell_id))
    ]


def environment_table(measurements: Sequence[Measurement]) -> tables.Table:
    """Where and on what code the runs were made; several values where runs differ."""
    values = reading.environment_values([run for measurement in measurements for run in measurement.runs])
    rows = tuple((name, value) for name, found in values.items() for value in found)
    return tables.Table(header=("what", "value"), rows=rows, first_number=2)


def _shown(folder: Path) -> str:
    """As a reader of the repository finds it; the same wherever the checkout lies."""
    return str(folder.relative_to(ROOT)) if folder.is_relative_to(ROOT) else f"results/{folder.name}"


def _shift(results: Results) -> list[str]:
    shift = results.shift()
    told = [] if shift is None else [shift.text]
    return [f"{text}." for text in (*told, *results.manifest().remarks)]


def _published(measurements: Sequence[Measurement]) -> list[PublishedTable]:
    """Tables to show beside these measurements: all of them are of GPUs."""
    on_gpu = any(measurement.cell.device_kind == "cuda" for measurement in measurements)
    return published_tables(ROOT / "baselines") if on_gpu else []


def _measurement(results: Results, cell: Cell, plan: SamplingPlan) -> Measurement | None:
    try:
        return results.measurement(cell, plan)
    except ValueError as error:
        raise ValueError(f"{results.folder}: {error}; restore the folder or measure again") from None


def _verdicts(results: Results, cells: Sequence[Cell], frame: pd.DataFrame) -> dict[str, Verdict]:
    """By cell, most urgent first; a cell that was never judged is NOT_RUN, never left out."""
    found = {cell.id: Verdict(cell_id=cell.id, outcome=Outcome.NOT_RUN, reasons=(_NO_VERDICT,)) for cell in cells} | {
        verdict.cell_id: verdict for verdict in results.verdicts()
    }
    marked = (
        msgspec.structs.replace(one, notes=(*tables.planted_faults(frame, one.cell_id), *one.notes))
        for one in found.values()
    )
    return {verdict.cell_id: verdict for verdict in in_order(marked)}


def _brief(verdicts: Iterable[Verdict]) -> list[Verdict]:
    """For a table: the first line of each reason; the whole stands below it.

    Where many cells without a verdict have the same to say, one row says it: the others would bury what is red.
    """
    brief = [
        msgspec.structs.replace(verdict, reasons=tuple(tables.short(reason) for reason in verdict.reasons))
        for verdict in verdicts
    ]
    alike: dict[tuple[object, ...], list[Verdict]] = {}
    for verdict in brief:
        quiet = verdict.outcome in _QUIET and not verdict.comparisons
        key = (verdict.outcome, verdict.reasons, verdict.notes) if quiet else (verdict.cell_id,)
        alike.setdefault(key, []).append(verdict)
    return [
        one
        for own in alike.values()
        for one in (
            own
            if len(own) <= MOST_ALIKE
            else [msgspec.structs.replace(own[0], cell_id=f"{len(own)} cells", step_time_s=None)]
        )
    ]


def _template(name: str) -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=jinja2.select_autoescape(["html.j2"]),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["cell"] = one_line
    environment.filters["fence"] = fence
    return environment.get_template(name)


def _write(path: Path, text: str) -> Path:
    """ASCII, without what a terminal would act upon: error messages may hold anything."""
    path.write_bytes(
        printable(text).encode("ascii", "xmlcharrefreplace" if path.suffix == ".html" else "backslashreplace")
    )
    return path
