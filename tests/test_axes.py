"""Rooms perf/tell/axes.py and axes_chart.py: the fastest candidate of each axis, and a report of many cells."""

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text
from msgspec.structs import replace

from perf.facts.measurement import measure
from perf.facts.outcome import Outcome
from perf.judge.verdict import Verdict
from perf.tell import axes, axes_chart, reading, tables
from perf.tell.report import MOST_ALIKE, write_report
from perf.tell.results import Manifest, Results
from strategies.spec import LinkProfile
from tests import factory

GIB = 2**30
STEP_S = {
    "ddp": 0.2,
    "fsdp2": 0.1,
    "hsdp": 0.15,
    "tp": 0.4,
    "tp_sp": 0.401,
    "pp_1f1b": 0.08,
    "pp_zbv": 0.09,
    "cp_ring": 0.3,
    "tp2.ulysses2": 0.2,
    "dp2.tp2": 0.12,
    "dp2.pp2": 0.11,
}
BEST = {"PP": "pp_1f1b", "DP": "fsdp2", "product": "dp2.pp2", "CP": "tp2.ulysses2", "TP": "tp"}
"""By throughput."""


def cell(strategy, size="0.6b", link=LinkProfile.NATIVE):
    return factory.cell(strategy, size=size, world_size=4, link=link)


def measured(times_s, num_runs=3, **where):
    found = []
    for strategy, time_s in times_s.items():
        env = factory.environment(factory.H200X2)
        whole = factory.measurement(
            cell(strategy, **where), step_times_s=(time_s,) * 3, allocated_bytes=(GIB,) * 3, env=env
        )
        found.append(measure(whole.cell, whole.plan, whole.runs[:num_runs]))
    return found


def judged(measurements, failed=()):
    """The frame, the cells and their verdicts; `failed` cells have none but their error."""
    cells = [one.cell for one in measurements] + list(failed)
    verdicts = {of.id: Verdict(cell_id=of.id, outcome=Outcome.NO_BASELINE) for of in cells}
    reasons = ("OOM: rank 0: out of memory\nTraceback",)
    verdicts |= {of.id: Verdict(cell_id=of.id, outcome=Outcome.ERROR, reasons=reasons) for of in failed}
    return tables.runs_frame(measurements), cells, verdicts


def test_each_axis_stands_by_its_fastest_candidate_and_the_fastest_axis_first():
    frame, cells, verdicts = judged(measured(STEP_S))
    found = axes.standings(frame, cells, verdicts)
    assert {one.axis: one.candidates[0].strategy for one in found} == BEST
    assert [one.axis for one in found] == list(BEST)
    pipeline, data, *_, tensor = axes.axes_table(frame, found).rows
    assert pipeline[:4] == ("0.6b", "native", "PP", "pp_1f1b eager")
    assert pipeline[5] == "1.00 x"
    assert pipeline[9:] == ("pp_zbv eager 0.89 x", "")
    assert (data[4], data[5]) == ("327,680 tok/s [327,680, 327,680]", "0.80 x")
    assert tensor[9] == "tp_sp eager ~ 1.00 x"


def test_what_failed_is_told_where_others_of_its_axis_ran_and_where_none_did():
    failed = [cell("ddp"), *map(cell, ("tp", "tp_sp"))]
    frame, cells, verdicts = judged(measured({"fsdp2": 0.1, "pp_1f1b": 0.2}), failed)
    rows = axes.axes_table(frame, axes.standings(frame, cells, verdicts)).rows
    assert [(row[2], row[3], row[10]) for row in rows] == [
        ("DP", "fsdp2 eager", "ddp eager OOM"),
        ("PP", "pp_1f1b eager", ""),
        ("TP", "-", "tp eager OOM, tp_sp eager OOM"),
    ]


def test_cell_that_nobody_judged_yet_is_no_candidate():
    """Interrupted between its runs and its verdict: whether it computes the model is not known."""
    frame, cells, verdicts = judged(measured({"ddp": 0.05, "fsdp2": 0.1, "tp": 0.2}))
    verdicts[cells[0].id] = Verdict(cell_id=cells[0].id, outcome=Outcome.NOT_RUN)
    data, _ = axes.standings(frame, cells, verdicts)
    assert (data.candidates, data.failures) == ((cells[1],), ("ddp eager NOT_RUN",))


def test_links_sizes_and_workloads_have_their_own_order():
    other = [
        *measured({"fsdp2": 0.3, "tp": 0.2}, link=LinkProfile.NO_P2P),
        *measured({"fsdp2": 0.5, "tp": 0.6}, size="1.7b"),
    ]
    half = measured({"fsdp2": 0.01})[0]
    work = replace(half.cell.workload, sequences=8)
    of = replace(half.cell, workload=work, label="half")
    halved = measure(of, half.plan, [replace(run, cell=of) for run in half.runs])
    frame, cells, verdicts = judged([*measured({"fsdp2": 0.1, "tp": 0.2}), *other, halved])
    found = axes.standings(frame, cells, verdicts)
    assert [(one.group.size, one.group.link, one.axis) for one in found] == [
        *[("0.6b", "native", "DP"), ("0.6b", "native", "TP"), ("0.6b", "no_p2p", "TP"), ("0.6b", "no_p2p", "DP")],
        *[("1.7b", "native", "DP"), ("1.7b", "native", "TP")],
    ], "a cell of half the work stands alone, and no axis beside it"
    growth = axes.growth_table(frame, found)
    assert growth.header == ("axis", "0.6b", "1.7b", "largest / smallest")
    assert growth.rows == (
        ("DP, native", "100.0 ms, fsdp2 eager", "500.0 ms, fsdp2 eager", "5.00 x"),
        ("TP, native", "200.0 ms, tp eager", "600.0 ms, tp eager", "3.00 x"),
    )


