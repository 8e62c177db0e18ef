"""A finished test run in which cells end in every way, for the tests of exports."""

from perf.facts.outcome import Outcome
from perf.judge.rule import Rule
from perf.judge.verdict import Verdict, judge
from perf.tell.exports import FinishedTestRun
from perf.tell.results import Manifest, Results
from strategies.spec import LinkProfile, Mode, StrategyName
from tests import factory

HOSTILE = "CRASH: rank 1: \"quoted\", 'single' | pipe ``` <b>tag</b> \u4e2d \x1b[31mred\x1b[0m\nTraceback, of lines"
GIB = 2**30
PASSES = factory.cell()
ON_GPUS = factory.cell(size="0.6b", link=LinkProfile.NATIVE)
WITHOUT_RUNS = {
    factory.cell(StrategyName.ZERO1): Outcome.ERROR,
    factory.cell(size="0.6b", world_size=8, link=LinkProfile.NATIVE): Outcome.UNSUPPORTED,
    factory.cell(StrategyName.ZERO2): Outcome.NOT_RUN,
}
WITH_RUNS = {
    factory.cell(StrategyName.TP): Outcome.WRONG,
    factory.cell(StrategyName.FSDP2): Outcome.INVALID,
    factory.cell(mode=Mode.COMPILE): Outcome.NOT_RUN,
}
"""Cells whose runs measured something that is no measurement of the cell."""
TIMES_S = {PASSES.id: (0.1, 0.09, 0.11), ON_GPUS.id: (0.25, 0.5, 0.125)}
PEAKS = (40 * GIB, 41 * GIB, 42 * GIB)
TOKENS_PER_STEP = {of.id: of.workload.tokens_per_step for of in (PASSES, ON_GPUS)}


def manifest(*cells, run_id="2026-11-29T14-00-00", started_at="2026-11-29T14:00:00+00:00"):
    return Manifest(run_id=run_id, started_at=started_at, matrix="auto", plan=factory.PLAN, cells=cells)


def finished(measurement, outcome=Outcome.PASS, **changes):
    """A test run of one cell."""
    verdict = Verdict(cell_id=measurement.cell.id, outcome=outcome)
    return FinishedTestRun(
        manifest=manifest(measurement.cell, **changes), verdicts=(verdict,), measurements=(measurement,)
    )


def on_gpus(*, env=None, allocated_bytes=PEAKS):
    env = env or factory.environment(factory.H200X2)
    return factory.measurement(ON_GPUS, step_times_s=TIMES_S[ON_GPUS.id], allocated_bytes=allocated_bytes, env=env)


def write_test_run(root):
    """A results folder: two cells with values, one regressed, and every way in which a cell ends without any."""
    results = Results(root / "2026-11-29T14-00-00")
    results.write_manifest(manifest(PASSES, ON_GPUS, *WITHOUT_RUNS, *WITH_RUNS))
    for measurement, baseline in (
        (factory.measurement(PASSES, step_times_s=TIMES_S[PASSES.id]), factory.baseline(PASSES)),
        (on_gpus(), factory.baseline(ON_GPUS, machine=factory.H200X2, allocated_bytes=40 * GIB)),
    ):
        for run in measurement.runs:
            results.write_run(run)
        results.write_verdict(judge(measurement, baseline, factory.invariants(measurement.cell), Rule()))
    for of in WITH_RUNS:
        results.write_run(factory.run_record(of, step_time_s=123.0))
    for of, outcome in (WITHOUT_RUNS | WITH_RUNS).items():
        if outcome is not Outcome.NOT_RUN:
            results.write_verdict(Verdict(cell_id=of.id, outcome=outcome, reasons=(HOSTILE,)))
    return results.folder
