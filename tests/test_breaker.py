"""Room perf/judge/breaker.py: when cells moved together, and what is said of it."""

import math

import pytest
from msgspec.structs import replace

from perf.judge.breaker import LEAST_CELLS, Screen, Shift, drift_of, quietest, tripped


def screens(*changes, suspicious_above=0.015):
    return [
        Screen(cell_id=f"cell {n}", change=math.log1p(change), suspicious=change > suspicious_above, sd=0.001 * (9 - n))
        for n, change in enumerate(changes)
    ]


def test_cells_that_move_each_on_its_own_do_not_trip_it():
    assert tripped(screens(0.0, 0.001, -0.002, 0.3)) is None, "one of four is a quarter, not more"
    assert tripped(screens(0.0, 0.0, 0.0, 0.01, 0.01, 0.01, 0.2, 0.2)) is None


def test_more_than_a_quarter_suspicious_trips_it():
    shift = tripped(screens(0.0, 0.0, 0.0, 0.2, 0.2))
    assert (shift.num_cells, shift.num_suspicious, shift.change) == (5, 2, 0.0)


@pytest.mark.parametrize(("change", "trips"), [(0.0149, False), (0.0152, True), (-0.0147, False), (-0.0152, True)])
def test_median_that_moved_trips_it_in_either_direction(change, trips):
    assert (tripped(screens(*(change,) * 5, suspicious_above=1)) is not None) is trips


def test_few_cells_are_no_crowd():
    assert tripped(screens(*(0.2,) * (LEAST_CELLS - 1))) is None
    assert tripped(screens(*(0.2,) * LEAST_CELLS)) is not None


def test_control_cell_that_drifted_is_said_alone_or_beside_the_others():
    alone = tripped(screens(0.0, 0.0, 0.0, 0.0), control="cell 3", drift=math.log1p(0.05))
    assert alone.text == "ENVIRONMENT: the machine drifted: cell 3 moved +5.0 % while the suite was measured"
    assert alone.size == pytest.approx(math.log1p(0.05))
    both = tripped(screens(0.04, 0.04, 0.04, 0.04), control="cell 3", drift=math.log1p(0.05))
    assert "median moved +4.0 %; cell 3 moved +5.0 % while" in both.text
    assert both.size == pytest.approx(math.log1p(0.04))
    assert replace(both, beside=0.04).size == 0.0, "the build's, not the machine's"


@pytest.mark.parametrize(
    ("moved", "sd", "drifts"),
    [(0.0149, 0.001, False), (0.0151, 0.001, True), (-0.02, 0.001, True), (0.05, 0.03, False)],
)
def test_drift_is_more_than_noise_and_than_a_percent_and_a_half(moved, sd, drifts):
    found = drift_of([0.0, 0.001, -0.001], [moved, moved + 0.3, moved - 0.3], sd)
    assert found == (moved if drifts else 0.0)


def test_quietest_cells_are_asked():
    assert quietest(screens(0, 0, 0, 0, 0, 0)) == ["cell 5", "cell 4", "cell 3", "cell 2"]


@pytest.mark.parametrize(
    ("beside", "is_the_build", "says"),
    [
        (None, False, "ENVIRONMENT: 4 of 4 cells are suspicious, the median moved +5.0 %; a build that was good"),
        (0.05, True, "SLOWER EVERYWHERE: 4 of 4 cells are suspicious, the median moved +5.0 %; beside"),
        (0.0149, False, "ENVIRONMENT: 4 of 4 cells"),
    ],
)
def test_only_a_reference_tells_the_build_from_the_machine(beside, is_the_build, says):
    shift = replace(tripped(screens(*(0.05,) * 4)), beside=beside)
    assert shift.is_the_build is is_the_build
    assert shift.text.startswith(says)


def test_cells_that_moved_tell_what_those_that_did_not_cannot():
    """A compiler got worse by 5 %; the quietest cells are eager."""
    part = replace(tripped(screens(*(0.05,) * 5, 0, 0, 0)), beside=0.001, suspicious_beside=math.log1p(0.05))
    assert (part.is_the_build, part.is_part_of_the_build, part.size) == (False, True, 0.0)
    assert part.text.startswith("SLOWER IN PART: 5 of 8 cells are suspicious, the median moved +5.0 %; beside")
    assert part.text.endswith("beside the reference build +0.1 %, the suspicious cells +5.0 %")
    machine = replace(part, suspicious_beside=0.0149)
    assert (machine.is_part_of_the_build, machine.text[:11]) == (False, "ENVIRONMENT")
    assert machine.size == pytest.approx(math.log1p(0.05) - 0.001)
    assert not replace(part, beside=0.05).is_part_of_the_build, "everywhere"


@pytest.mark.parametrize(
    ("change", "beside", "size"),
    [(0.025, None, 0.025), (0.025, 0.0, 0.025), (0.025, 0.01, 0.015), (0.025, 0.02, 0.0), (-0.03, None, 0.0)],
)
def test_what_is_taken_off_is_the_machines_share_and_never_a_gain(change, beside, size):
    shift = Shift(num_cells=4, num_suspicious=4, change=change, beside=beside)
    assert shift.size == pytest.approx(size)
