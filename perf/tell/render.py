"""Verdicts as text: one line per cell, a summary table, Markdown. Units are scaled here and nowhere else."""

from collections import Counter
from collections.abc import Iterable

from perf.facts.measurement import PEAK_ALLOCATED, STEP_TIME, Metric
from perf.facts.outcome import FAILURES, Outcome
from perf.judge.verdict import Comparison, Verdict

OUTCOME_ORDER = (
    Outcome.WRONG,
    Outcome.ERROR,
    Outcome.REGRESSED,
    Outcome.INVALID,
    Outcome.ENVIRONMENT,
    Outcome.NOISY,
    Outcome.NO_BASELINE,
    Outcome.NOT_RUN,
    Outcome.IMPROVED,
    Outcome.PASS,
    Outcome.UNSUPPORTED,
)
"""Most urgent first: the order of tables and counts."""


def runs_text(number: int) -> str:
    """`1 run`, `3 runs`."""
    return f"{number} run{'s' * (number != 1)}"


def quantity(value: float, metric: Metric) -> str:
    """A value with its unit, for people."""
    match metric.unit:
        case "s":
            return f"{value:.3f} s" if value >= 1 else f"{value * 1e3:.1f} ms"
        case "bytes":
            return f"{value / 2**30:.2f} GiB" if value >= 2**30 else f"{value / 2**20:.1f} MiB"
        case "tok/s":
            return f"{value:,.0f} tok/s"
        case unit:
            return f"{value:g} {unit}"


def percent(fraction: float) -> str:
    """A signed change; never -0.0."""
    return f"{round(fraction * 100, 1) + 0.0:+.1f} %"


def comparison_text(comparison: Comparison) -> str:
    """`step time 51.2 ms -> 58.9 ms, +15.0 % [+9.1, +21.2], tolerance 6.5 %`."""
    metric = comparison.metric
    text = f"{metric.title} {quantity(comparison.old, metric)} -> {quantity(comparison.new, metric)}"
    text += f", {percent(comparison.change)}"
    if comparison.interval is not None:
        low, high = comparison.interval
        text += f" [{low * 100:+.1f}, {high * 100:+.1f}]"
    if comparison.tolerance is None:
        return text + ", not gated"
    return text + f", tolerance {comparison.tolerance * 100:.1f} %"


def line(verdict: Verdict, *, run_folder: str | None = None) -> str:
    """The whole verdict on one cell in one line; `run_folder` completes the command that would accept a regression."""
    parts = [f"{verdict.outcome:<11} {verdict.cell_id}"]
    parts += verdict.reasons
    if not verdict.comparisons and verdict.step_time_s is not None:
        parts.append(f"step time {quantity(verdict.step_time_s, STEP_TIME)}, {runs_text(verdict.num_runs)}")
    decisive = [
        c for c in verdict.comparisons if c.outcome in (verdict.outcome, Outcome.REGRESSED) or c.metric == STEP_TIME
    ]
    parts += [comparison_text(comparison) for comparison in decisive]
    if verdict.comparisons:
        parts.append(evidence_text(verdict))
    if verdict.sensitivity is not None and verdict.outcome is not Outcome.NOISY:
        parts.append(f"finds {verdict.sensitivity * 100:.1f} %")
    parts += verdict.notes
    if verdict.environment_changes:
        parts.append("changed: " + ", ".join(verdict.environment_changes))
    if verdict.outcome is Outcome.REGRESSED and verdict.num_baseline_runs:
        parts.append(f"accept: {accept_command(run_folder or 'results/RUN')}")
    return " | ".join(parts)


def evidence_text(verdict: Verdict) -> str:
    """`3 runs vs 9`, `10 runs vs 9 (+4.1 % of 3, +3.9 % of 6), 4 pairs side by side`, `4 pairs side by side`."""
    parts = []
    if verdict.num_baseline_runs:
        looks = ", ".join(f"{percent(look.change)} of {look.num_runs}" for look in verdict.looks)
        text = f"{runs_text(verdict.num_runs)} vs {verdict.num_baseline_runs}{' (provisional)' * verdict.provisional}"
        parts.append(f"{text} ({looks})" if len(verdict.looks) > 1 else text)
    if verdict.num_pairs:
        parts.append(f"{verdict.num_pairs} pair{'s' * (verdict.num_pairs != 1)} side by side")
    return ", ".join(parts)


