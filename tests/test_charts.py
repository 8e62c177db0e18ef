"""The charts: their bars are medians with the smallest and largest run, and equal measurements give equal files."""

import itertools
import math

import msgspec
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text
from PIL import Image

from perf.facts.fault import Fault
from perf.facts.measurement import PEAK_ALLOCATED, PEAK_RESIDENT, STEP_TIME, THROUGHPUT, measure
from perf.tell import bars, charts
from strategies.spec import ComputeDtype, LinkProfile, Mode, Options, StrategyName
from tests import factory

THROUGHPUT_CHART, STEP_TIME_CHART, MEMORY_CHART = bars.CHARTS
NATIVE = {"size": "0.6b", "link": LinkProfile.NATIVE}


def gpu(strategy=StrategyName.DDP, *, step_times_s=(0.5, 0.4, 0.6), allocated=(8, 9, 7), **cell):
    of = factory.cell(strategy, **(NATIVE | cell))
    return factory.measurement(
        of,
        step_times_s=step_times_s,
        allocated_bytes=tuple(gib * 2**30 for gib in allocated),
        env=factory.environment(factory.H200X2),
    )


def texts_of(figure):
    """All that is written in a picture and shown."""
    return [text for text in figure.findobj(Text) if text.get_text().strip() and text.get_visible()]


def test_a_bar_is_the_median_with_the_smallest_and_the_largest_run():
    (bar,) = bars.bars([gpu()], STEP_TIME_CHART)
    assert (bar.median, bar.low, bar.high, bar.num_runs) == (0.5, 0.4, 0.6, 3)
    (bar,) = bars.bars([gpu()], THROUGHPUT_CHART)
    assert (bar.median, bar.low, bar.high) == (32_768 / 0.5, 32_768 / 0.6, 32_768 / 0.4)


def test_memory_is_allocated_on_gpus_and_resident_on_cpus():
    on_cpu, on_gpu = bars.panels(bars.bars([gpu(), factory.measurement()], MEMORY_CHART))
    assert (on_cpu.metric, on_cpu.bars[0].median) == (PEAK_RESIDENT, 400 * 2**20)
    assert (on_gpu.metric, on_gpu.bars[0].low, on_gpu.bars[0].high) == (PEAK_ALLOCATED, 7 * 2**30, 9 * 2**30)
    assert bars.titles([on_cpu, on_gpu]) == ["tiny, CPU, gloo", "0.6b, GPU, native"]


def test_small_sizes_come_first_and_strategies_in_the_order_of_their_names():
    measured = [
        gpu(StrategyName.FSDP2, size="1.7b"),
        gpu(StrategyName.FSDP2),
        gpu(mode=Mode.COMPILE),
        gpu(StrategyName.SINGLE, world_size=1),
        gpu(),
    ]
    small, large = bars.panels(bars.bars(measured, STEP_TIME_CHART))
    assert (small.size, large.size) == ("0.6b", "1.7b")
    assert [[(bar.cell.strategy, bar.cell.mode) for bar in group] for group in small.groups] == [
        [("single", "eager")],
        [("ddp", "eager"), ("ddp", "compile")],
        [("fsdp2", "eager")],
    ]


def test_strategies_of_an_axis_stand_together_with_its_name_over_them():
    names = ("dp2.tp2", "tp2.ulysses2", "tp", "cp_ring", "ddp", "pp_1f1b", "pp_zbv", "fsdp2", "dp2.pp2")
    (panel,) = bars.panels(bars.bars([gpu(name, world_size=4) for name in names], STEP_TIME_CHART))
    assert [group[0].cell.strategy for group in panel.groups] == [
        *("ddp", "fsdp2", "tp", "pp_1f1b", "pp_zbv", "cp_ring", "tp2.ulysses2", "dp2.pp2", "dp2.tp2")
    ]
    assert panel.axes == (("DP", 2), ("TP", 1), ("PP", 2), ("CP", 2), ("product", 2))
    words = [text.get_text() for text in texts_of(charts.figure_of(STEP_TIME_CHART, [panel]))]
    assert [name for name, _ in panel.axes if name in words] == ["DP", "TP", "PP", "CP", "product"]


def test_what_all_bars_share_is_said_once():
    shown = bars.panels(bars.bars([gpu(), gpu(StrategyName.FSDP2), gpu(size="1.7b")], STEP_TIME_CHART))
    assert bars.common(shown) == "2 ranks, GPU, native, 32,768 tokens a step in sequences of 2,048"
    assert bars.titles(shown) == ["0.6b", "1.7b"]
    assert bars.labels(shown[0], bars.variant_names(shown)) == [("ddp",), ("fsdp2",)]
    words = " ".join(text.get_text() for text in texts_of(charts.figure_of(STEP_TIME_CHART, shown)))
    assert words.count("2 ranks") == words.count("3 runs") == 1
    assert "n=" not in words


