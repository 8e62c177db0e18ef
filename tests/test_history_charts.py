"""The charts of a history: what stands on a page, and that the picture shows it."""

import itertools

import msgspec
import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from PIL import Image, ImageColor

from perf.facts.measurement import PEAK_ALLOCATED, PEAK_RESERVED, PEAK_RESIDENT, STEP_TIME, THROUGHPUT
from perf.judge.band import Band
from perf.tell import history_charts
from perf.tell.change_points import ChangePoint
from perf.tell.history import History, LeftOut
from perf.tell.history_charts import draw
from perf.tell.history_pages import Page, pages, told
from strategies.spec import LinkProfile
from tests import factory
from tests.history_runs import line

ON_GPUS = factory.cell(size="0.6b", link=LinkProfile.NATIVE)
BAND, STEP, FIRST_LINE, SECOND_LINE = "#dcebf4", "#c2410c", "#0b4f7d", "#c98a1b"


def history(*series, left_out=()):
    return History(series=series, left_out=tuple(left_out), unreadable=())


def no_band(_):
    return None


def page(*series, metrics=(STEP_TIME,), band_of=no_band, **changes) -> Page:
    (found,) = pages(history(*series), metrics, band_of)
    return msgspec.structs.replace(found, **changes)


def with_step(of: Page) -> Page:
    step = ChangePoint(run_id=of.visits[2].run_id, old=0.1, new=0.11, change=0.1, p_value=1e-6)
    panels = tuple(msgspec.structs.replace(panel, steps=(step,)) for panel in of.panels)
    return msgspec.structs.replace(of, panels=panels)


def pixels(of: Page, folder, color) -> int:
    """How many pixels of the picture have exactly this colour."""
    with Image.open(draw(of, folder / "drawn.png")) as image:
        counted = {rgb: number for number, rgb in image.convert("RGB").getcolors(2**24)}
    return counted.get(ImageColor.getrgb(color), 0)


def test_a_cell_of_gpus_shows_the_allocators_peaks_and_one_of_cpus_its_resident_size():
    gpu = [
        line([0.1], metric=metric, of=ON_GPUS) for metric in (STEP_TIME, PEAK_ALLOCATED, PEAK_RESERVED, PEAK_RESIDENT)
    ]
    cpu = [line([0.1], metric=metric) for metric in (STEP_TIME, THROUGHPUT, PEAK_RESIDENT)]
    on_gpu, on_cpu = pages(history(*gpu, *cpu), None, no_band)
    assert [panel.metric for panel in on_gpu.panels] == [STEP_TIME, PEAK_ALLOCATED, PEAK_RESERVED]
    assert [panel.metric for panel in on_cpu.panels] == [STEP_TIME, THROUGHPUT, PEAK_RESIDENT]


def test_a_cell_without_the_metric_has_no_page():
    assert pages(history(line([0.1])), (PEAK_ALLOCATED,), no_band) == ()


def test_the_band_is_asked_for_the_line_that_was_measured_last():
    asked = []
    page(line([0.1] * 3), line([0.2], timed_steps=30, first_day=5), band_of=asked.append)
    page(line([0.2], timed_steps=30, first_day=1), line([0.1] * 3), band_of=asked.append)
    assert [series.recipe.timed_steps for series in asked] == [30, 10]


def test_a_page_tells_its_test_runs_in_time_its_recipes_newest_first_and_its_usual_runs():
    found = page(line([0.1] * 3), line([0.2], timed_steps=30, first_day=1.5))
    assert [point.run_id[8:13] for point in found.visits] == ["01T02", "02T02", "02T14", "03T02"]
    assert [recipe.timed_steps for recipe in found.recipes] == [10, 30]
    assert found.usual_runs == 3


def test_what_changed_is_told_in_words():
    torch = [{"torch": "2.12.0"}] * 2 + [{"torch": "2.13.0"}] * 2
    series = line([0.1] * 4, environments=torch)
    key = (series.cell.id, series.machine.key)
    out = [LeftOut(run_id=str(n), cell_id=key[0], machine_key=key[1], reason="WRONG") for n in range(2)]
    (found,) = pages(history(series, left_out=out), (STEP_TIME,), no_band)
    assert told(with_step(found)) == [
        "change point at 2026-09-03T02-00-00: step time 100.0 ms -> 110.0 ms, +10.0 %, p 1e-06",
        "from 2026-09-03T02-00-00 on: torch 2.12.0 -> 2.13.0",
        "left out: 2 x WRONG",
    ]


