"""What would become a cell's baseline: a pure proposal from a measurement and what is stored, or a refusal.

And what would become a machine's recorded ceilings, from a preflight.
"""

import statistics

from perf.facts.cell import SamplingPlan
from perf.facts.measurement import (
    PEAK_ALLOCATED,
    PEAK_RESERVED,
    PEAK_RESIDENT,
    STEP_TIME,
    Measurement,
    disturbances,
    gaps,
    ledgers,
)
from perf.facts.outcome import Outcome
from perf.facts.rates import KINDS
from perf.facts.record import RunRecord
from perf.judge.baseline import Baseline, BaselineRun, Invariants, Night, Origin, RecordedCeilings
from perf.judge.correctness import differences, intrinsic_errors
from perf.judge.preflight import Preflight, compare, invalid, shortfall
from perf.judge.rule import RUNS_A_LOOK, Rule
from perf.judge.verdict import judge
from strategies.value import Value


class Consent(Value, frozen=True, kw_only=True):
    """What the person who approves has agreed to."""

    reason: str | None = None
    accept_regression: bool = False
    accept_invariants: bool = False

    def __post_init__(self) -> None:
        for flag in ("accept_regression", "accept_invariants"):
            if getattr(self, flag) and not (self.reason or "").strip():
                raise ValueError(f"--{flag.replace('_', '-')} needs a --reason that will be kept in the baseline")


class Proposal(Value, frozen=True, kw_only=True):
    """What to store for one cell. Both records None: nothing; `refusal` says why, None where all is stored."""

    cell_id: str
    baseline: Baseline | None = None
    invariants: Invariants | None = None
    refusal: str | None = None
    summary: str = ""


def propose(
    measurement: Measurement,
    run_id: str,
    *,
    baseline: Baseline | None,
    invariants: Invariants | None,
    consent: Consent,
    rule: Rule,
    said: Outcome | None = None,
) -> Proposal:
    """The next baseline and invariants of a cell.

    A night of the same build, or under the same reason, and of the same recipe is appended. Anything else starts a new
    series and needs a reason; a worse value, which starts one too, needs `accept_regression`, changed invariants and
    those of another recipe, which all machines share, need `accept_invariants`. What is wrong by itself is never
    stored.

    Args:
        rule: of the cell.
        said: what the test run said of the cell, perhaps by a stricter rule.
    """
    cell_id = measurement.cell.id
    if reason := unfit(measurement):
        return Proposal(cell_id=cell_id, refusal=reason)
    origin = origin_of(measurement.runs[-1], run_id, consent.reason)
    new_invariants = invariants_of(measurement, origin)
    if invariants is not None:
        if changed := _changes(measurement, invariants):
            if not consent.accept_invariants:
                return Proposal(cell_id=cell_id, refusal=f"{changed[0]}; if meant: --accept-invariants --reason ...")
        else:
            new_invariants = invariants
    if baseline is None:
        first = _series(measurement, (night_of(measurement, origin),))
        return Proposal(cell_id=cell_id, baseline=first, invariants=new_invariants, summary="first baseline")
    if own := [night for night in baseline.nights if night.origin.run_id == run_id]:
        newer = len(measurement.runs) - len(own[0].runs)
        told = f", without {newer} newer runs: a night stays as it was approved" * (newer > 0)
        return Proposal(cell_id=cell_id, summary=f"recorded already{told}")
    return _continue(measurement, origin, baseline, new_invariants, consent, rule, said)


def _changes(measurement: Measurement, invariants: Invariants) -> list[str]:
    """What the recorded invariants are not, in words."""
    if other := invariants.recipe.differences(measurement.recipe):
        return [f"the invariants, which all machines share, were recorded with another recipe: {'; '.join(other)}"]
    return differences(measurement, invariants)


def is_screened(measurement: Measurement, plan: SamplingPlan) -> bool:
    """Whether a cell has the few runs that it was to have, in a test run of which others have more: a screen's."""
    num_runs = len(measurement.runs)
    return num_runs >= measurement.plan.runs and num_runs < min(plan.runs, RUNS_A_LOOK)


