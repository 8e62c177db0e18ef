"""The verdict on a comparison side by side: runs of two builds, neighbours in time, on the same devices.

Such a comparison needs no baseline. It asks of both builds what is asked of every measurement, of the records that
they prove what each rank imported, and of the candidate that it computes what the reference computes.
"""

import statistics
from collections.abc import Sequence

from perf.facts.measurement import STEP_TIME, Measurement, disturbances, gaps
from perf.facts.outcome import Outcome
from perf.facts.record import RunRecord
from perf.judge.approval import provisional
from perf.judge.baseline import Baseline, Invariants
from perf.judge.correctness import differences, intrinsic_errors, number_differences, traffic_differences
from perf.judge.decision import Pair, compare_pairs, noise_reasons, num_pairs
from perf.judge.rule import Rule
from perf.judge.verdict import (
    Verdict,
    environment_changes,
    memory_comparisons,
    most_urgent,
    notes_of,
    split,
    time_comparison,
)


def judge_pairs(
    candidate: Measurement,
    reference: Measurement,
    baseline: Baseline | None,
    invariants: Invariants | None,
    rule: Rule,
    *,
    wanted: int | None = None,
) -> Verdict:
    """Reference -> candidate. The cell's own baseline, where there is one, only says how far apart runs are.

    Args:
        wanted: pairs to judge by; None: as many as the noise asks for.
    """
    if refused := _incomparable(candidate, reference, invariants):
        outcome, reasons = refused
        return Verdict(
            cell_id=candidate.cell.id,
            outcome=outcome,
            reasons=tuple(reasons),
            step_time_s=candidate.median(STEP_TIME),
            num_runs=len(candidate.runs),
            num_pairs=len(reference.runs),
        )
    measured, computed = provisional(reference, "reference")
    pairs, _ = split(candidate, reference)
    sd = between_runs(pairs, baseline, candidate, rule)
    wanted = wanted or num_pairs(sd, rule)
    decision = compare_pairs(pairs, sd, rule)
    assert decision.outcome is not None
    undecided = len(pairs) < wanted
    time = time_comparison(decision, Outcome.NOT_RUN if undecided else decision.outcome)
    comparisons = (*memory_comparisons(candidate, measured, rule), time)
    reasons = noise_reasons(decision, most_urgent(comparisons), rule)
    if undecided:
        reasons = [f"{len(pairs)} of {wanted} pairs"]
    traffic = [f"unlike the reference, {difference}" for difference in traffic_differences(candidate, computed)]
    return Verdict(
        cell_id=candidate.cell.id,
        outcome=most_urgent(comparisons),
        reasons=tuple(reasons),
        comparisons=comparisons,
        step_time_s=candidate.median(STEP_TIME),
        num_runs=len(candidate.runs),
        num_pairs=len(pairs),
        wanted_pairs=wanted if undecided else 0,
        sensitivity=decision.sensitivity,
        environment_changes=environment_changes(measured, candidate.runs[-1]),
        notes=(*same_code(candidate, reference), *traffic, *notes_of(candidate)),
    )


def _incomparable(
    candidate: Measurement, reference: Measurement, invariants: Invariants | None
) -> tuple[Outcome, list[str]] | None:
    """What has to be said before any speed, or None."""
    if errors := intrinsic_errors(candidate):
        return Outcome.WRONG, errors
    if missing := gaps(candidate) + disturbances(candidate) + reference_errors(reference):
        return Outcome.INVALID, missing
    if reason := unproven(candidate, reference):
        return Outcome.ERROR, [reason]
    _, computed = provisional(reference, "reference")
    errors = [f"unlike the reference, {error}" for error in number_differences(candidate, computed)]
    if invariants is not None and not invariants.recipe.differences(candidate.recipe):
        errors = errors or differences(candidate, invariants)
    return (Outcome.WRONG, errors) if errors else None


def reference_errors(reference: Measurement) -> list[str]:
    """Why nothing can be compared with these runs, in words."""
    found = gaps(reference) + intrinsic_errors(reference) + disturbances(reference)
    return [f"reference: {error}" for error in found]


def between_runs(pairs: Sequence[Pair], baseline: Baseline | None, candidate: Measurement, rule: Rule) -> float:
    """Sd between runs of one build: of these pairs, or of the baseline's runs of this recipe where they are noisier.

    The difference of a pair has sqrt(2) times the sd of one run.
    """
    spreads = [[(new - old) / 2**0.5 for old, new in pairs]]
    if baseline is not None and not baseline.recipe.differences(candidate.recipe):
        spreads.append(list(baseline.levels))
    return max(rule.sd_of(levels) for levels in spreads)


def unproven(candidate: Measurement, reference: Measurement) -> str | None:
    """Why these records do not prove a comparison of two builds, or None."""
    beside = {run.index for run in reference.runs}
    paired = [run for run in candidate.runs if run.index in beside]
    if not paired:
        return None  # the test run was interrupted between the two runs of its first pair
    for runs in (paired, reference.runs):
        for run in runs:
            if len({rank.imported for rank in run.ranks}) != 1 or run.ranks[0].imported is None:
                return f"run {run.index} of the {run.arm}: its ranks do not say, or differ in, what they imported"
        if len({run.ranks[0].imported for run in runs}) != 1:
            return f"the runs of the {runs[0].arm} imported different code: it changed while they were made"
    mine, other = paired[-1], reference.runs[-1]
    if _is_from(mine) == _is_from(other):
        return f"both arms ran {mine.ranks[0].imported} under the same variables: nothing is compared with nothing"
    return None


def same_code(candidate: Measurement, reference: Measurement) -> tuple[str, ...]:
    """A note where two places hold the same code: what is compared then is the machine with itself."""
    mine, other = candidate.runs[-1], reference.runs[-1]
    one, two = mine.ranks[0].imported, other.ranks[0].imported
    assert one is not None
    assert two is not None
    alike = one.digest == two.digest and one.torch == two.torch and _variables(mine) == _variables(other)
    return ("both arms run the same code and torch: this compares the machine with itself",) if alike else ()


def _is_from(run: RunRecord) -> tuple[object, ...]:
    imported = run.ranks[0].imported
    assert imported is not None
    return imported.strategies, imported.torch, _variables(run)


def _variables(run: RunRecord) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(run.environment.variables.items()))


def confirmed_shift(verdicts: Sequence[Verdict]) -> float | None:
    """Median change of step time over cells that were compared side by side; None where none could be."""
    changes = [
        comparison.change
        for verdict in verdicts
        for comparison in verdict.comparisons
        if comparison.metric == STEP_TIME
    ]
    return statistics.median(changes) if changes else None
