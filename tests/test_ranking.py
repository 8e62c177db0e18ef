"""Room perf/tell/ranking.py: the published order of the axes beside the measured one."""

import pytest

from perf.facts.outcome import Outcome
from perf.judge.verdict import Verdict
from perf.measure.connection import ROOT
from perf.tell.exports import FinishedTestRun
from perf.tell.published import published_tables
from perf.tell.ranking import ranking_table
from perf.tell.report import write_report
from perf.tell.results import Manifest, Results
from strategies.spec import LinkProfile
from tests.factory import PLAN, cell, environment, measurement
from tests.nodes import H200S

GIB = 2**30
(PUBLISHED,) = published_tables(ROOT / "baselines")
STEP_S = {"fsdp2": 0.1, "ddp": 0.2, "pp_1f1b": 0.08, "tp": 0.4, "tp2.ulysses2": 0.2, "dp2.tp2": 0.01}
"""Of 0.6b. The published order there is PP, DP, CP, TP; products are of no published axis."""


def measured(times_s, link=LinkProfile.NATIVE, world_size=4, machine=H200S):
    return [
        measurement(
            cell(strategy, size="0.6b", world_size=world_size, link=link),
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
    return [row[:5] for row in ranking_table(PUBLISHED, finished(measurements)).rows]


def test_orders_stand_beside_each_other_by_the_fastest_cell_of_each_axis():
    (row,) = ranking_table(PUBLISHED, finished(measured(STEP_S))).rows
    assert row[:3] == ("0.6b", "native", "PP 1.00 > DP 0.80 > CP 0.25 > TP 0.08")
    assert row[3:5] == ("PP 1.00 > DP 0.80 > CP 0.40 > TP 0.20", "yes")
    assert row[5] == "PP pp_1f1b eager, DP fsdp2 eager, CP tp2.ulysses2 eager, TP tp eager"


@pytest.mark.parametrize(
    ("changes", "order", "agrees"),
    [
        ({"fsdp2": 0.07}, "DP 1.00 > PP 0.88 > CP 0.35 > TP 0.18", "no"),
        ({"fsdp2": 0.0795}, "DP 1.00 > PP 0.99 > CP 0.40 > TP 0.20", "yes"),
    ],
    ids=["another leads", "too close to tell"],
)
def test_order_is_another_where_two_axes_clearly_changed_places(changes, order, agrees):
    ((*_, ours, same),) = rows(measured(STEP_S | changes))
    assert (ours, same) == (order, agrees)


def test_each_link_has_its_own_order_of_the_axes_that_were_measured():
    both = measured(STEP_S) + measured({"fsdp2": 0.5, "pp_1f1b": 0.1}, link=LinkProfile.NO_P2P)
    found = {row[1]: row[2:4] for row in rows(both)}
    assert found["no_p2p"] == ("PP 1.00 > DP 0.80", "PP 1.00 > DP 0.20")


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
