"""The ceilings of a node: how each is computed from the ranks' times, and how far below is too far. No torch."""

import math
import statistics
from collections.abc import Sequence

import msgspec

from strategies.value import Value

MIB = 2**20


class Protocol(Value, frozen=True, kw_only=True):
    """What is measured. Ceilings of two protocols are never compared."""

    device_kind: str
    """`cpu` or `cuda`."""
    gemm_side: int
    """Of square factors."""
    gemm_dtype: str
    launches: int
    """Additions to one element that make one timed repeat."""
    payload_bytes: int
    """That every rank passes into an all-reduce, or sends to its neighbour."""
    small_payload_bytes: int | None
    """Of a second all-reduce, which latency decides; None: none is made."""


ON_GPUS = Protocol(
    device_kind="cuda",
    gemm_side=8192,
    gemm_dtype="bfloat16",
    launches=2000,
    payload_bytes=256 * MIB,
    small_payload_bytes=MIB,
)
ON_CPU = Protocol(
    device_kind="cpu",
    gemm_side=1024,
    gemm_dtype="float32",
    launches=2000,
    payload_bytes=4 * MIB,
    small_payload_bytes=None,
)


class CeilingJob(Value, frozen=True, kw_only=True):
    """What every rank is asked to measure."""

    protocol: Protocol
    deadline_s: float


class RankTimes(Value, frozen=True, kw_only=True):
    """Times of one rank, one per repeat; links have none where there is one rank."""

    rank: int
    device: str
    gemm_times_s: tuple[float, ...]
    """Of one product."""
    launch_times_s: tuple[float, ...]
    """Of one launch: the host's time for a repeat / its launches."""
    all_reduce_times_s: tuple[float, ...] = ()
    small_all_reduce_times_s: tuple[float, ...] = ()
    p2p_times_s: tuple[float, ...] = ()


class Rate(Value, frozen=True, kw_only=True):
    """A measured rate; its unit stands in the name of the field that holds it."""

    median: float | None
    """Over the repeats; None: the times gave no number."""
    n: int
    """Repeats."""
    spread: float | None
    """Distance between the quartiles of the repeats' times / their median; None for fewer than two."""
    slowest_rank: int | None = None
    """Whose rate this is, where every rank has its own; the node is as fast as this one."""

    @property
    def is_measured(self) -> bool:
        """Whether the median is a number that something can be compared with."""
        return self.median is not None and math.isfinite(self.median) and self.median > 0


class Ceilings(Value, frozen=True, kw_only=True):
    """What a node's ranks reach, all of them working at once."""

    protocol: Protocol
    num_ranks: int
    devices: tuple[str, ...]
    """The ranks', in order."""
    gemm_flop_per_s: Rate
    launches_per_s: Rate
    all_reduce_bytes_per_s: Rate | None
    """Bus bandwidth; None for one rank, as all that needs a link."""
    small_all_reduce_bytes_per_s: Rate | None
    p2p_bytes_per_s: Rate | None
    """That a rank sends while it receives as many."""

    def rate(self, name: str) -> Rate | None:
        """The rate in the field `name`."""
        rate: Rate | None = getattr(self, name)
        return rate

    def higher(self, other: "Ceilings") -> "Ceilings":
        """Of each rate the higher one: what a node reached in either of two looks at it, by one protocol."""
        pairs = {kind.name: (self.rate(kind.name), other.rate(kind.name)) for kind in KINDS}
        return msgspec.structs.replace(self, **{name: max(pair, key=_reached) for name, pair in pairs.items()})


def _reached(rate: Rate | None) -> float:
    return rate.median if rate is not None and rate.is_measured and rate.median is not None else -math.inf


class Kind(Value, frozen=True, kw_only=True):
    """One of the ceilings: how it is called, and how far below its record a node's may be."""

    name: str
    """Of the field in `Ceilings`."""
    title: str
    unit: str
    payload: str | None = None
    """Field of `Protocol` that says how many bytes travel."""
    tolerance: float
    """Fraction of the record, on GPUs. On CPUs, whose cores are shared, nothing is held to a record."""
    of_host: bool = False
    """Whether the host's CPU decides it, and so no cell whose steps wait for the GPUs."""

    def titled(self, protocol: Protocol) -> str:
        """`all-reduce of 256 MiB`, by a protocol that has it."""
        return self.title if self.payload is None else f"{self.title} of {getattr(protocol, self.payload) / MIB:g} MiB"

    def text(self, value: float, *, like: float | None = None) -> str:
        """`640 TFLOP/s`; with the prefix that `like` would get."""
        return f"{self.number(value, like=like)} {_prefix(value if like is None else like)[0]}{self.unit}"

    def number(self, value: float, *, like: float | None = None) -> str:
        """As `text`, without the unit."""
        scaled = value / _prefix(value if like is None else like)[1]
        return f"{scaled:.0f}" if abs(scaled) >= 100 else f"{scaled:.3g}"


