"""The charts: their bars are medians with the smallest and largest run, and equal measurements give equal files."""

import math

import msgspec
import pytest
from PIL import Image

from perf.facts.fault import Fault
from perf.facts.measurement import PEAK_ALLOCATED, PEAK_RESIDENT, STEP_TIME, THROUGHPUT, measure
from perf.tell import bars, charts
from strategies.spec import LinkProfile, Mode, StrategyName
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


def test_a_bar_is_the_median_with_the_smallest_and_the_largest_run():
    (bar,) = bars.bars([gpu()], STEP_TIME_CHART)
    assert (bar.median, bar.low, bar.high, bar.num_runs) == (0.5, 0.4, 0.6, 3)
    (bar,) = bars.bars([gpu()], THROUGHPUT_CHART)
    assert (bar.median, bar.low, bar.high) == (32_768 / 0.5, 32_768 / 0.6, 32_768 / 0.4)


def test_memory_is_allocated_on_gpus_and_resident_on_cpus():
    on_cpu, on_gpu = bars.panels(bars.bars([gpu(), factory.measurement()], MEMORY_CHART))
    assert (on_cpu.metric, on_cpu.bars[0].median) == (PEAK_RESIDENT, 400 * 2**20)
    assert (on_gpu.metric, on_gpu.bars[0].low, on_gpu.bars[0].high) == (PEAK_ALLOCATED, 7 * 2**30, 9 * 2**30)
    assert (on_cpu.title, on_gpu.title) == ("tiny on CPU, gloo", "0.6b on GPU, native")


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


def test_reference_stands_before_what_is_compared_with_it():
    of_arms = [
        measure(whole.cell, whole.plan, [msgspec.structs.replace(run, arm=arm) for run in whole.runs])
        for whole, arm in ((gpu(step_times_s=(0.5,) * 3), "candidate"), (gpu(step_times_s=(0.4,) * 3), "reference"))
    ]
    (panel,) = bars.panels(bars.bars([*of_arms, gpu(mode=Mode.COMPILE)], STEP_TIME_CHART))
    assert [(bar.median, bar.is_reference) for bar in panel.bars] == [(0.4, True), (0.5, False), (0.5, False)]
    names = bars.variant_names([panel])
    assert [names[bar.key] for bar in panel.bars] == ["eager, reference", "eager", "compile"]
