"""Why a cell is slow: what two profiled runs say in a few lines."""

import statistics
from collections.abc import Iterable, Sequence

from perf.facts.measurement import PEAK_ALLOCATED, STEP_TIME, RankLedger
from perf.judge.correctness import by_rank, ledger_differences
from perf.measure.evidence import Evidence, RankTrace
from perf.measure.timeline import OpTime
from perf.tell.kernel_names import short_name
from perf.tell.render import quantity

NOT_SEEN_SHARE = 0.01
"""A step that is longer by less than this is not called slower."""
MOVED_SHARE = 0.005
"""A kernel that moved by less than this of a step is not named."""
MOST_NAMES = 3
"""Kernels on one line."""
Part = tuple[str, tuple[str, ...]]
"""A part of a step as it is called, and the fields of `StepSplit` that make it up."""


def explain(
    candidate: Evidence,
    reference: Evidence | None,
    ledger_candidate: tuple[RankLedger, ...],
    ledger_reference: tuple[RankLedger, ...] | None,
    *,
    folder: str = "",
) -> tuple[str, ...]:
    """At most ten lines: where a step's time goes, what of it changed, which kernels and collectives did.

    All times are of the shortest profiled step of the candidate's critical rank, in both arms.

    Args:
        reference: None: nothing to compare with; the candidate's step is told alone.
        ledger_reference: of the other build, or as recorded; None: unknown.
        folder: of the traces, as a reader finds it.
    """
    assert reference is None or reference.cell.id == candidate.cell.id
    new = candidate.critical
    old = None if reference is None else next(rank for rank in reference.ranks if rank.rank == new.rank)
    tells_optimizer = candidate.tells_optimizer and (reference is None or reference.tells_optimizer)
    parts = _parts(tells_optimizer=tells_optimizer)
    lines = [f"{_headline(new, old, parts)} ({_whose(new, old, len(candidate.ranks))})"]
    lines += [_part_line(candidate, name, fields, new, old) for name, fields in parts]
    lines += _op_lines(new, old)
    if ledger_reference is not None:
        lines.append(_ledger_line(ledger_candidate, ledger_reference))
    return (*lines, _trace_line([candidate, *([reference] if reference else [])], folder))


def _parts(*, tells_optimizer: bool) -> list[Part]:
    busy: list[Part] = [("compute", ("compute_s",)), ("optimizer", ("optimizer_s",))]
    if not tells_optimizer:
        busy = [("compute with the optimizer", ("compute_s", "optimizer_s"))]
    return [*busy, ("exposed communication", ("exposed_communication_s",)), ("idle", ("idle_s",))]


def _time(rank: RankTrace, fields: Iterable[str]) -> float:
    """Seconds; 0 of a part that is not told."""
    return sum(getattr(rank.shortest, field) or 0.0 for field in fields)


def _headline(new: RankTrace, old: RankTrace | None, parts: Sequence[Part]) -> str:
    total_s = new.shortest.step_time_s
    if old is None:
        name, fields = max(parts, key=lambda part: _time(new, part[1]))
        return f"step {_text(total_s)}, {_percent(_time(new, fields) / total_s)} of it {name}"
    before_s = old.shortest.step_time_s
    change_s = total_s - before_s
    text = f"step {_text(before_s)} -> {_text(total_s)}, {_signed(change_s)}"
    if change_s < NOT_SEEN_SHARE * before_s:
        return f"{text}: the profiled steps are not slower{_called_more(new, old)}"
    name, fields = max(parts, key=lambda part: _time(new, part[1]) - _time(old, part[1]))
    part_s = _time(new, fields) - _time(old, fields)
    if round(part_s / change_s, 2) > 1:  # another part became shorter
        return f"{text}: {name} alone is {_signed(part_s)}"
    return f"{text}: {_percent(part_s / change_s)} of it is {name}"


def _called_more(new: RankTrace, old: RankTrace) -> str:
    """The kernel that more calls made longer by most: unlike a small difference of times, a count is no luck."""
    now, before = _by_short_name(new.ops), _by_short_name(old.ops)
    more = [name for name in now if name in before and now[name].count > before[name].count]
    longer_s = {name: now[name].time_s - before[name].time_s for name in more}
    name = max(more, key=lambda name: longer_s[name], default="")
    if not name or longer_s[name] < MOVED_SHARE * old.shortest.step_time_s:
        return ""
    return f", but {name} runs {now[name].count:.4g} times, not {before[name].count:.4g}"