def test_what_bars_do_not_share_stands_where_they_differ():
    (panel,) = bars.panels(bars.bars([gpu(), gpu(StrategyName.SINGLE, world_size=1)], STEP_TIME_CHART))
    assert bars.labels(panel, bars.variant_names([panel])) == [("single", "1 rank"), ("ddp", "2 ranks")]
    assert "rank" not in bars.common([panel])
    whole = gpu().cell
    work = msgspec.structs.replace(whole.workload, sequences=8)
    half = factory.measurement(msgspec.structs.replace(whole, workload=work, label="half"), allocated_bytes=(8,) * 3)
    two = bars.panels(bars.bars([gpu(), half], STEP_TIME_CHART))
    assert bars.titles(two) == [
        f"0.6b, {tokens} tokens a step in sequences of 2,048" for tokens in ("16,384", "32,768")
    ]
    assert bars.labels(two[0], bars.variant_names(two)) == [("ddp", "half")]


def test_a_bar_of_one_run_is_seen_to_be_one():
    whole = gpu(StrategyName.FSDP2)
    once = measure(whole.cell, whole.plan, whole.runs[:1])
    (panel,) = bars.panels(bars.bars([gpu(), once], STEP_TIME_CHART))
    figure = charts.figure_of(STEP_TIME_CHART, [panel])
    words = [text.get_text() for text in texts_of(figure)]
    assert sorted(word[-3:] for word in words if word[-3:-1] == "n=") == ["n=1", "n=3"]
    assert "bar: median of n runs; error bar: smallest to largest run; dashed: one run, spread not known" in words
    assert [bar.get_linestyle() != "-" for bar in figure.axes[0].patches] == [False, True]
    (alone,) = bars.panels(bars.bars([once], STEP_TIME_CHART))
    assert (
        charts.reading_of({bar.num_runs for bar in alone.bars})
        == "bar: the only run of each cell, whose spread is not known"
    )


def test_a_variant_names_ranks_and_link_only_where_a_strategy_has_several():
    def names(*measured):
        return set(bars.variant_names(bars.panels(bars.bars(measured, STEP_TIME_CHART))).values())

    assert names(gpu(), gpu(StrategyName.SINGLE, world_size=1)) == {"eager"}
    assert names(gpu(), gpu(world_size=4)) == {"eager, 2 ranks", "eager, 4 ranks"}
    assert names(gpu(), gpu(link=LinkProfile.NO_P2P)) == {"eager, native", "eager, no_p2p"}


def test_a_run_without_the_metric_is_not_counted():
    whole = gpu()
    unequal = factory.change_ranks(whole.runs[1], 1, step_times_s=(0.4,) * 3)
    empty = factory.change_ranks(whole.runs[2], step_times_s=())
    infinite = factory.change_ranks(whole.runs[2], step_times_s=(math.inf,) * 10)
    ranks_gone = msgspec.structs.replace(whole.runs[2], ranks=())
    (bar,) = bars.bars([measure(whole.cell, whole.plan, [whole.runs[0], empty])], STEP_TIME_CHART)
    assert (bar.median, bar.num_runs) == (0.5, 1)
    for run, chart in ((unequal, STEP_TIME_CHART), (infinite, STEP_TIME_CHART), (ranks_gone, MEMORY_CHART)):
        assert bars.bars([measure(whole.cell, whole.plan, [run])], chart) == ()


def test_a_planted_fault_is_marked():
    whole = gpu()
    run = msgspec.structs.replace(whole.runs[0], fault=Fault.parse("slow_step=0.2"))
    (bar,) = bars.bars([measure(whole.cell, whole.plan, [run])], STEP_TIME_CHART)
    assert bar.planted


@pytest.mark.parametrize(
    ("largest", "metric", "expected"),
    [
        (69_900, THROUGHPUT, (1e3, "k tok/s")),
        (300, THROUGHPUT, (1.0, "tok/s")),
        (2.1, STEP_TIME, (1.0, "s")),
        (0.03, STEP_TIME, (1e-3, "ms")),
        (2**31, PEAK_ALLOCATED, (2.0**30, "GiB")),
        (2**29, PEAK_RESIDENT, (2.0**20, "MiB")),
    ],
)
def test_an_axis_has_one_unit(largest, metric, expected):
    assert bars.axis_unit(largest, metric) == expected


@pytest.mark.parametrize(
    ("value", "text"),
    [(69.9, "69.9"), (1234.5, "1,234"), (5.872, "5.87"), (0.03126, "0.0313"), (0, "0"), (99.96, "100")],
)
def test_numbers_have_three_digits(value, text):
    assert bars.number(value) == text