def unfit(measurement: Measurement) -> str | None:
    """Why a measurement can never be stored, or None."""
    faults = [run.fault.kind for run in measurement.runs if run.fault is not None]
    if faults:
        return f"measured with a planted fault ({faults[0]})"
    errors = intrinsic_errors(measurement) or gaps(measurement) + disturbances(measurement)
    errors = errors or unlike_each_other(measurement)
    return errors[0] if errors else None


def unlike_each_other(measurement: Measurement) -> list[str]:
    """Where equal runs compute or communicate different things: a record of them would call some of them wrong."""
    recorded = invariants_of(measurement, origin_of(measurement.runs[-1], "itself", None))
    return [f"equal runs differ: {difference}" for difference in differences(measurement, recorded)]


def origin_of(run: RunRecord, run_id: str, reason: str | None) -> Origin:
    environment = run.environment
    return Origin(
        run_id=run_id,
        date=run.started_at[:10],
        commit=environment.commit,
        dirty=environment.dirty,
        host=environment.host,
        cpu=environment.cpu,
        software=environment.software,
        variables=environment.variables,
        reason=reason,
    )


def night_of(measurement: Measurement, origin: Origin) -> Night:
    def as_int(value: float | None) -> int | None:
        return None if value is None else int(value)

    peaks = zip(*(measurement.values(metric) for metric in (PEAK_ALLOCATED, PEAK_RESERVED, PEAK_RESIDENT)), strict=True)
    runs = tuple(
        BaselineRun(
            step_times_s=run.step_times_s,
            peak_allocated_bytes=as_int(allocated),
            peak_reserved_bytes=as_int(reserved),
            peak_resident_bytes=as_int(resident) or 0,
        )
        for run, (allocated, reserved, resident) in zip(measurement.runs, peaks, strict=True)
    )
    attention = {kernel for run in measurement.runs for rank in run.ranks for kernel in rank.attention}
    return Night(origin=origin, runs=runs, attention=tuple(sorted(attention)))


def invariants_of(measurement: Measurement, origin: Origin) -> Invariants:
    """Of the last run: they are the same in every run, or the measurement is wrong.

    The norm of the last gradient is not, on GPUs: it is of the run in the middle.
    """
    run = measurement.runs[-1]
    start = run.ranks[0].start_gradient_norm
    ends = [norm for run in measurement.runs if (norm := run.ranks[0].end_gradient_norm) is not None]
    assert start is not None
    return Invariants(
        cell_id=measurement.cell.id,
        recipe=measurement.recipe,
        origin=origin,
        num_parameters=sum(rank.num_parameters for rank in run.ranks),
        tokens_per_step=sum(rank.tokens_per_step for rank in run.ranks),
        start_gradient_norm=start,
        end_gradient_norm=statistics.median_low(ends),
        losses=tuple(loss for loss in run.losses if loss is not None),
        ledger=ledgers(run),
        graph_breaks=max(rank.compile.graph_breaks for rank in run.ranks),
    )


class CeilingProposal(Value, frozen=True, kw_only=True):
    """What to store of a node. `record` None: nothing; `refusal` says why, None where nothing has changed."""

    record: RecordedCeilings | None = None
    refusal: str | None = None
    summary: str = ""


