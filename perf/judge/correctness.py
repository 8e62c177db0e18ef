"""The first gate: are the numbers of a measurement the model's own? Asked before any speed."""

from collections.abc import Iterable, Mapping

import msgspec

from perf.facts.measurement import Measurement, RankLedger
from perf.facts.record import LedgerEntry, RunRecord
from perf.judge.baseline import Invariants
from strategies.spec import ComputeDtype, Mode
from strategies.value import Value

Ledgers = Mapping[int, tuple[LedgerEntry, ...]]
"""The collectives of one step by rank."""
START_LOSS_BAND = 0.3
"""Nats around ln V + hidden * 0.02^2 / 2 in which a freshly initialised model starts."""


class Band(Value, frozen=True, kw_only=True):
    """How far from a recorded number a measured one may be."""

    loss: float
    """Of each step, as a fraction of it."""
    start_gradient_norm: float
    """As a fraction of it."""
    end_gradient_factor: float
    """Times more or less. AdamW's first updates are g / (|g| + eps), which turns rounding into differences of the
    weights. In bfloat16 on a GPU, whose sums are in no fixed order, the norm is chaotic from about the twelfth step on:
    one H200 alone, 0.6b, ten runs: within 0.5 % until step 11, at step 28 one of them 2.9 times the others, while no
    loss was 0.01 % off; and at 1.7b runs of one strategy and mode were up to 3.7 times those of another, as another
    torch's may be. Losses tell small faults, this one a gradient that has nothing to do with the recorded one."""


BANDS = {
    ComputeDtype.FLOAT32: Band(loss=1e-4, start_gradient_norm=1e-4, end_gradient_factor=1.01),
    ComputeDtype.BFLOAT16: Band(loss=2e-2, start_gradient_norm=5e-2, end_gradient_factor=5.0),
}


def intrinsic_errors(measurement: Measurement) -> list[str]:
    """What is wrong by itself, whatever was recorded earlier; such a measurement can never become a baseline.

    Looks at what is there: what is missing is `gaps`' to say.
    """
    cell = measurement.cell
    errors: list[tuple[int, str]] = []
    for run in measurement.runs:
        if len(run.ranks) != cell.world_size or len({len(rank.losses) for rank in run.ranks}) > 1:
            continue  # a rank or its losses are missing: a sum over the ranks would mean nothing
        if None in run.losses:
            errors.append((run.index, f"the loss is not finite from step {run.losses.index(None)} on"))
            continue
        found = _gradient_norm_errors(run)
        if measurement.plan.checkpoint is None:
            found += _start_loss_errors(run)
        num_parameters = sum(rank.num_parameters for rank in run.ranks)
        if num_parameters != cell.shape.num_parameters:
            found.append(
                f"the ranks hold {num_parameters:,} parameters together, the model has {cell.shape.num_parameters:,}"
            )
        tokens = sum(rank.tokens_per_step for rank in run.ranks)
        if tokens != cell.workload.tokens_per_step:
            found.append(
                f"{tokens:,} tokens a step, the workload has {cell.workload.sequences} x "
                f"{cell.workload.sequence_length} = {cell.workload.tokens_per_step:,}"
            )
        errors += [(run.index, error) for error in found + _mode_errors(run)]
    return _said_once(errors, measurement)


def by_rank(ledgers: Iterable[RankLedger]) -> Ledgers:
    """Each rank's ledger, where equal ones are told once."""
    return {rank: ledger.entries for ledger in ledgers for rank in ledger.ranks}


def differences(measurement: Measurement, invariants: Invariants) -> list[str]:
    """Where the measurement departs from the recorded invariants of its cell and recipe."""
    return number_differences(measurement, invariants) + traffic_differences(measurement, invariants)


def number_differences(measurement: Measurement, invariants: Invariants) -> list[str]:
    """Those of what is computed: losses and gradient norms."""
    band = BANDS[measurement.cell.workload.compute_dtype]
    found: list[tuple[int, str]] = []
    for run in measurement.runs:
        losses = [loss for loss in run.losses if loss is not None]
        errors = _loss_differences(losses, invariants, band)
        found += [(run.index, error) for error in errors + _norm_differences(run, invariants, band)]
    return _said_once(found, measurement)


