"""The summary of a CI step: what failed comes first, all cells are there, and GitHub can show it."""

import msgspec
import pytest
from markdown_it import MarkdownIt

from perf.facts.fault import Fault
from perf.facts.measurement import measure
from perf.facts.outcome import Outcome
from perf.judge.verdict import Verdict
from perf.tell.exports import FinishedTestRun, read_test_run
from perf.tell.render import TABLE_HEADER
from perf.tell.results import Results
from perf.tell.step_summary import exit_sentence, step_summary
from tests import factory
from tests.finished_runs import ON_GPUS, PASSES, WITH_RUNS, WITHOUT_RUNS, finished, manifest, write_test_run

READER = MarkdownIt("commonmark").enable("table")


@pytest.fixture
def ended(tmp_path):
    return read_test_run(Results.open(write_test_run(tmp_path)))


def rows_of(text):
    """Of all tables: a row's cells as a reader of Markdown splits them."""
    tokens = READER.parse(text)
    cells = [tokens[index + 1].content for index, token in enumerate(tokens) if token.type == "td_open"]
    width = len(TABLE_HEADER)
    return [cells[start : start + width] for start in range(0, len(cells), width)]


def test_every_cell_has_a_row_failing_ones_first(ended):
    rows = rows_of(step_summary(ended))
    assert [row[0] for row in rows] == [
        "WRONG",
        "ERROR",
        "REGRESSED",
        "INVALID",
        "NOT_RUN",
        "NOT_RUN",
        "PASS",
        "UNSUPPORTED",
    ]
    assert {row[1] for row in rows} == {of.id for of in (PASSES, ON_GPUS, *WITHOUT_RUNS, *WITH_RUNS)}


def test_a_cell_without_a_measurement_has_no_number(ended):
    rows = {row[1]: row for row in rows_of(step_summary(ended))}
    for of in (*WITHOUT_RUNS, *WITH_RUNS):
        assert rows[of.id][2:6] == ["", "", "", ""]
    assert rows[ON_GPUS.id][2] == "100.0 ms -> 250.0 ms"


def test_it_begins_with_counts_exit_code_machine_and_software(ended):
    headline, exit_code, where = step_summary(ended).split("\n\n")[:3]
    assert headline.startswith("### 3 of 8 cells failed: 1 WRONG, 1 ERROR, 1 REGRESSED, 1 INVALID, 2 NOT_RUN, 1 PASS")
    assert exit_code == "Exit code 1: a cell failed."
    for part in (factory.CPU.key, factory.H200X2.key, "torch 2.13.0", "commit c0ffee", "python 3.11.7"):
        assert part in where
    assert "\n" not in where


def test_only_failures_in_full_and_quiet_cells_are_folded(ended):
    text = step_summary(ended)
    titles = [line for line in text.splitlines() if line.startswith("<details>")]
    assert len(titles) == text.count("</details>") == 4
    assert [title.split("<summary>")[1].split(" ")[0] for title in titles[:3]] == ["WRONG", "ERROR", "REGRESSED"]
    assert titles[3] == "<details><summary>1 PASS, 1 UNSUPPORTED</summary>"
    assert text.index(f"| REGRESSED | {ON_GPUS.id}") < text.index(titles[0])
    assert text.index(titles[3]) < text.index(f"| PASS | {PASSES.id}")


def test_what_a_run_printed_stays_text(ended):
    text = step_summary(ended)
    tokens = READER.parse(text)
    told = [token.content for token in tokens if token.type == "fence"]
    assert len(told) == 3
    assert "| pipe ``` <b>tag</b> \u4e2d red\nTraceback, of lines" in told[0]
    html = [token.content for token in tokens if token.type == "html_block"]
    html += [child.content for token in tokens for child in token.children or [] if child.type == "html_inline"]
    assert all("details" in part for part in html)
    assert "\x1b" not in text


def many(outcome, reason, count=300):
    cells = [Verdict(cell_id=f"cell-{number}", outcome=outcome, reasons=(reason,)) for number in range(count)]
    return FinishedTestRun(manifest=manifest(), verdicts=tuple(cells), measurements=())


@pytest.mark.parametrize("reason", ["x" * 1_000_000, "\u4e2d" * 100_000, "line\n" * 50_000])
def test_it_never_outgrows_what_github_takes(reason):
    text = step_summary(many(Outcome.ERROR, reason))
    assert len(text.encode("ascii", "backslashreplace")) < 2**20
    assert len(rows_of(text)) == 300
    assert "more failures stand in the table alone." in text
    assert " characters ..." in text


@pytest.mark.parametrize(
    ("outcomes", "sentence"),
    [
        ([Outcome.PASS, Outcome.UNSUPPORTED], "Exit code 0: every cell that ran is green."),
        ([Outcome.PASS, Outcome.WRONG, Outcome.NOISY], "Exit code 1: a cell failed."),
        (
            [Outcome.PASS, Outcome.NOISY, Outcome.NO_BASELINE],
            (
                "Exit code 8: no cell failed, but some have no verdict; "
                "0 where `--perf-allow=no-baseline,noisy` was given."
            ),
        ),
        ([Outcome.UNSUPPORTED], "Exit code 8: nothing ran."),
    ],
)
def test_exit_code_is_told_with_its_meaning(outcomes, sentence):
    assert exit_sentence([Verdict(cell_id="x", outcome=outcome) for outcome in outcomes]) == sentence


def test_what_was_broken_on_purpose_says_so():
    run = factory.run_record(PASSES)
    planted = measure(PASSES, factory.PLAN, [msgspec.structs.replace(run, fault=Fault.parse("slow_step=0.5"))])
    text = step_summary(finished(planted, Outcome.REGRESSED))
    assert "planted fault slow_step=0.5" in rows_of(text)[0][-1]
    assert "**Note:** Planted faults" in text
