"""Room perf/facts/rates.py: rates from the ranks' times, the formula of the bus bandwidth, the slowest that counts."""

import math

import pytest
from msgspec.structs import replace

from perf.facts.rates import KINDS, MIB, ON_CPU, ON_GPUS, Ceilings, Kind, RankTimes, bus_factor, ceilings_of
from tests.nodes import rate


def rank_times(rank: int = 0, **changes: object) -> RankTimes:
    """A rank that takes 1 ms for everything and 4 us for a launch."""
    whole = RankTimes(
        rank=rank,
        device="NVIDIA H200",
        gemm_times_s=(1e-3,) * 5,
        launch_times_s=(4e-6,) * 5,
        all_reduce_times_s=(1e-3,) * 5,
        small_all_reduce_times_s=(1e-3,) * 5,
        p2p_times_s=(1e-3,) * 5,
    )
    return replace(whole, **changes)


def of_ranks(num_ranks: int, **changes: object) -> Ceilings:
    """All ranks alike, but the last one with `changes`."""
    ranks = [rank_times(rank) for rank in range(num_ranks - 1)]
    return ceilings_of(ON_GPUS, [*ranks, rank_times(num_ranks - 1, **changes)])


@pytest.mark.parametrize(("num_ranks", "factor"), [(2, 1.0), (4, 1.5), (8, 1.75)])
def test_bus_bandwidth_is_the_payload_by_the_time_by_what_a_rank_must_move(num_ranks, factor):
    assert bus_factor(num_ranks) == factor
    found = of_ranks(num_ranks)
    assert found.all_reduce_bytes_per_s.median == pytest.approx(256 * MIB / 1e-3 * factor)
    assert found.small_all_reduce_bytes_per_s.median == pytest.approx(MIB / 1e-3 * factor)


def test_other_rates_are_amount_by_time():
    found = of_ranks(2)
    assert found.gemm_flop_per_s.median == pytest.approx(2 * 8192**3 / 1e-3)
    assert found.launches_per_s.median == pytest.approx(250e3)
    assert found.p2p_bytes_per_s.median == pytest.approx(256 * MIB / 1e-3)


def test_node_is_as_fast_as_its_slowest_rank_which_is_named():
    found = of_ranks(4, gemm_times_s=(2e-3, 2e-3, 1e-3), launch_times_s=(5e-6,) * 5)
    assert found.gemm_flop_per_s.median == pytest.approx(2 * 8192**3 / 2e-3)
    assert (found.gemm_flop_per_s.slowest_rank, found.gemm_flop_per_s.n) == (3, 3)
    assert (found.launches_per_s.median, found.launches_per_s.slowest_rank) == (pytest.approx(200e3), 3)


def test_a_repeat_over_links_takes_as_long_as_its_slowest_rank():
    ranks = [
        rank_times(0, p2p_times_s=(1e-3, 4e-3, 1e-3)),
        rank_times(1, p2p_times_s=(4e-3, 1e-3, 1e-3)),
    ]
    found = ceilings_of(ON_GPUS, ranks).p2p_bytes_per_s
    assert found.median == pytest.approx(256 * MIB / 4e-3)
    assert (found.n, found.slowest_rank) == (3, None)


def test_one_slow_repeat_moves_no_median_and_is_no_spread_of_the_quartiles():
    found = of_ranks(2, gemm_times_s=(1e-3, 1e-3, 9e-3, 1e-3, 1e-3)).gemm_flop_per_s
    assert found.median == pytest.approx(2 * 8192**3 / 1e-3)
    assert found.spread == 0.0
    wide = of_ranks(2, gemm_times_s=(1e-3, 2e-3, 3e-3, 4e-3, 5e-3)).gemm_flop_per_s
    assert wide.spread == pytest.approx((4 - 2) / 3)
    assert of_ranks(2, gemm_times_s=(2e-3,)).gemm_flop_per_s.spread is None


@pytest.mark.parametrize("times_s", [(), (0.0,) * 3, (math.nan,), (math.inf,) * 3])
@pytest.mark.parametrize("field", ["gemm_times_s", "launch_times_s", "all_reduce_times_s", "p2p_times_s"])
def test_times_that_are_none_give_no_rate(field, times_s):
    found = of_ranks(1 + field.startswith(("all", "p2p")), **{field: times_s})
    name = {"gemm_times_s": "gemm_flop_per_s", "launch_times_s": "launches_per_s"}.get(
        field, field.replace("times_s", "bytes_per_s")
    )
    if times_s and name.startswith(("all", "p2p")):
        found = ceilings_of(ON_GPUS, [rank_times(rank, **{field: times_s}) for rank in range(2)])
    assert found.rate(name).median is None
    assert not found.rate(name).is_measured


def test_one_rank_has_no_links_and_a_cpu_no_small_all_reduce():
    alone = of_ranks(1)
    assert (alone.all_reduce_bytes_per_s, alone.small_all_reduce_bytes_per_s, alone.p2p_bytes_per_s) == (None,) * 3
    assert alone.gemm_flop_per_s.is_measured
    on_cpu = ceilings_of(ON_CPU, [rank_times(0, small_all_reduce_times_s=()), rank_times(1)])
    assert on_cpu.small_all_reduce_bytes_per_s is None
    assert on_cpu.all_reduce_bytes_per_s.is_measured


@pytest.mark.parametrize("median", [None, 0.0, -1.0, math.nan, math.inf])
def test_what_is_no_positive_number_is_not_measured(median):
    assert not rate(median).is_measured
    assert rate(1e-9).is_measured


def test_every_kind_is_a_field_and_is_told_with_its_payload():
    assert {kind.name for kind in KINDS} == {name for name in Ceilings.__struct_fields__ if name.endswith("_per_s")}
    assert [kind.titled(ON_GPUS) for kind in KINDS] == [
        "GEMM",
        "launch rate",
        "all-reduce of 256 MiB",
        "all-reduce of 1 MiB",
        "p2p of 256 MiB",
    ]


@pytest.mark.parametrize(
    ("value", "like", "text"),
    [
        (793e12, None, "793 TFLOP/s"),
        (103.4e9, None, "103 GFLOP/s"),
        (1.357e9, None, "1.36 GFLOP/s"),
        (640e9, 793e12, "0.64 TFLOP/s"),
        (12.0, None, "12 FLOP/s"),
    ],
)
def test_rates_are_scaled_for_people(value, like, text):
    assert Kind(name="x", title="X", unit="FLOP/s", tolerance=0.05).text(value, like=like) == text
