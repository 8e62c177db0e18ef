"""Room perf/tell/ranking.py: the published order of the axes beside the measured one."""

import pytest
from msgspec.structs import replace

from perf.facts.outcome import Outcome
from perf.judge.verdict import Verdict
from perf.measure.connection import ROOT
from perf.tell.exports import FinishedTestRun
from perf.tell.published import published_tables
from perf.tell.ranking import ranking
from perf.tell.report import write_report
from perf.tell.results import Manifest, Results
from strategies.spec import LinkProfile
from tests.factory import PLAN, cell, environment, measurement
from tests.nodes import H200S

GIB = 2**30
(PUBLISHED,) = published_tables(ROOT / "baselines")
STEP_S = {"fsdp2": 0.1, "ddp": 0.2, "pp_1f1b": 0.08, "tp": 0.4, "tp2.ulysses2": 0.2, "dp2.tp2": 0.01}
"""Of 0.6b. The published order there is PP, DP, CP, TP; products are of no published axis."""


def measured(times_s, link=LinkProfile.NATIVE, world_size=4, machine=H200S, size="0.6b", sequences=16):
    cells = {strategy: cell(strategy, size=size, world_size=world_size, link=link) for strategy in times_s}
    return [
        measurement(
            replace(
                cells[strategy],
                workload=replace(cells[strategy].workload, sequences=sequences),
                label="" if sequences == 16 else f"s{sequences}",
            ),
            step_times_s=(time_s,) * 3,
            allocated_bytes=(GIB,) * 3,
            env=environment(machine=machine),
        )
        for strategy, time_s in times_s.items()
    ]


def finished(measurements):
    cells = tuple(one.cell for one in measurements)
    return FinishedTestRun(
        manifest=Manifest(run_id="r", started_at="2026-11-30T00:00:00+00:00", matrix="four", plan=PLAN, cells=cells),
        verdicts=tuple(Verdict(cell_id=of.id, outcome=Outcome.NO_BASELINE) for of in cells),
        measurements=tuple(measurements),
    )


def rows(measurements):
    return [row[:5] for row in ranking(PUBLISHED, finished(measurements)).table.rows]


def test_orders_stand_beside_each_other_by_the_fastest_cell_of_each_axis():
    (row,) = ranking(PUBLISHED, finished(measured(STEP_S))).table.rows
    assert row[:3] == ("0.6b", "native", "PP 1.00 > DP 0.80 > CP 0.25 > TP 0.08")
    assert row[3:5] == ("PP 1.00 > DP 0.80 > CP 0.40 > TP 0.20", "yes")
    assert row[5] == (
        "PP pp_1f1b eager (3 runs), DP fsdp2 eager (3 runs), CP tp2.ulysses2 eager (3 runs), TP tp eager (3 runs)"
    )


@pytest.mark.parametrize(
    ("changes", "order", "agrees"),
    [
        ({"fsdp2": 0.07}, "DP 1.00 > PP 0.88 > CP 0.35 > TP 0.18", "no: DP > PP"),
        ({"fsdp2": 0.0795}, "DP 1.00 ~ PP 0.99 > CP 0.40 > TP 0.20", "too close to tell: PP ~ DP"),
        ({"fsdp2": 0.0805}, "PP 1.00 ~ DP 0.99 > CP 0.40 > TP 0.20", "too close to tell: PP ~ DP"),
        ({"fsdp2": 0.0795, "tp": 0.15}, "DP 1.00 ~ PP 0.99 > TP 0.53 > CP 0.40", "no: TP > CP"),
    ],
    ids=["another leads", "too close to tell", "as published, but too close to tell", "both"],
)
def test_order_is_another_where_two_axes_clearly_changed_places(changes, order, agrees):
    ((*_, ours, same),) = rows(measured(STEP_S | changes))
    assert (ours, same) == (order, agrees)


def test_each_link_has_its_own_order_of_the_axes_that_were_measured():
    both = measured(STEP_S) + measured({"fsdp2": 0.5, "pp_1f1b": 0.1}, link=LinkProfile.NO_P2P)
    found = {row[1]: row[2:5] for row in rows(both)}
    assert found["no_p2p"] == (
        "PP 1.00 > DP 0.80 > CP 0.25 > TP 0.08",
        "PP 1.00 > DP 0.20; CP not measured; TP not measured",
        "yes, without CP, TP",
    )


