"""A finished test run as the summary of a CI step: what failed first, everything else folded. Imports pandas."""

from collections.abc import Collection, Iterable, Sequence
from itertools import chain

import msgspec

from perf.facts.outcome import VERDICTS, Outcome
from perf.judge.verdict import Verdict
from perf.tell import reading, tables
from perf.tell.exports import FinishedTestRun
from perf.tell.markdown import fence, one_line, printable, without_tags
from perf.tell.render import comparison_text, counts, exit_code, in_order, markdown_table

MOST_BYTES_TOLD = 2**19
"""Of failures in full; half of what GitHub takes leaves room for the tables of a thousand cells."""
MOST_CHARACTERS = 8_000
"""Of one failure."""
QUIET = VERDICTS | {Outcome.UNSUPPORTED}
"""Outcomes that nobody has to look at."""


def step_summary(test_run: FinishedTestRun) -> str:
    """Markdown for `$GITHUB_STEP_SUMMARY`: the counts, the exit code, the machine, then every cell, failing ones first.

    Cells that passed or cannot run here are folded away (`<details>`), and so is the whole text of each failure.
    GitHub shows its own flavour of Markdown, up to 1 MiB a step
    (https://docs.github.com/en/actions/reference/workflows-and-actions/workflow-commands#adding-a-job-summary).
    """
    verdicts = in_order(_with_fault(test_run, verdict) for verdict in test_run.verdicts)
    loud = [verdict for verdict in verdicts if verdict.outcome not in QUIET]
    quiet = [verdict for verdict in verdicts if verdict.outcome in QUIET]
    parts = [f"### {reading.headline(verdicts)}", exit_sentence(verdicts), _where(test_run)]
    if warnings := reading.warnings(test_run.measurements, verdicts):
        parts.append("\n".join(f"- **Note:** {one_line(warning)}" for warning in warnings))
    if loud:
        parts.append(_table(loud))
    parts += _failures_in_full([verdict for verdict in loud if verdict.is_failure])
    if quiet:
        parts.append(_folded(counts(quiet), _table(quiet)))
    return printable("\n\n".join(parts)) + "\n"


def exit_sentence(verdicts: Collection[Verdict]) -> str:
    """What these verdicts make pytest exit with, and what it means."""
    match exit_code(verdicts):
        case 1:
            return "Exit code 1: a cell failed."
        case 8 if without := {v.outcome for v in verdicts} - QUIET:
            names = ",".join(sorted(outcome.lower().replace("_", "-") for outcome in without))
            return f"Exit code 8: no cell failed, but some have no verdict; 0 where `--perf-allow={names}` was given."
        case 8:
            return "Exit code 8: nothing ran."
    return "Exit code 0: every cell that ran is green."


def _where(test_run: FinishedTestRun) -> str:
    """One line: machine and software, several values where runs differ."""
    values = reading.environment_values(chain.from_iterable(one.runs for one in test_run.measurements))
    named = [f"{name} {' / '.join(values[name])}" for name in values if not name.startswith("variable ")]
    where = ", ".join(named) or "no run, so nothing is known of the machine"
    return one_line(f"Test run `{test_run.manifest.run_id}`, matrix `{test_run.manifest.matrix}`: {where}.")


def _with_fault(test_run: FinishedTestRun, verdict: Verdict) -> Verdict:
    """With a note of what was broken on purpose."""
    runs = [run for one in test_run.measurements if one.cell.id == verdict.cell_id for run in one.runs]
    faults = dict.fromkeys(f"planted fault {run.fault.text}" for run in runs if run.fault is not None)
    return msgspec.structs.replace(verdict, notes=(*faults, *verdict.notes))


def _table(verdicts: Iterable[Verdict]) -> str:
    brief = (
        msgspec.structs.replace(verdict, reasons=tuple(map(tables.short, verdict.reasons))) for verdict in verdicts
    )
    return markdown_table(without_tags(verdict) for verdict in brief).strip()


def _failures_in_full(failures: Sequence[Verdict]) -> list[str]:
    """One folded part for each, as many as there is room for."""
    parts: list[str] = []
    room = MOST_BYTES_TOLD
    for number, verdict in enumerate(failures):
        part = _folded(f"{verdict.outcome} {verdict.cell_id}", _told(verdict))
        room -= len(part.encode("ascii", "backslashreplace"))
        if room < 0:
            return [*parts, f"{len(failures) - number} more failures stand in the table alone."]
        parts.append(part)
    return parts


def _told(verdict: Verdict) -> str:
    """The whole failure: reasons and comparisons, the middle of what is very long cut out."""
    text = "\n".join((*verdict.reasons, *map(comparison_text, verdict.comparisons), *verdict.notes))
    if len(text) > MOST_CHARACTERS:
        half = MOST_CHARACTERS // 2
        text = f"{text[:half]}\n... {len(text) - 2 * half} characters ...\n{text[-half:]}"
    return fence(text)


def _folded(title: str, body: str) -> str:
    return f"<details><summary>{one_line(title)}</summary>\n\n{body}\n\n</details>"
