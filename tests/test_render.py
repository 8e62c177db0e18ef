"""Room perf/tell/render.py: units, the line that tells a whole verdict, tables, and the exit code."""

import itertools

import pytest

from perf.facts.measurement import PEAK_ALLOCATED, PEAK_RESERVED, PEAK_RESIDENT, STEP_TIME, THROUGHPUT, Metric
from perf.facts.outcome import Outcome
from perf.judge.rule import Rule
from perf.judge.verdict import Comparison, Verdict, judge
from perf.tell import render
from strategies.spec import LinkProfile
from tests.factory import baseline, cell, environment, invariants, measurement

GIB = 2**30
NIGHTS = ((0.1,) * 3,) * 3
GREEN = {Outcome.PASS, Outcome.IMPROVED}
RED = {Outcome.WRONG, Outcome.ERROR, Outcome.REGRESSED}


def said(outcome, name="ddp-tiny-eager-w2-gloo", *reasons):
    return Verdict(cell_id=name, outcome=outcome, reasons=reasons)


def compare(metric=STEP_TIME, *, old=0.0512, new=0.0589, interval=(0.091, 0.212), tolerance=0.065):
    return Comparison(
        metric=metric,
        old=old,
        new=new,
        change=(new - old) / old,
        interval=interval,
        tolerance=tolerance,
        outcome=Outcome.REGRESSED,
    )


@pytest.mark.parametrize(
    ("value", "metric", "text"),
    [
        (0.0512, STEP_TIME, "51.2 ms"),
        (0.00012, STEP_TIME, "0.1 ms"),
        (1.0, STEP_TIME, "1.000 s"),
        (12.3456, STEP_TIME, "12.346 s"),
        (32_768.4, THROUGHPUT, "32,768 tok/s"),
        (400 * 2**20, PEAK_RESIDENT, "400.0 MiB"),
        (GIB - 2**20, PEAK_RESERVED, "1023.0 MiB"),
        (GIB, PEAK_ALLOCATED, "1.00 GiB"),
        (10.5 * GIB, PEAK_ALLOCATED, "10.50 GiB"),
        (2.5, Metric(name="x", title="x", unit="J", better="lower"), "2.5 J"),
    ],
)
def test_value_is_scaled_with_its_unit(value, metric, text):
    assert render.quantity(value, metric) == text


@pytest.mark.parametrize(
    ("fraction", "text"), [(0.15, "+15.0 %"), (-0.0312, "-3.1 %"), (0.0, "+0.0 %"), (1.0, "+100.0 %")]
)
def test_change_is_signed(fraction, text):
    assert render.percent(fraction) == text


@pytest.mark.parametrize(
    ("comparison", "text"),
    [
        (compare(), "step time 51.2 ms -> 58.9 ms, +15.0 % [+9.1, +21.2], tolerance 6.5 %"),
        (
            compare(PEAK_ALLOCATED, old=10 * GIB, new=9.5 * GIB, interval=None, tolerance=0.003125),
            "peak allocated 10.00 GiB -> 9.50 GiB, -5.0 %, tolerance 0.3 %",
        ),
        (
            compare(PEAK_RESIDENT, old=400 * 2**20, new=500 * 2**20, interval=None, tolerance=None),
            "peak resident 400.0 MiB -> 500.0 MiB, +25.0 %, not gated",
        ),
    ],
    ids=["with interval", "without interval", "not gated"],
)
def test_comparison_says_old_new_change_interval_and_tolerance(comparison, text):
    assert render.comparison_text(comparison) == text


def verdict_on(step_s=0.1, *, nights=NIGHTS, **changes):
    of_runs = measurement(step_times_s=(step_s,) * 3, env=environment(**changes))
    return judge(of_runs, baseline(nights=nights), invariants(), Rule())


def test_line_of_a_regression_tells_all_and_how_to_accept_it():
    verdict = verdict_on(0.115, host="node2")
    assert render.line(verdict, run_folder="results/2026-11-29").split(" | ") == [
        "REGRESSED   ddp-tiny-eager-w2-gloo",
        "step time 100.0 ms -> 115.0 ms, +15.0 % [+14.0, +16.0], tolerance 2.5 %",
        "3 runs vs 9",
        "finds 3.1 %",
        "changed: host node1 -> node2",
        'accept: python -m tools.approve results/2026-11-29 --accept-regression --reason "why it may be slower"',
    ]


def test_command_that_accepts_stands_on_regressed_lines_only():
    lines = {step_s: render.line(verdict_on(step_s)) for step_s in (0.05, 0.1, 0.2)}
    assert [step_s for step_s, line in lines.items() if "--accept-regression" in line] == [0.2]
    assert "tools.approve results/RUN " in lines[0.2]


@pytest.mark.parametrize(("number", "text"), [(1, "1 run"), (3, "3 runs"), (0, "0 runs")])
def test_runs_are_counted_in_words(number, text):
    assert render.runs_text(number) == text


