"""Room perf/budget.py: how a time is written, and which cells still fit."""

import pytest

from perf import budget as room
from perf.budget import Budget, duration, seconds


@pytest.mark.parametrize(
    ("text", "expected_s"), [("2h", 7200), ("90m", 5400), ("1h30m", 5400), ("45s", 45), ("1.5h", 5400), ("30", 30)]
)
def test_time_is_written_as_people_do(text, expected_s):
    assert seconds(text) == expected_s


@pytest.mark.parametrize("text", ["", "2 days", "0", "-1h", "h", "nan", "1m2h", pytest.param("9" * 400, id="for ever")])
def test_time_that_is_none_is_refused_with_the_forms(text):
    with pytest.raises(ValueError, match="write 2h, 90m, 1h30m or 45s"):
        seconds(text)


def test_duration_reads_as_a_clock():
    assert [duration(value_s) for value_s in (5, 65, 3661)] == ["0:05", "1:05", "1:01:01"]


@pytest.fixture
def clock(monkeypatch):
    now = {"s": 100.0}
    monkeypatch.setattr(room.time, "monotonic", lambda: now["s"])
    return now


def test_cell_that_is_known_to_take_longer_than_what_is_left_does_not_fit(clock):
    budget = Budget(600.0, {"long": 500.0, "short": 60.0}.get)
    assert budget.exceeded_by("long") is None
    clock["s"] += 120.0
    assert budget.exceeded_by("long") == ("not run: 2:00 of the time budget 10:00 are used, this cell takes about 8:20")
    assert budget.exceeded_by("short") is None, "a shorter one still does"


def test_unknown_cell_is_taken_for_a_typical_one_of_this_test_run(clock):
    budget = Budget(100.0, lambda _: None)
    clock["s"] += 200.0
    assert budget.exceeded_by("first") is None, "nothing is known of any cell"
    clock["s"] -= 200.0
    for took_s in (40.0, 60.0, 50.0):
        budget.took(took_s)
    clock["s"] += 51.0
    assert "takes about 0:50" in budget.exceeded_by("next")


def test_profiled_run_of_each_cell_takes_time_too(clock):
    budget = Budget(100.0, lambda _: 30.0, profiles=True)
    clock["s"] += 50.0
    assert budget.exceeded_by("next") is None
    budget.profiled(25.0)
    assert "takes about 0:55" in budget.exceeded_by("next")
    where_it_is_red = Budget(100.0, lambda _: 30.0)
    where_it_is_red.profiled(25.0)
    clock["s"] += 50.0
    assert where_it_is_red.exceeded_by("next") is None


def test_time_for_reruns_is_kept(clock):
    budget = Budget(100.0, lambda _: 30.0)
    clock["s"] += 50.0
    assert budget.exceeded_by("next") is None
    budget.reserve(25.0)
    assert "0:25 are kept for reruns" in budget.exceeded_by("next")
