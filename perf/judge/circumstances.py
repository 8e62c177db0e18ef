"""What is said of a cell, once it is judged, in the light of its machine, its reference and the rest of the suite."""

from collections.abc import Sequence

import msgspec

from perf.facts.measurement import STEP_TIME, Measurement
from perf.facts.outcome import Outcome
from perf.judge.approval import unlike_each_other
from perf.judge.baseline import Invariants
from perf.judge.breaker import Shift
from perf.judge.correctness import computes_the_same, unlike_unsharded
from perf.judge.preflight import Doubts
from perf.judge.verdict import Verdict, most_urgent


def beside_unsharded(verdict: Verdict, measurement: Measurement, unsharded: Invariants | None) -> Verdict:
    """What is said of a cell of which nothing is recorded: its runs, and the unsharded model, have to compute the same.

    Where that is not recorded either, or is of other batches, nothing says that the numbers are right.
    """
    if errors := unlike_each_other(measurement):
        return msgspec.structs.replace(verdict, outcome=Outcome.WRONG, reasons=tuple(errors))
    if unsharded is None or not computes_the_same(measurement, unsharded):
        size = measurement.cell.size
        what = f"no unsharded {size}" if unsharded is None else f"no unsharded {size} with this workload"
        note = f"losses and norms were compared with nothing: {what} is recorded"
        return msgspec.structs.replace(verdict, notes=(note, *verdict.notes))
    errors = unlike_unsharded(measurement, unsharded)
    return msgspec.structs.replace(verdict, outcome=Outcome.WRONG, reasons=tuple(errors)) if errors else verdict


def doubted(verdict: Verdict, doubts: Doubts, *, is_host_bound: bool) -> Verdict:
    """What is said of a cell on a node that is in doubt; a slow host that does not limit the cell is told with it."""
    if reasons := doubts.of_cell(is_host_bound=is_host_bound):
        return incomparable(verdict, reasons)
    aside = (f"a slower host, which this cell does not wait for: {reason}" for reason in doubts.of_host_bound_cells)
    return msgspec.structs.replace(verdict, notes=(*verdict.notes, *aside))


def incomparable(verdict: Verdict, reasons: Sequence[str]) -> Verdict:
    """What is said of a cell on a node that is slower than its kind: of its times, nothing, nor are they a bar."""
    told = tuple(f"not comparable: {reason}" for reason in reasons)
    if verdict.outcome is Outcome.NO_BASELINE:
        return msgspec.structs.replace(verdict, outcome=Outcome.ENVIRONMENT, reasons=(*told, *verdict.reasons))
    if not verdict.comparisons:
        return verdict
    return msgspec.structs.replace(_with_time(verdict, Outcome.ENVIRONMENT), reasons=told)


def invalid(verdict: Verdict, reasons: Sequence[str]) -> Verdict:
    """What is said of a cell whose reference is none."""
    return msgspec.structs.replace(
        verdict, outcome=Outcome.INVALID, reasons=tuple(reasons), comparisons=(), more_runs=0, wanted_pairs=0
    )


def everywhere(verdict: Verdict, shift: Shift) -> Verdict:
    """What is said of a suspicious cell when the whole suite became slower with the build."""
    return msgspec.structs.replace(_with_time(verdict, Outcome.REGRESSED), reasons=(shift.text,))


def _with_time(verdict: Verdict, outcome: Outcome) -> Verdict:
    """The verdict with another outcome of its step time, decided."""
    comparisons = tuple(
        msgspec.structs.replace(comparison, outcome=outcome) if comparison.metric == STEP_TIME else comparison
        for comparison in verdict.comparisons
    )
    return msgspec.structs.replace(
        verdict, outcome=most_urgent(comparisons), comparisons=comparisons, more_runs=0, wanted_pairs=0
    )
