"""Room perf/measure/ceilings.py: real ranks measure real work; the rates are finite, positive and depend on it."""

import math
import statistics

import pytest
import torch
import torch.distributed as dist
from msgspec.structs import replace

from perf.facts import jsonfile
from perf.facts.gpus import visible_gpus
from perf.facts.rates import KINDS, MIB, ON_CPU, ON_GPUS, CeilingJob, Protocol, RankTimes, ceilings_of
from perf.measure import ceilings
from perf.measure.examination import ENTRY
from perf.measure.launch import Launcher
from perf.measure.server import RankContext
from strategies.value import Value
from tests.equivalence import leave

TIMES = [name for name in RankTimes.__struct_fields__ if name.endswith("_times_s")]
SMALL = replace(ON_CPU, gemm_side=128, payload_bytes=MIB // 16, launches=200)


def measured(launcher: Launcher, protocol: Protocol, num_ranks: int) -> list[RankTimes]:
    job = CeilingJob(protocol=protocol, deadline_s=120.0)
    records, teardown_hang = launcher.run(ENTRY, job, world_size=num_ranks, record=RankTimes, deadline_s=120.0)
    assert not teardown_hang
    return records


def median_s(ranks: list[RankTimes], name: str) -> float:
    return statistics.median(time for rank in ranks for time in getattr(rank, name))


@pytest.fixture(scope="module")
def ranks(launcher):
    """Two gloo ranks, as a preflight on a CPU measures them."""
    return measured(launcher, ON_CPU, 2)


def test_every_rate_of_two_gloo_ranks_is_a_positive_number(ranks):
    found = ceilings_of(ON_CPU, ranks)
    assert [rank.rank for rank in ranks] == [0, 1]
    rates = [found.rate(kind.name) for kind in KINDS if kind.name != "small_all_reduce_bytes_per_s"]
    assert all(rate.is_measured and math.isfinite(rate.spread) for rate in rates)
    assert [rate.n for rate in rates[1:]] == [20, 20, 20]
    assert found.small_all_reduce_bytes_per_s is None


def test_products_are_repeated_for_some_tenths_of_a_second(ranks):
    for rank in ranks:
        assert 5 <= len(rank.gemm_times_s) <= 1000
        assert 0.05 < sum(rank.gemm_times_s) < 3.0, "as long as machines are, of which others take their part"


def test_larger_products_take_longer(launcher, ranks):
    """Times of products that were not made would not know how large they were."""
    small = measured(launcher, SMALL, 2)
    assert median_s(ranks, "gemm_times_s") > 20 * median_s(small, "gemm_times_s")
    assert 1e-8 < median_s(ranks, "launch_times_s") < 1e-3


def test_one_rank_has_no_group_and_no_links(launcher):
    (alone,) = measured(launcher, SMALL, 1)
    assert all(time > 0 for name in TIMES for time in getattr(alone, name))
    assert [name for name in TIMES if not getattr(alone, name)] == [
        "all_reduce_times_s",
        "small_all_reduce_times_s",
        "p2p_times_s",
    ]


class Seen(Value, frozen=True, kw_only=True):
    """What one rank did while it was timed."""

    num_distinct: int
    """Values of a factor of the last product."""
    zeros: float
    """Largest part of a factor that was zero."""
    reduced_bytes: tuple[int, ...]
    """Of each all-reduce."""
    sent: float
    received: float
    """First element of what went to the next rank, and of what came from the one before."""
    exchanged_bytes: tuple[int, ...]


def look(payload, context: RankContext) -> None:
    """Entry point of the server: a rank's measurement, with torch's functions watched from outside."""
    factors, reduced, exchanged = [], [], []
    all_reduce, batch = dist.all_reduce, dist.batch_isend_irecv
    torch.mm = lambda left, right, out: factors.append((left, right)) or out.copy_(left @ right)
    dist.all_reduce = lambda tensor: reduced.append(tensor.nbytes) or all_reduce(tensor)
    dist.batch_isend_irecv = lambda ops: exchanged.append(ops) or batch(ops)
    bench = ceilings.RankBench(jsonfile.convert(payload, Protocol, source="protocol"), context)
    bench.join(60.0)
    bench.measure()
    outgoing, incoming = exchanged[-1]
    seen = Seen(
        num_distinct=int(factors[-1][0].unique().numel()),
        zeros=max(float((factor == 0).double().mean()) for pair in factors for factor in pair),
        reduced_bytes=tuple(reduced),
        sent=float(outgoing.tensor[0]),
        received=float(incoming.tensor[0]),
        exchanged_bytes=tuple(op.tensor.nbytes for ops in exchanged for op in ops),
    )
    leave(context, seen)


@pytest.fixture(scope="module")
def seen(launcher):
    """Of three ranks, a ring in which next and before are two."""
    records, _ = launcher.run("tests.test_ceilings:look", SMALL, world_size=3, record=Seen, deadline_s=60.0)
    return records


def test_products_are_of_random_factors_not_of_zeros(seen):
    for record in seen:
        assert record.num_distinct > 128 * 128 / 2
        assert record.zeros < 0.01


def test_every_repeat_moves_the_whole_payload_over_links(seen):
    for record in seen:
        assert record.reduced_bytes == (SMALL.payload_bytes,) * (3 + 1 + 20)
        assert record.exchanged_bytes == (SMALL.payload_bytes,) * 2 * (3 + 1 + 20)


def test_ranks_send_to_the_next_and_receive_from_the_one_before(seen):
    assert [record.received for record in seen] == [seen[rank - 1].sent for rank in range(3)]
    assert len({record.sent for record in seen}) == 3


GPUS = visible_gpus(None)


@pytest.mark.skipif(not GPUS, reason="needs a GPU")
def test_rates_of_gpus_are_those_of_gpus(launcher):
    found = ceilings_of(ON_GPUS, measured(launcher, ON_GPUS, len(GPUS)))
    assert 1e12 < found.gemm_flop_per_s.median < 1e16
    assert 1e4 < found.launches_per_s.median < 1e7
    assert found.gemm_flop_per_s.spread < 0.1
    for kind in KINDS:
        rate = found.rate(kind.name)
        assert rate is None if kind.payload and len(GPUS) == 1 else rate.is_measured
    if len(GPUS) > 1:
        assert 1e9 < found.all_reduce_bytes_per_s.median < 1e13
        assert found.small_all_reduce_bytes_per_s.median < found.all_reduce_bytes_per_s.median