def test_equal_pages_give_equal_files(tmp_path):
    of = with_step(page(line([0.1, 0.101, 0.11, 0.111])))
    assert draw(of, tmp_path / "a.png").read_bytes() == draw(of, tmp_path / "b.png").read_bytes()


def test_the_picture_shows_lines_band_and_change_points_where_there_are_some(tmp_path):
    plain = page(line([0.1, 0.101, 0.11, 0.111]))
    banded = page(line([0.1, 0.101, 0.11, 0.111]), band_of=lambda _: Band(middle=0.1, low=0.097, high=0.103))
    two = page(line([0.1, 0.101]), line([0.11, 0.111], timed_steps=30, first_day=2))
    assert pixels(plain, tmp_path, FIRST_LINE) > 300
    assert pixels(plain, tmp_path, BAND) == 0 < pixels(banded, tmp_path, BAND)
    assert pixels(plain, tmp_path, STEP) == 0 < pixels(with_step(plain), tmp_path, STEP)
    assert pixels(plain, tmp_path, SECOND_LINE) == 0 < pixels(two, tmp_path, SECOND_LINE)


def height(of: Page, folder) -> int:
    """Rows of pixels between the highest and the lowest place of the first line."""
    with Image.open(draw(of, folder / "drawn.png")) as image:
        plot = np.asarray(image.convert("RGB"))[:, 110:]  # right of the legend's sample of the line
    rows = np.nonzero((plot == ImageColor.getrgb(FIRST_LINE)).all(axis=2).any(axis=1))[0]
    return int(rows[-1] - rows[0])


def test_a_band_that_is_far_off_does_not_press_the_line_flat(tmp_path):
    series = line([0.1, 0.104, 0.1, 0.103])
    near, far = (
        page(series, band_of=lambda _, high=high: Band(middle=0.1, low=0.0, high=high)) for high in (0.105, 50.0)
    )
    assert height(far, tmp_path) > 0.5 * height(near, tmp_path)


def test_what_hardly_changes_does_not_look_as_if_it_wavered(tmp_path):
    def peaks(step):
        flat = line([2**33, 2**33 + step, 2**33], metric=PEAK_ALLOCATED, of=ON_GPUS)
        points = tuple(msgspec.structs.replace(one, low=one.median, high=one.median) for one in flat.points)
        return page(msgspec.structs.replace(flat, points=points), metrics=(PEAK_ALLOCATED,))

    assert height(peaks(2**20), tmp_path) < 0.1 * height(peaks(2**30), tmp_path)


@pytest.mark.parametrize("number", [2, 30, 400])
def test_no_date_runs_into_its_neighbour(number):
    figure = history_charts._figure(page(line([0.1] * number)))
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    (axes,) = figure.axes
    boxes = [label.get_window_extent(canvas.get_renderer()) for label in axes.get_xticklabels()]
    assert all(left.x1 < right.x0 for left, right in itertools.pairwise(boxes))
    assert boxes[-1].x1 <= figure.bbox.x1


@pytest.mark.parametrize("number", [1, 2, 40, 400])
def test_any_number_of_test_runs_fits_on_a_page(tmp_path, number):
    environments = [{"host": f"node{day % 3}"} for day in range(number)]
    of = page(line([0.1] * number, environments=environments))
    with Image.open(draw(of, tmp_path / "drawn.png")) as image:
        assert image.width <= 1300
        assert image.height <= 1000


def test_a_missing_search_is_said_in_the_picture(tmp_path):
    of = page(line([0.1] * 3))
    searched, not_searched = (
        draw(msgspec.structs.replace(of, searched=searched), tmp_path / f"{searched}.png") for searched in (True, False)
    )
    with Image.open(searched) as without, Image.open(not_searched) as line_more:
        assert line_more.height > without.height