def test_line_of_a_provisional_baseline_says_so():
    assert "3 runs vs 3 (provisional)" in render.line(verdict_on(nights=NIGHTS[:1]))
    assert "provisional" not in render.line(verdict_on())


def test_line_of_grown_memory_shows_memory_and_step_time():
    of = cell(link=LinkProfile.NATIVE)
    of_runs = measurement(of, allocated_bytes=(11 * GIB,) * 3)
    stored = baseline(of, nights=NIGHTS, allocated_bytes=10 * GIB)
    text = render.line(judge(of_runs, stored, invariants(of), Rule()))
    assert "peak allocated 10.00 GiB -> 11.00 GiB, +10.0 %, tolerance 0.3 %" in text
    assert "step time 100.0 ms -> 100.0 ms, +0.0 %" in text
    assert "peak resident" not in text


def test_noisy_line_promises_no_sensitivity():
    assert "finds" not in render.line(verdict_on(nights=((0.05, 0.1, 0.2),) * 3))
    assert "finds" in render.line(verdict_on())


def test_line_without_a_comparison_is_the_outcome_the_cell_and_the_reasons():
    verdict = said(Outcome.WRONG, "ddp-tiny-eager-w2-gloo", "run 0: the loss is not finite", "run 1: too")
    assert render.line(verdict) == "WRONG       ddp-tiny-eager-w2-gloo | run 0: the loss is not finite | run 1: too"


@pytest.mark.parametrize("outcome", Outcome)
def test_exit_code_of_one_outcome(outcome):
    expected = 1 if outcome in RED else 0 if outcome in GREEN else 8
    assert render.exit_code([said(outcome)]) == expected


@pytest.mark.parametrize(("first", "second"), list(itertools.combinations(Outcome, 2)))
def test_exit_code_of_two_outcomes(first, second):
    outcomes = {first, second} - {Outcome.UNSUPPORTED}
    expected = 1 if outcomes & RED else 0 if outcomes <= GREEN else 8
    assert render.exit_code([said(first), said(second)]) == expected
    assert render.exit_code(iter([said(second), said(first)])) == expected


@pytest.mark.parametrize("outcome", Outcome)
def test_allowed_outcome_counts_as_0_unless_it_is_a_failure_or_nothing_ran(outcome):
    code = render.exit_code([said(Outcome.PASS), said(outcome)], frozenset({outcome}))
    assert code == (1 if outcome in RED else 0)
    alone = render.exit_code([said(outcome)], frozenset({outcome}))
    assert alone == (1 if outcome in RED else 8 if outcome is Outcome.UNSUPPORTED else 0)


def test_allowing_one_outcome_allows_no_other():
    verdicts = [said(Outcome.NOISY), said(Outcome.NO_BASELINE)]
    assert render.exit_code(verdicts, frozenset({Outcome.NOISY})) == 8
    assert render.exit_code(verdicts, frozenset({Outcome.NOISY, Outcome.NO_BASELINE})) == 0


def test_nothing_at_all_is_not_green():
    assert render.exit_code([]) == 8
    assert render.exit_code([], frozenset(Outcome)) == 8


def test_order_of_outcomes_names_each_once_failures_first():
    assert sorted(render.OUTCOME_ORDER) == sorted(Outcome)
    assert set(render.OUTCOME_ORDER[:3]) == RED


def test_counts_are_told_most_urgent_first():
    verdicts = [said(Outcome.PASS), said(Outcome.REGRESSED), said(Outcome.PASS), said(Outcome.NOT_RUN)]
    assert render.counts(verdicts) == "1 REGRESSED, 1 NOT_RUN, 2 PASS"
    assert render.counts([]) == "no cells"


def test_rows_are_in_order_of_urgency_then_of_names():
    verdicts = [said(Outcome.PASS, "b"), said(Outcome.PASS, "a"), said(Outcome.WRONG, "c"), said(Outcome.NOISY, "d")]
    assert [verdict.cell_id for verdict in render.in_order(verdicts)] == ["c", "d", "a", "b"]


def test_table_row_of_a_comparison():
    (row,) = render.table_rows([verdict_on(0.115)])
    assert len(row) == len(render.TABLE_HEADER)
    assert row[:5] == ("REGRESSED", "ddp-tiny-eager-w2-gloo", "100.0 ms -> 115.0 ms", "+15.0 %", "2.5 %")


def test_markdown_escapes_what_would_break_the_table():
    text = render.markdown_table([said(Outcome.ERROR, "cell", "CRASH: a | b\nrank 1")])
    header, rule, row = text.splitlines()
    assert text.endswith("|\n")
    assert header.count("|") == rule.count("|") == len(render.TABLE_HEADER) + 1
    assert row == "| ERROR | cell |  |  |  |  | CRASH: a \\| b rank 1 |"


def test_all_that_is_shown_is_ascii():
    verdicts = [verdict_on(0.115), verdict_on(), said(Outcome.NO_BASELINE, "x", "no timing baseline")]
    assert "".join([*map(render.line, verdicts), render.markdown_table(verdicts)]).isascii()