def computes_the_same(measurement: Measurement, unsharded: Invariants) -> bool:
    """Whether a cell's losses and norms have to be the recorded ones of the unsharded model."""
    mine, theirs = measurement.recipe, unsharded.recipe
    return mine.weights == theirs.weights and all(
        getattr(mine.workload, name) == getattr(theirs.workload, name) for name in _WHAT_IS_COMPUTED
    )


def unlike_unsharded(measurement: Measurement, unsharded: Invariants) -> list[str]:
    """Where a cell without invariants of its own departs from the recorded ones of the unsharded model.

    Equal seeds and batches give equal losses however the model is cut; micro-batches only change the order of sums.
    Empty where the two do not compute the same. Under other options the first step alone is held to it.
    """
    mine, theirs = measurement.recipe, unsharded.recipe
    if not computes_the_same(measurement, unsharded):
        return []
    band = BANDS[mine.workload.compute_dtype]
    found: list[tuple[int, str]] = []
    for run in measurement.runs:
        pairs = list(zip(unsharded.losses, run.losses, strict=False))
        for step, (old, new) in enumerate(pairs if mine.options == theirs.options else pairs[:1]):
            if new is None or not _close(new, old, band.loss):
                told = "none" if new is None else f"{new:.6f}"
                found.append((run.index, f"unlike the unsharded model, loss of step {step}: {old:.6f} -> {told}"))
                break
        old, new = unsharded.start_gradient_norm, run.ranks[0].start_gradient_norm
        if not _close(new, old, min(band.start_gradient_norm, UNSHARDED_NORM_BAND)):
            found.append((run.index, f"unlike the unsharded model, start gradient norm {old:.6g} -> {_told(new)}"))
    return _said_once(found, measurement)


UNSHARDED_NORM_BAND = 1e-2
"""Of one machine and night: bfloat16 cells of 0.6b and 1.7b were within 1e-4 of the unsharded model's norm."""
_WHAT_IS_COMPUTED = ("sequences", "sequence_length", "compute_dtype", "learning_rate", "seed")
"""Of a workload."""


def traffic_differences(measurement: Measurement, invariants: Invariants) -> list[str]:
    """Those of how it is computed: collectives, and graph breaks beyond the recorded ones."""
    found: list[tuple[int, str]] = []
    for run in measurement.runs:
        breaks = max(rank.compile.graph_breaks for rank in run.ranks)
        if breaks > invariants.graph_breaks:
            found.append((run.index, f"mode not in effect: graph breaks {invariants.graph_breaks} -> {breaks}"))
        now = {rank.rank: rank.ledger for rank in run.ranks}
        found += [(run.index, error) for error in ledger_differences(by_rank(invariants.ledger), now)]
    return _said_once(found, measurement)


def _said_once(errors: list[tuple[int, str]], measurement: Measurement) -> list[str]:
    """`run 1: ...`, `every run: ...`: an error that several runs share stands once."""
    runs: dict[str, list[str]] = {}
    for index, error in errors:
        runs.setdefault(error, []).append(str(index))
    several = len(measurement.runs) > 1
    return [
        f"every run: {error}"
        if several and len(indices) == len(measurement.runs)
        else f"run{'s' * (len(indices) > 1)} {', '.join(indices)}: {error}"
        for error, indices in runs.items()
    ]


def _gradient_norm_errors(run: RunRecord) -> list[str]:
    names = ("start_gradient_norm", "end_gradient_norm")
    bad = [name for name in names if any(not (getattr(rank, name) or 0) > 0 for rank in run.ranks)]
    return [f"the {name.replace('_', ' ')} is not a positive number" for name in bad]


def _start_loss_errors(run: RunRecord) -> list[str]:
    expected, start = run.cell.shape.expected_start_loss, next(iter(run.losses), None)
    if start is None or abs(start - expected) <= START_LOSS_BAND:
        return []
    formula = f"ln {run.cell.shape.vocab_size} + {run.cell.shape.hidden_size} x 0.02^2 / 2 = {expected:.4f}"
    return [f"the loss starts at {start:.4f}, a fresh model of this size within {START_LOSS_BAND} of {formula}"]