def _whose(new: RankTrace, old: RankTrace | None, num_ranks: int) -> str:
    """Which rank the numbers are of, and what a step takes where nothing is profiled."""
    plain = [statistics.median(arm.plain_step_times_s) for arm in (old, new) if arm and arm.plain_step_times_s]
    whose = f"rank {new.rank}{', which waits least' * (num_ranks > 1)}, profiled"
    return f"{whose}; without the profiler {' -> '.join(_text(seconds) for seconds in plain)}" if plain else whose


def _part_line(candidate: Evidence, name: str, fields: tuple[str, ...], new: RankTrace, old: RankTrace | None) -> str:
    now_s = _time(new, fields)
    if old is None:
        text = f"{name} {_text(now_s)}"
    else:
        before_s = _time(old, fields)
        text = f"{name} {_text(before_s)} -> {_text(now_s)}, {_signed(now_s - before_s)}"
    if fields == ("exposed_communication_s",) and len(candidate.ranks) > 1:
        most = max(candidate.ranks, key=lambda rank: _time(rank, fields))
        text += f"; most of all ranks: {_text(_time(most, fields))} on rank {most.rank}"
    return text


def _op_lines(new: RankTrace, old: RankTrace | None) -> list[str]:
    """What ran longer or shorter, what is new and what is gone: the most of each on one line."""
    now = _by_short_name(new.ops)
    if old is None:
        most = sorted(now.values(), key=lambda op: -op.time_s)[:MOST_NAMES]
        return ["most time: " + "; ".join(f"{op.name} {_calls(op)}" for op in most)]
    before = _by_short_name(old.ops)
    least_s = MOVED_SHARE * old.shortest.step_time_s
    changes = {name: _op_time(now, name) - _op_time(before, name) for name in {**now, **before}}
    moved = sorted((name for name in changes if abs(changes[name]) >= least_s), key=lambda name: -abs(changes[name]))
    lines = []
    for title, names in (
        ("moved most", [name for name in moved if name in now and name in before]),
        ("new", [name for name in moved if name not in before]),
        ("gone", [name for name in moved if name not in now]),
    ):
        told = [
            f"{name} {' -> '.join(_calls(arm[name]) for arm in (before, now) if name in arm)}, {_signed(changes[name])}"
            for name in names[:MOST_NAMES]
        ]
        if told:
            lines.append(f"{title}: {'; '.join(told)}")
    return lines


def _by_short_name(ops: Iterable[OpTime]) -> dict[str, OpTime]:
    """Kernels that differ in what a short name leaves out are one."""
    found: dict[str, OpTime] = {}
    for op in ops:
        name = short_name(op.name)
        count, time_s = (found[name].count, found[name].time_s) if name in found else (0.0, 0.0)
        found[name] = OpTime(name=name, count=count + op.count, time_s=time_s + op.time_s)
    return found


def _op_time(ops: dict[str, OpTime], name: str) -> float:
    return ops[name].time_s if name in ops else 0.0


def _calls(op: OpTime) -> str:
    count = f"{op.count:.4g}"
    return f"{count} call{'s' * (count != '1')} {_text(op.time_s)}"


def _ledger_line(new: tuple[RankLedger, ...], old: tuple[RankLedger, ...]) -> str:
    found = ledger_differences(by_rank(old), by_rank(new))
    return "; ".join(found) if found else "collectives: the same calls and bytes"


def _trace_line(arms: Sequence[Evidence], folder: str) -> str:
    ranks = [rank for arm in arms for rank in arm.ranks]
    names = dict.fromkeys(f"{folder}{'/' * bool(folder)}{rank.trace.rpartition('-rank')[0]}-rank*" for rank in ranks)
    size = quantity(sum(rank.trace_bytes for rank in ranks), PEAK_ALLOCATED)
    return f"{len(ranks)} trace{'s' * (len(ranks) > 1)}, {size}, for ui.perfetto.dev: {', '.join(names)}"


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.0f} %"


def _text(seconds: float) -> str:
    return quantity(seconds, STEP_TIME)


def _signed(seconds: float) -> str:
    text = _text(abs(seconds))
    return f"{'-' if seconds < 0 and any(digit in text for digit in '123456789') else '+'}{text}"