def test_cpu_ranks_and_one_axis_have_no_such_order():
    on_cpu = [factory.measurement(factory.cell(name)) for name in ("ddp", "tp", "tp_sp")]
    assert axes.standings(*judged(on_cpu)) == []
    assert axes.standings(*judged(measured({"ddp": 0.1, "fsdp2": 0.2}))) == []


@pytest.mark.parametrize("num_runs", [1, 3])
def test_picture_has_a_bar_for_each_axis_and_link_and_nothing_is_cut(num_runs):
    both = [*measured(STEP_S, num_runs), *measured({"ddp": 0.5, "tp": 0.3}, link=LinkProfile.NO_P2P)]
    names = ("cp_usp", "cp_ulysses", "cp_ring", "tp2.ulysses2", "fsdp2.ulysses2", "fsdp2.ring2", "tp2.ring2")
    frame, cells, verdicts = judged(both, [cell(name, link=LinkProfile.NO_P2P) for name in names])
    figure = axes_chart.figure_of(frame, axes.standings(frame, cells, verdicts))
    assert [len(panel.patches) for panel in figure.axes] == [7, 7, 7]
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert labels[:3] == ["PP  pp_1f1b eager", "DP  fsdp2 eager", "DP  ddp eager"]
    assert "CP  (no value)" in labels
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    words = [text for text in figure.findobj(Text) if text.get_text().strip() and text.get_visible()]
    drawn, (width, height) = figure.get_tightbbox(canvas.get_renderer()), figure.get_size_inches()
    assert min(drawn.x0, drawn.y0) >= 0
    assert drawn.x1 <= width
    assert drawn.y1 <= height
    told = " ".join(text.get_text() for text in words)
    assert "7 tried: OOM" in told
    assert ("dashed: one run" in told) is (num_runs == 1)
    assert ("n=1" in told) is (num_runs == 1)


def test_order_of_many_cells_is_told_axis_by_axis_and_marks_single_runs():
    once = {name: STEP_S[name] for name in ("pp_zbv", "tp_sp", "ddp")}
    often = {name: time_s for name, time_s in STEP_S.items() if name not in once}
    first, second, third = reading.orders(*judged([*measured(often), *measured(once, 1)]))
    assert first == (
        "0.6b, 4 ranks on GPU, the best of each axis, fastest first: PP pp_1f1b eager 409,600 tok/s > "
        "DP fsdp2 eager 327,680 tok/s > product dp2.pp2 eager 297,891 tok/s > CP tp2.ulysses2 eager 163,840 tok/s > "
        "TP tp eager 81,920 tok/s"
    )
    assert "the best of each axis, least peak allocated first: " in second
    assert (
        "within each axis, fastest first: PP: pp_1f1b eager 409,600 tok/s > pp_zbv eager 364,089 tok/s (n=1); " in third
    )
    assert third.endswith("TP: tp eager 81,920 tok/s ~ tp_sp eager 81,716 tok/s (n=1)")


def test_cells_of_other_work_are_not_in_one_order():
    half = measured({"fsdp2": 0.01, "tp": 0.02})
    cells = [replace(one.cell, workload=replace(one.cell.workload, sequences=8), label="half") for one in half]
    halved = [
        measure(of, one.plan, [replace(run, cell=of) for run in one.runs]) for of, one in zip(cells, half, strict=True)
    ]
    found = reading.orders(*judged([*measured({"ddp": 0.1, "pp_1f1b": 0.2}), *halved]))
    assert [line.count("tok/s") for line in found if "fastest first" in line] == [2, 2]
    assert [line.partition(" tokens")[0].split(", ", 2)[2] for line in found] == ["32,768"] * 2 + ["16,384"] * 2


def test_report_of_many_cells_leads_with_the_axes_and_folds_what_says_the_same(tmp_path):
    results = Results(tmp_path / "run")
    failed = cell("cp_usp")
    found = measured(STEP_S)
    cells = (*(one.cell for one in found), failed)
    started = "2026-11-30T00:00:00+00:00"
    results.write_manifest(Manifest(run_id="run", started_at=started, matrix="x", plan=factory.PLAN, cells=cells))
    for one in found:
        for run in one.runs:
            results.write_run(run)
    _, _, verdicts = judged(found, [failed])
    for verdict in verdicts.values():
        results.write_verdict(verdict)
    assert len(found) > MOST_ALIKE
    assert axes_chart.FILE_NAME in [path.name for path in write_report(results)]
    text, page = ((results.folder / name).read_text() for name in ("report.md", "report.html"))
    assert f"| NO_BASELINE | {len(found)} cells |" in text
    assert f"| ERROR | {failed.id} |" in text
    assert f"### NO_BASELINE: {len(found)} cells\n" in text
    assert all(of.id in text for of in cells)
    assert "| 0.6b | native | CP | tp2.ulysses2 eager |" in text
    assert "cp_usp 2x2 eager OOM |" in text
    assert text.index("![The fastest candidate of each axis](axes.png)") < text.index("![Cluster throughput]")
    assert page.count("<img ") == 4
    assert f'<span class="outcome NO_BASELINE">NO_BASELINE</span> {len(found)} cells</h3>' in page