def propose_ceilings(
    preflight: Preflight, run_id: str, *, recorded: RecordedCeilings | None, consent: Consent
) -> CeilingProposal:
    """The next recorded ceilings of a machine, as a whole.

    While every rate is within its tolerance of the record, the record stays, so that it cannot creep. Where one rose
    beyond, all are taken as measured; the host's alone is luck of the start. One that fell beyond needs
    `accept_regression`. Those of a node at fault, or with a rate missing, are never stored, nor those of a CPU, which
    nothing is held to.
    """
    if not preflight.machine.is_gpu:
        return CeilingProposal(summary="none are recorded of a CPU, whose cores are shared")
    if faults := [*preflight.faults, *invalid(preflight)]:
        return CeilingProposal(refusal=faults[0])
    assert preflight.ceilings is not None
    record = _recorded(preflight, run_id, consent.reason)
    if recorded is None:
        return CeilingProposal(record=record, summary="first ceilings")
    reasons = compare(preflight, recorded)
    of_node = [kind for kind in KINDS if not kind.of_host]
    risen = any(shortfall(kind, recorded.ceilings, preflight.ceilings, tolerance=kind.tolerance) for kind in of_node)
    if not reasons and not risen:
        return CeilingProposal(summary="within tolerance of the record")
    if reasons and not consent.accept_regression:
        return CeilingProposal(refusal=f"{reasons[0]}; if meant: --accept-regression --reason ...")
    return CeilingProposal(record=record, summary=f"new ceilings: {consent.reason or 'higher'}")


def _recorded(preflight: Preflight, run_id: str, reason: str | None) -> RecordedCeilings:
    assert preflight.ceilings is not None
    assert preflight.software is not None
    return RecordedCeilings(
        machine=preflight.machine,
        driver=preflight.driver,
        ceilings=preflight.ceilings,
        origin=Origin(
            run_id=run_id,
            date=preflight.measured_at[:10],
            commit=preflight.commit,
            dirty=preflight.dirty,
            host=preflight.host,
            cpu=preflight.cpu,
            software=preflight.software,
            variables=preflight.variables,
            reason=reason,
        ),
    )


def provisional(measurement: Measurement, run_id: str) -> tuple[Baseline, Invariants]:
    """A first baseline for this machine alone, from one test run."""
    origin = origin_of(measurement.runs[-1], run_id, "recorded automatically: the first run on this machine")
    return _series(measurement, (night_of(measurement, origin),)), invariants_of(measurement, origin)


def _continue(
    measurement: Measurement,
    origin: Origin,
    baseline: Baseline,
    invariants: Invariants,
    consent: Consent,
    rule: Rule,
    said: Outcome | None,
) -> Proposal:
    cell_id = measurement.cell.id
    other_recipe = baseline.recipe.differences(measurement.recipe)
    worse = not other_recipe and (said is Outcome.REGRESSED or _is_worse(measurement, baseline, invariants, rule))
    if worse and not consent.accept_regression:
        return Proposal(
            cell_id=cell_id,
            refusal="worse than the baseline; if meant, as a new series: --accept-regression --reason ...",
        )
    night = night_of(measurement, origin)
    # A worse value never joins the better ones, whatever the reason: both together would be too noisy to gate.
    if not other_recipe and not worse and any(one.origin.is_continued_by(origin) for one in baseline.nights):
        nights, summary = (*baseline.nights, night), f"night {len(baseline.nights) + 1} of the series"
    elif consent.reason:
        nights, summary = (night,), f"new series: {consent.reason}"
    else:
        what = f"recipe ({'; '.join(other_recipe)})" if other_recipe else "build"
        return Proposal(
            cell_id=cell_id, refusal=f"another {what} than the baseline's; to start a new series: --reason ..."
        )
    return Proposal(cell_id=cell_id, baseline=_series(measurement, nights), invariants=invariants, summary=summary)


def _is_worse(measurement: Measurement, baseline: Baseline, invariants: Invariants, rule: Rule) -> bool:
    """By the rule; where runs are too far apart for it, by the largest tolerance that it knows."""
    verdict = judge(measurement, baseline, invariants, rule)
    if verdict.outcome is not Outcome.NOISY:
        return verdict.outcome is Outcome.REGRESSED
    return any(row.metric == STEP_TIME and row.change > rule.cap for row in verdict.comparisons)


def _series(measurement: Measurement, nights: tuple[Night, ...]) -> Baseline:
    return Baseline(
        cell_id=measurement.cell.id,
        machine=measurement.runs[-1].environment.machine,
        recipe=measurement.recipe,
        nights=nights,
    )