def test_equal_measurements_give_equal_files(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    first = charts.write_charts([gpu(), gpu(mode=Mode.COMPILE)], tmp_path / "a")
    again = charts.write_charts([gpu(), gpu(mode=Mode.COMPILE)], tmp_path / "b")
    assert [path.name for path in first] == ["throughput.png", "step_time.png", "peak_memory.png"]
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in again]


def test_no_value_no_chart(tmp_path):
    assert charts.write_charts([], tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_forty_bars_fit_on_a_page(tmp_path):
    measured = [
        gpu(strategy, mode=mode, world_size=world_size, link=link, size=size)
        for strategy in (StrategyName.DDP, StrategyName.FSDP2)
        for mode in Mode
        for world_size in (2, 4, 8)
        for link in (LinkProfile.NATIVE, LinkProfile.NO_P2P)
        for size in ("0.6b", "1.7b")
    ][:40]
    for path in charts.write_charts(measured, tmp_path):
        with Image.open(path) as image:
            assert image.width <= 1600


def labelled(strategy, label, **changes):
    """A cell with the options that need the longest name, and a label of its own behind them."""
    whole = gpu(strategy, **changes)
    options = Options(activation_checkpointing=True, optimizer_state=ComputeDtype.BFLOAT16)
    cell = msgspec.structs.replace(whole.cell, options=options, label=label)
    return measure(cell, whole.plan, [msgspec.structs.replace(run, cell=cell) for run in whole.runs])


MANY = [
    measured
    for strategy in [*list(StrategyName)[:-1], "dp2.tp2", "tp2.ulysses2", "fsdp2.ulysses2"]
    for link in (LinkProfile.NATIVE, LinkProfile.NO_P2P)
    for measured in (gpu(strategy, world_size=4, link=link), labelled(strategy, "x", world_size=4, link=link))
]


@pytest.mark.parametrize(
    "measured",
    [
        [labelled("fsdp2", "a" * length), *[gpu(name) for name in list(StrategyName)[:bars_beside]]]
        for length in (1, 30, 90)
        for bars_beside in (0, 3, 16)
    ]
    + [MANY, [gpu(StrategyName.EP, size="a3b"), gpu(StrategyName.SINGLE, world_size=1, size="a3b"), *MANY]],
    ids=lambda measured: f"{len(measured)} bars, {max(len(one.cell.variant) for one in measured)} letters",
)
def test_nothing_is_cut_off_however_long_a_name_is(measured):
    figure = charts.figure_of(MEMORY_CHART, bars.panels(bars.bars(measured, MEMORY_CHART)))
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    page = figure.bbox
    for text in texts_of(figure):
        box = text.get_window_extent(canvas.get_renderer())
        inside = page.x0 <= box.x0 and box.x1 <= page.x1 and page.y0 <= box.y0 and box.y1 <= page.y1
        assert inside, f"{text.get_text()!r}: {box} is not within {page}"


def test_labels_do_not_meet():
    """Turned ones lie parallel: their distance across is that of the groups times the sine of the angle."""
    figure = charts.figure_of(STEP_TIME_CHART, bars.panels(bars.bars(MANY, STEP_TIME_CHART)))
    FigureCanvasAgg(figure).draw()
    for axes in figure.axes:
        ticks = [axes.transData.transform((place, 0))[0] for place in axes.get_xticks()]
        for label, (before, after) in zip(axes.get_xticklabels(), itertools.pairwise(ticks), strict=False):
            across = (after - before) * math.sin(math.radians(label.get_rotation()))
            lines = label.get_text().count("\n") + 1
            assert across >= lines * label.get_fontsize() / 72 * charts.DPI


def test_a_panel_of_very_many_bars_goes_on_in_the_next_row_at_the_same_scale():
    tall = labelled("tp", "tall", world_size=4, step_times_s=(5.0,) * 3)
    figure = charts.figure_of(STEP_TIME_CHART, bars.panels(bars.bars([*MANY, tall], STEP_TIME_CHART)))
    first, second = figure.axes
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["0.6b, 1 of 2", "0.6b, 2 of 2"]
    assert first.get_ylim() == second.get_ylim()
    assert len(first.patches) + len(second.patches) == len(MANY) + 1
    assert figure.get_size_inches()[0] < 12


def test_reference_stands_before_what_is_compared_with_it():
    of_arms = [
        measure(whole.cell, whole.plan, [msgspec.structs.replace(run, arm=arm) for run in whole.runs])
        for whole, arm in ((gpu(step_times_s=(0.5,) * 3), "candidate"), (gpu(step_times_s=(0.4,) * 3), "reference"))
    ]
    (panel,) = bars.panels(bars.bars([*of_arms, gpu(mode=Mode.COMPILE)], STEP_TIME_CHART))
    assert [(bar.median, bar.is_reference) for bar in panel.bars] == [(0.4, True), (0.5, False), (0.5, False)]
    names = bars.variant_names([panel])
    assert [names[bar.key] for bar in panel.bars] == ["eager, reference", "eager", "compile"]