KINDS = (
    Kind(name="gemm_flop_per_s", title="GEMM", unit="FLOP/s", tolerance=0.05),
    Kind(name="launches_per_s", title="launch rate", unit="/s", tolerance=0.20, of_host=True),
    Kind(name="all_reduce_bytes_per_s", title="all-reduce", unit="B/s", payload="payload_bytes", tolerance=0.05),
    Kind(
        name="small_all_reduce_bytes_per_s",
        title="all-reduce",
        unit="B/s",
        payload="small_payload_bytes",
        tolerance=0.10,
    ),
    Kind(name="p2p_bytes_per_s", title="p2p", unit="B/s", payload="payload_bytes", tolerance=0.05),
)


def ceilings_of(protocol: Protocol, ranks: Sequence[RankTimes]) -> Ceilings:
    """The ceilings from all ranks' times, in rank order."""
    num_ranks = len(ranks)
    small = protocol.small_payload_bytes

    def bus(times: Sequence[Sequence[float]], payload_bytes: int) -> Rate:
        return _of_all(times, payload_bytes * bus_factor(num_ranks))

    linked = num_ranks > 1
    return Ceilings(
        protocol=protocol,
        num_ranks=num_ranks,
        devices=tuple(rank.device for rank in ranks),
        gemm_flop_per_s=_of_slowest([rank.gemm_times_s for rank in ranks], 2.0 * protocol.gemm_side**3),
        launches_per_s=_of_slowest([rank.launch_times_s for rank in ranks], 1.0),
        all_reduce_bytes_per_s=bus([rank.all_reduce_times_s for rank in ranks], protocol.payload_bytes)
        if linked
        else None,
        small_all_reduce_bytes_per_s=bus([rank.small_all_reduce_times_s for rank in ranks], small)
        if linked and small is not None
        else None,
        p2p_bytes_per_s=_of_all([rank.p2p_times_s for rank in ranks], protocol.payload_bytes) if linked else None,
    )


def bus_factor(num_ranks: int) -> float:
    """2 (n - 1) / n: bytes over a rank's link for each byte that it passes into an all-reduce.

    A rank has to send and to receive so much whatever the algorithm, so that the rate tells of the link and not of the
    number of ranks ("bus bandwidth", as in the performance notes of NVIDIA's nccl-tests).
    """
    assert num_ranks > 1, num_ranks
    return 2 * (num_ranks - 1) / num_ranks


def _of_slowest(times_s: Sequence[Sequence[float]], amount: float) -> Rate:
    """Of work that every rank does by itself: the node's rate is the slowest rank's."""
    if not times_s or not all(times_s):
        return Rate(median=None, n=0, spread=None)
    medians = [statistics.median(times) for times in times_s]
    slowest = medians.index(max(medians))
    return _rate(times_s[slowest], amount, slowest_rank=slowest)


def _of_all(times_s: Sequence[Sequence[float]], amount: float) -> Rate:
    """Of work that ranks do together: a repeat takes as long as the slowest rank's."""
    if len({len(times) for times in times_s}) != 1 or not times_s[0]:
        return Rate(median=None, n=0, spread=None)
    return _rate([max(times) for times in zip(*times_s, strict=True)], amount)


def _rate(times_s: Sequence[float], amount: float, *, slowest_rank: int | None = None) -> Rate:
    median_s = statistics.median(times_s)
    if not (math.isfinite(median_s) and median_s > 0):
        return Rate(median=None, n=len(times_s), spread=None, slowest_rank=slowest_rank)
    spread = None
    if len(times_s) > 1:
        low, _, high = statistics.quantiles(times_s, n=4, method="inclusive")
        spread = (high - low) / median_s
    return Rate(median=amount / median_s, n=len(times_s), spread=spread, slowest_rank=slowest_rank)


def _prefix(value: float) -> tuple[str, float]:
    steps = (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3))
    return next(((letter, size) for letter, size in steps if abs(value) >= size), ("", 1.0))