def test_axes_that_were_published_and_failed_here_are_told():
    """7b, where a published order has all four: a reader must see which of them this machine could not run."""
    whole = finished(measured(STEP_S))
    verdicts = [
        replace(verdict, outcome=Outcome.ERROR, reasons=("OOM: rank 0: out of memory\nTraceback",))
        if verdict.cell_id.startswith(("tp-", "fsdp2-", "ddp-", "pp_"))
        else verdict
        for verdict in whole.verdicts
    ]
    verdicts[0] = replace(verdicts[0], outcome=Outcome.WRONG)
    (row,) = ranking(PUBLISHED, replace(whole, verdicts=tuple(verdicts))).table.rows
    assert row[2:5] == (
        "PP 1.00 > DP 0.80 > CP 0.25 > TP 0.08",
        "CP 1.00; PP no value (1 tried: OOM); DP no value (2 tried: WRONG, OOM); TP no value (1 tried: OOM)",
        "nothing to compare",
    )


def test_axes_that_are_published_as_equal_may_stand_either_way():
    rates = {row.strategy: row.tokens_per_s for row in PUBLISHED.rows if row.size == "7b"}
    assert rates["TP"] == rates["DP"]
    times_s = {"pp_1f1b": 0.1, "tp2.ulysses2": 0.2, "tp": 0.3, "fsdp2": 0.5}
    (row,) = rows(measured(times_s, size="7b"))
    assert row[2:] == ("PP 1.00 > CP 0.13 > DP 0.08 ~ TP 0.08", "PP 1.00 > CP 0.50 > TP 0.33 > DP 0.20", "yes")


def test_only_the_published_work_is_compared():
    half = measured({"fsdp2": 0.01, "pp_1f1b": 0.02}, sequences=8)
    found = ranking(PUBLISHED, finished(measured(STEP_S) + half))
    assert [row[3] for row in found.table.rows] == ["PP 1.00 > DP 0.80 > CP 0.40 > TP 0.20"]
    assert found.notes == (
        (
            "Not compared: 2 cells of 16,384 tokens a step in sequences of 2,048; "
            "published: 32,768 tokens a step, sequences of 2,048."
        ),
    )


def test_work_that_was_not_stated_is_said_and_never_mixed():
    silent = replace(PUBLISHED, tokens_per_step=None, sequence_length=None)
    half = measured({"fsdp2": 0.01, "pp_1f1b": 0.02}, sequences=8)
    found = ranking(silent, finished(measured(STEP_S) + half))
    assert [row[0].partition(", ")[2][:6] for row in found.table.rows] == ["32,768", "16,384"]
    assert found.notes == (
        (
            "The published table states no work a step: it may differ from 32,768 tokens a step in sequences of 2,048 "
            "and of 16,384 tokens a step in sequences of 2,048."
        ),
    )


def test_names_of_the_fastest_cells_stand_on_the_left():
    table = ranking(PUBLISHED, finished(measured(STEP_S))).table
    assert table.first_number == len(table.header)


def test_nothing_is_ranked_on_other_numbers_of_ranks_several_machines_or_one_axis():
    assert rows(measured({"fsdp2": 0.1, "tp": 0.4}, world_size=2)) == []
    other = measured({"tp": 0.4}, machine=environment().machine)
    assert rows(measured({"fsdp2": 0.1}) + other) == []
    assert rows(measured({"fsdp2": 0.1, "ddp": 0.2})) == []


def test_report_shows_it(tmp_path):
    found, whole = Results(tmp_path / "r"), finished(measured(STEP_S))
    found.write_manifest(whole.manifest)
    for one in whole.measurements:
        for run in one.runs:
            found.write_run(run)
    for verdict in whole.verdicts:
        found.write_verdict(verdict)
    write_report(found)
    for name in ("report.md", "report.html"):
        assert "same order" in (found.folder / name).read_text()
