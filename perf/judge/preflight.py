"""The preflight of a node, as a record, and what speaks against the node. No torch.

A node that is ill, or below what machines of its key have reached, measures its own state and not the code.
"""

from collections.abc import Callable, Sequence
from typing import ClassVar

import msgspec

from perf.facts.findings import Finding, Severity
from perf.facts.gpu_health import GpuHealth
from perf.facts.gpus import GpuUse
from perf.facts.hardware import Machine
from perf.facts.rates import KINDS, Ceilings, Kind, Rate
from perf.facts.record import Software
from perf.judge.baseline import RecordedCeilings
from strategies.value import Value


class Preflight(Value, frozen=True, kw_only=True):
    """A node as it was found."""

    SCHEMA_VERSION: ClassVar[int] = 1
    schema_version: int = 1
    measured_at: str
    """UTC, ISO 8601."""
    took_s: float
    """Without the imports of the server."""
    server_start_up_s: float
    machine: Machine
    """All GPUs that are visible, or the CPU."""
    host: str
    cpu: str
    cpu_cores: int
    software: Software | None
    """None: no server of ranks could start."""
    driver: str | None
    commit: str | None
    dirty: bool | None
    variables: dict[str, str]
    ceilings: Ceilings | None
    """None: `failure` says why."""
    failure: str | None
    gpus: tuple[GpuHealth, ...]
    """At rest, before the measurement."""
    uses: tuple[GpuUse, ...]
    """While it was measured, ten times a second."""
    shared_memory_free_bytes: int | None
    findings: tuple[Finding, ...]

    @property
    def faults(self) -> list[str]:
        return [finding.text for finding in self.findings if finding.severity is Severity.FAULT]


class Doubts(Value, frozen=True, kw_only=True):
    """Why times of this node are not comparable with those of others of its key, in words."""

    of_all_cells: tuple[str, ...] = ()
    of_host_bound_cells: tuple[str, ...] = ()

    def of_cell(self, *, is_host_bound: bool) -> tuple[str, ...]:
        return self.of_all_cells + (self.of_host_bound_cells if is_host_bound else ())


def doubts(preflight: Preflight, recorded: RecordedCeilings | None) -> Doubts:
    """`recorded` None: nothing is, and each rate has only to be a positive number."""
    if recorded is None:
        return Doubts(of_all_cells=(*preflight.faults, *invalid(preflight)))
    of_node = compare(preflight, recorded, [kind for kind in KINDS if not kind.of_host])
    of_host = [reason for reason in compare(preflight, recorded) if reason not in of_node]
    return Doubts(of_all_cells=(*preflight.faults, *of_node), of_host_bound_cells=tuple(of_host))


def compare(preflight: Preflight, recorded: RecordedCeilings, kinds: Sequence[Kind] = KINDS) -> list[str]:
    """Why the node is not comparable with the record of its key; empty: it is.

    On GPUs, a ceiling that is lower than its record by more than the tolerance of its `Kind`. On a CPU no rate is held
    to a record. A rate that is missing or is no positive number is a reason on both.
    """
    if preflight.machine.key != recorded.machine.key:
        return [f"measured on {preflight.machine.key}, recorded on {recorded.machine.key}"]
    if preflight.ceilings is None:
        return [f"no ceiling was measured: {(preflight.failure or 'no reason known').splitlines()[0]}"]
    if preflight.ceilings.protocol != recorded.ceilings.protocol:
        return [f"measured by {preflight.ceilings.protocol}, recorded by {recorded.ceilings.protocol}; record it again"]
    reasons = []
    for kind in kinds:
        reason = shortfall(
            kind, preflight.ceilings, recorded.ceilings, tolerance=kind.tolerance if preflight.machine.is_gpu else None
        )
        if reason is not None:
            reasons.append(reason)
    return [f"{reason}{_beside(preflight, recorded)}" for reason in reasons]


def shortfall(kind: Kind, now: Ceilings, then: Ceilings, *, tolerance: float | None) -> str | None:
    """Why one of the rates is not what was recorded, or None. `tolerance` None: any positive number will do.

    With tolerance 0, every lower rate is a shortfall.
    """
    if not _is_expected(kind, now):
        return None
    title, rate, old = kind.titled(now.protocol), now.rate(kind.name), then.rate(kind.name)
    if rate is None or not rate.is_measured:
        return f"{title}: {_bad(rate)}"
    if old is None or not old.is_measured:
        return f"{title} has no recorded number to compare with: {_bad(old)}; record it again"
    assert rate.median is not None
    assert old.median is not None
    if tolerance is None or rate.median >= old.median * (1 - tolerance):
        return None
    named = rate.slowest_rank is not None and now.num_ranks > 1
    return (
        f"{title} {kind.text(rate.median, like=old.median)} is {rate.median / old.median * 100:.1f} % "
        f"of the recorded {kind.number(old.median)}, tolerance {tolerance * 100:g} %"
        f"{f', slowest on rank {rate.slowest_rank}' if named else ''}"
    )


def invalid(preflight: Preflight) -> list[str]:
    """Rates that are missing or no positive numbers, in words, whatever is recorded."""
    if preflight.ceilings is None:
        return ["nothing was measured"]
    found = []
    for kind in KINDS:
        rate = preflight.ceilings.rate(kind.name)
        if _is_expected(kind, preflight.ceilings) and (rate is None or not rate.is_measured):
            found.append(f"{kind.titled(preflight.ceilings.protocol)}: {_bad(rate)}")
    return found


def _is_expected(kind: Kind, ceilings: Ceilings) -> bool:
    """Whether so many ranks have such a rate by this protocol."""
    if kind.payload is None:
        return True
    return ceilings.num_ranks > 1 and getattr(ceilings.protocol, kind.payload) is not None


def _bad(rate: Rate | None) -> str:
    if rate is None or rate.median is None:
        return "not measured"
    return f"{rate.median:g} is no measured value"


def _beside(preflight: Preflight, recorded: RecordedCeilings) -> str:
    """What else has changed since the record: the node may be well, and something else slower."""
    then = recorded.origin
    pairs = [("host CPU", then.cpu, preflight.cpu), ("driver", recorded.driver, preflight.driver)]
    if preflight.software is not None:
        names = ("torch", "cuda", "nccl", "python")
        pairs += [(name, getattr(then.software, name), getattr(preflight.software, name)) for name in names]
    variables = sorted(then.variables.keys() | preflight.variables.keys())
    pairs += [(name, then.variables.get(name), preflight.variables.get(name)) for name in variables]
    changes = [f"{name} {old or 'none'} -> {new or 'none'}" for name, old, new in pairs if old != new]
    return f" (since it was recorded: {', '.join(changes)})" if changes else ""


PREFLIGHTS = 2
"""A node that falls short is looked at again: of five starts on one host, two launched a fifth fewer kernels. Of each
rate the higher one counts."""


def looked_at(
    look: Callable[[], Preflight], recorded: Callable[[Machine], RecordedCeilings | None]
) -> tuple[Preflight, Doubts]:
    """A node by as many looks as it takes, and why it is not comparable."""
    ceilings: Ceilings | None = None
    for _ in range(PREFLIGHTS):
        preflight = look()
        if ceilings is not None and preflight.ceilings is not None:
            preflight = msgspec.structs.replace(preflight, ceilings=ceilings.higher(preflight.ceilings))
        ceilings = preflight.ceilings
        found = doubts(preflight, recorded(preflight.machine))
        if found == Doubts():
            break
    return preflight, found