def accept_command(run_folder: str) -> str:
    return f'python -m tools.approve {run_folder} --accept-regression --reason "why it may be slower"'


def counts(verdicts: Iterable[Verdict]) -> str:
    """`1 REGRESSED, 3 PASS`."""
    counted = Counter(verdict.outcome for verdict in verdicts)
    return ", ".join(f"{counted[outcome]} {outcome}" for outcome in OUTCOME_ORDER if counted[outcome]) or "no cells"


def in_order(verdicts: Iterable[Verdict]) -> list[Verdict]:
    """Most urgent first, then by name."""
    return sorted(verdicts, key=lambda verdict: (OUTCOME_ORDER.index(verdict.outcome), verdict.cell_id))


def table_rows(verdicts: Iterable[Verdict]) -> list[tuple[str, ...]]:
    """Rows of the summary: outcome, cell, step time, change, tolerance, peak, and what there is to say."""
    rows: list[tuple[str, ...]] = []
    for verdict in in_order(verdicts):
        time = _find(verdict, STEP_TIME)
        peak = _find(verdict, PEAK_ALLOCATED)
        rows.append(
            (
                verdict.outcome.value,
                verdict.cell_id,
                _step_time(verdict, time),
                percent(time.change) if time else "",
                f"{time.tolerance * 100:.1f} %" if time and time.tolerance is not None else "",
                f"{quantity(peak.old, peak.metric)} -> {quantity(peak.new, peak.metric)}" if peak else "",
                "; ".join((*verdict.reasons, *verdict.notes)),
            )
        )
    return rows


TABLE_HEADER = ("outcome", "cell", "step time", "change", "tolerance", "peak allocated", "remarks")


def table_lines(verdicts: Iterable[Verdict]) -> list[str]:
    """The summary in columns of plain text, one line per verdict."""
    rows = [row[:-1] for row in table_rows(verdicts)]
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(len(TABLE_HEADER) - 1)]
    return ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def markdown_table(verdicts: Iterable[Verdict]) -> str:
    """The summary as a Markdown table, failing rows first."""
    rows = [
        TABLE_HEADER,
        *[tuple(cell.replace("|", "\\|").replace("\n", " ") for cell in row) for row in table_rows(verdicts)],
    ]
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    lines.insert(1, "|" + "---|" * len(TABLE_HEADER))
    return "\n".join(lines) + "\n"


WITHOUT_VERDICT = 8
"""Exit code: no failure, but something could not be judged."""


def exit_code(verdicts: Iterable[Verdict], allowed: frozenset[Outcome] = frozenset()) -> int:
    """0: everything that ran is green; 1: a failure; 8: a cell without a verdict, or nothing ran at all.

    `allowed` are outcomes without a verdict that count as 0. UNSUPPORTED does not count, unless nothing else is there.
    """
    outcomes = {verdict.outcome for verdict in verdicts} - {Outcome.UNSUPPORTED}
    if outcomes & FAILURES:
        return 1
    without_verdict = outcomes - {Outcome.PASS, Outcome.IMPROVED} - allowed
    return WITHOUT_VERDICT if without_verdict or not outcomes else 0


def _step_time(verdict: Verdict, time: Comparison | None) -> str:
    if time is not None:
        return f"{quantity(time.old, time.metric)} -> {quantity(time.new, time.metric)}"
    return "" if verdict.step_time_s is None else quantity(verdict.step_time_s, STEP_TIME)


def _find(verdict: Verdict, metric: Metric) -> Comparison | None:
    return next((comparison for comparison in verdict.comparisons if comparison.metric == metric), None)