def _mode_errors(run: RunRecord) -> list[str]:
    """A cell that fell back to something slower than it was asked for measured something else."""
    errors = []
    for rank in run.ranks:
        if not rank.attention:
            # torch's unfused fallback is no kernel: it holds all scores, S x S for each head.
            what = f"head dim {run.cell.shape.head_dim}, {run.cell.workload.compute_dtype}"
            cure = "choose a dtype that one takes, or switch torch's kernels on again"
            errors.append(f"mode not in effect: rank {rank.rank} met no fused attention kernel ({what}); {cure}")
        if not run.cell.layout.compiled:
            continue
        if rank.compile.graphs == 0:
            errors.append(f"mode not in effect: rank {rank.rank} compiled no graph")
        if rank.compile.recompiles_after_warmup:
            errors.append(
                f"mode not in effect: rank {rank.rank} compiled {rank.compile.recompiles_after_warmup} more "
                "graphs after warm-up; use more warm-up steps or find what changes its shapes"
            )
        if run.cell.mode is Mode.CUDAGRAPH and rank.replays < len(rank.step_times_s):
            errors.append(
                f"mode not in effect: rank {rank.rank} replayed its CUDA graph {rank.replays} times in "
                f"{len(rank.step_times_s)} timed steps"
            )
    return errors


def _loss_differences(losses: list[float], invariants: Invariants, band: Band) -> list[str]:
    if len(losses) != len(invariants.losses):
        return [f"{len(losses)} losses, {len(invariants.losses)} recorded"]
    for step, (new, old) in enumerate(zip(losses, invariants.losses, strict=True)):
        if not _close(new, old, band.loss):
            return [f"loss of step {step}: {old:.6f} -> {new:.6f} (band {band.loss:g})"]
    return []


def _norm_differences(run: RunRecord, invariants: Invariants, band: Band) -> list[str]:
    errors = []
    old, share = invariants.start_gradient_norm, band.start_gradient_norm
    if off := [norm for rank in run.ranks if not _close(norm := rank.start_gradient_norm, old, share)]:
        errors.append(f"start gradient norm {old:.6g} -> {_told(off[0])} (band {share:g})")
    old, factor = invariants.end_gradient_norm, band.end_gradient_factor
    if off := [norm for rank in run.ranks if not _within(norm := rank.end_gradient_norm, old, factor)]:
        errors.append(f"end gradient norm {old:.6g} -> {_told(off[0])} (more than a factor of {factor:g} apart)")
    return errors


def ledger_differences(recorded: Ledgers, now: Ledgers) -> list[str]:
    """Where the collectives of ranks differ, in words; bytes that a router decides count over all ranks together."""
    found: list[str] = []
    if (old := _routed_bytes(recorded)) != (new := _routed_bytes(now)):
        found.append(f"bytes that tokens take to their experts and back, all ranks: {old:,} -> {new:,}")
    ranks: dict[str, list[str]] = {}
    for rank, entries in now.items():
        before, after = _without_routing(recorded.get(rank, ())), _without_routing(entries)
        if before != after:
            ranks.setdefault(_entry_differences(before, after), []).append(str(rank))
    return found + [f"collectives of rank{'s' * (len(of) > 1)} {', '.join(of)}: {text}" for text, of in ranks.items()]


def _is_routed(entry: LedgerEntry) -> bool:
    """Whether a router decides how many bytes of these a rank sends; of all ranks together they are a fixed number."""
    return (entry.op, entry.axis) == ("all_to_all", "ep")


def _routed_bytes(ranks: Ledgers) -> int:
    return sum(entry.bytes for entries in ranks.values() for entry in entries if _is_routed(entry))


def _without_routing(entries: tuple[LedgerEntry, ...]) -> tuple[LedgerEntry, ...]:
    return tuple(msgspec.structs.replace(entry, bytes=0) if _is_routed(entry) else entry for entry in entries)


def _entry_differences(old: tuple[LedgerEntry, ...], new: tuple[LedgerEntry, ...]) -> str:
    def table(entries: tuple[LedgerEntry, ...]) -> dict[tuple[str, str, str], str]:
        return {(e.op, e.axis, e.dtype): f"{e.count} calls, {e.bytes:,} bytes" for e in entries}

    before, after = table(old), table(new)
    keys = [key for key in sorted(before | after) if before.get(key) != after.get(key)]
    return "; ".join(f"{'/'.join(key)}: {before.get(key, 'none')} -> {after.get(key, 'none')}" for key in keys)


def _close(new: float | None, old: float, band: float) -> bool:
    """Written so that a missing number is never close."""
    return new is not None and abs(new - old) <= band * abs(old)


def _within(new: float | None, old: float, factor: float) -> bool:
    return new is not None and old / factor <= new <= old * factor


def _told(norm: float | None) -> str:
    return "none" if norm is None else f"{norm:.6g}"
