"""The gate measured on this machine: runs of a cell as it is, and with known slowdowns planted, judged by resampling.

Every resample is a test run that could have been: a baseline and runs to judge, drawn from the recorded pool. How often
it is red, by the planted slowdown, is the operating curve; beside it stands the curve that is simulated with the noise
of the pool.
"""

import math
import random
import statistics
from collections.abc import Sequence

import msgspec
import numpy as np

from perf.facts.fault import Fault, FaultKind
from perf.facts.outcome import Outcome
from perf.facts.record import RunRecord
from perf.facts.stats import robust_sd, run_level
from perf.judge.decision import compare_pairs
from perf.judge.rule import PRESETS, RUNS_A_LOOK, SENSITIVE_RUNS, Rule
from perf.judge.simulation import Noise, decided, rates
from strategies.value import Value

SLOWDOWNS = (0.01, 0.02, 0.03, 0.05, 0.10)
EXTRA_MIB = 64
NUM_RESAMPLES = 2000
MOST_RUNS = 3 * RUNS_A_LOOK
SOUND_FALSE_ALARMS = 0.01
SOUND_FINDS = 0.99
"""A slowdown of 10 % is found in this share of resamples, where the cell can be gated at all."""


class Sample(Value, frozen=True, kw_only=True):
    """One recorded run."""

    planted: float
    """Slowdown, as a fraction of the step time."""
    step_times_s: tuple[float, ...]

    @property
    def level(self) -> float:
        return run_level(self.step_times_s)


class Point(Value, frozen=True, kw_only=True):
    """One planted slowdown, and how often it is found."""

    planted: float
    num_runs: int
    change: float
    """Measured: of the median over the runs, against those without a fault."""
    alone: float
    """Share of resamples that are REGRESSED by the default preset, without a reference."""
    simulated: float
    """The same in the simulation."""
    beside: float
    """Share that is REGRESSED side by side, by the sensitive preset: on a machine that is known to have this noise."""


class SelfTest(Value, frozen=True, kw_only=True):
    """What the gate does with one cell on this machine."""

    cell_id: str
    noise: Noise
    prior_sd: float
    noisy: float
    """Share of resampled baselines that are too noisy to gate on time; all other shares are of the rest."""
    points: tuple[Point, ...]
    memory_found: bool | None
    """Whether 64 MiB more are REGRESSED; None where the allocator has no statistics."""
    wrong: tuple[str, ...] | None = None
    """What makes runs WRONG though none computes anything else: their numbers beside those of all. None: not asked."""
    samples: tuple[Sample, ...]
    """All of it comes from these, by `evaluate`."""

    @property
    def is_gated(self) -> bool:
        """Whether most resamples can be judged at all."""
        return self.noisy <= 0.5

    @property
    def faults(self) -> list[str]:
        """What a sound gate would not do, in words; of a cell that is too noisy for its time, of the numbers alone."""
        found = [f"a run that computes the same is WRONG: {error}" for error in self.wrong or ()]
        if not self.is_gated:
            return found
        none, most = self.points[0], self.points[-1]
        for name, share in (("alone", none.alone), ("side by side", none.beside)):
            if share > SOUND_FALSE_ALARMS:
                found.append(f"{share * 100:.1f} % false alarms {name}, with nothing planted")
        if most.alone < SOUND_FINDS:
            found.append(f"{most.planted * 100:g} % slower is found in {most.alone * 100:.1f} % of resamples only")
        if self.memory_found is False:
            found.append(f"{EXTRA_MIB} MiB more memory are not found")
        return found


def planted(slowdowns: Sequence[float], num_rounds: int, *, memory: bool) -> list[Fault | None]:
    """What is planted run after run, all in turn so that what drifts meets all of them.

    Nothing twice a round, since that is drawn from for baselines too; memory, which repeats to the byte, in the first
    rounds alone.
    """
    one_round: list[Fault | None] = [None, None]
    one_round += [Fault(kind=FaultKind.SLOW_STEP, amount=slowdown) for slowdown in slowdowns]
    more_memory: list[Fault | None] = [Fault(kind=FaultKind.EXTRA_MEMORY, amount=float(EXTRA_MIB))] if memory else []
    rounds = [one_round + (more_memory if number < RUNS_A_LOOK else []) for number in range(num_rounds)]
    return [fault for faults in rounds for fault in faults]


def samples_of(runs: Sequence[RunRecord]) -> tuple[Sample, ...]:
    """Those in which a slowdown was planted, or nothing."""
    slowdowns = [(run, run.fault.amount if run.fault else 0.0) for run in runs if not _has_more_memory(run)]
    return tuple(Sample(planted=slowdown, step_times_s=run.step_times_s) for run, slowdown in slowdowns)


def _has_more_memory(run: RunRecord) -> bool:
    return run.fault is not None and run.fault.kind is FaultKind.EXTRA_MEMORY


def evaluate(
    cell_id: str,
    samples: Sequence[Sample],
    prior_sd: float,
    memory_found: bool | None,
    wrong: Sequence[str] | None = None,
    *,
    seed: int = 0,
) -> SelfTest:
    """The operating curve of a cell from its recorded runs. Equal samples give an equal curve.

    Args:
        prior_sd: between runs, of this machine.
    """
    pools: dict[float, list[float]] = {}
    for sample in samples:
        pools.setdefault(sample.planted, []).append(sample.level)
    noise = fit([sample for sample in samples if not sample.planted])
    source = random.Random(seed)  # noqa: S311 - draws of a simulation
    rule = msgspec.structs.replace(Rule(), prior_sd=prior_sd)
    points = [_point(slowdown, pools, noise, rule, source) for slowdown in sorted(pools)]
    baselines = [source.choices(pools[0.0], k=SENSITIVE_RUNS) for _ in range(NUM_RESAMPLES)]
    noisy = [decided(levels, levels, None, rule)[0].outcome is Outcome.NOISY for levels in baselines]
    return SelfTest(
        cell_id=cell_id,
        noise=noise,
        prior_sd=prior_sd,
        noisy=sum(noisy) / len(noisy),
        points=tuple(points),
        memory_found=memory_found,
        wrong=None if wrong is None else tuple(wrong),
        samples=tuple(samples),
    )


def fit(samples: Sequence[Sample]) -> Noise:
    """The noise of runs in which nothing was planted, all of one night.

    What all runs share, step by step, is no noise: a GPU that meets its power limit swings in the same way each time.
    The level of a run adds 1 / n of its steps' variance to that between runs; where the levels are less far apart than
    that, as steps of a capped GPU make up for each other, the steps count as what they add.
    """
    logs = np.log([sample.step_times_s for sample in samples])
    own = logs - logs.mean(axis=0)
    step, num_steps = float(np.median(own.std(axis=1, ddof=1))), logs.shape[1]
    of_levels = robust_sd([sample.level for sample in samples])
    step = min(step, of_levels * math.sqrt(num_steps))
    return Noise(between_runs=math.sqrt(max(of_levels**2 - step**2 / num_steps, 0.0)), step=step)


def _point(slowdown: float, pools: dict[float, list[float]], noise: Noise, rule: Rule, source: random.Random) -> Point:
    unchanged, changed = pools[0.0], pools[slowdown]
    sensitive = msgspec.structs.replace(rule, prior_sd=robust_sd(unchanged), **PRESETS["sensitive"])
    alone, beside = [], []
    for _ in range(NUM_RESAMPLES):
        baseline = source.choices(unchanged, k=SENSITIVE_RUNS)
        decision, _ = decided(baseline, source.choices(changed, k=MOST_RUNS), None, rule)
        alone.append(decision.outcome)
        num_pairs = sensitive.pairs
        pairs = list(zip(source.choices(unchanged, k=num_pairs), source.choices(changed, k=num_pairs), strict=True))
        beside.append(compare_pairs(pairs, sensitive.sd_of(baseline), sensitive).outcome)
    simulated = rates(noise, slowdown, rule, has_reference=False, num_trials=NUM_RESAMPLES)
    return Point(
        planted=slowdown,
        num_runs=len(changed),
        change=math.expm1(statistics.median(changed) - statistics.median(unchanged)),
        alone=_share_regressed(alone),
        simulated=simulated.regressed,
        beside=_share_regressed(beside),
    )


def _share_regressed(outcomes: Sequence[Outcome | None]) -> float:
    """Among those that can be gated; 0 where none can."""
    gated = [outcome for outcome in outcomes if outcome is not Outcome.NOISY]
    return gated.count(Outcome.REGRESSED) / len(gated) if gated else 0.0


def table(found: SelfTest) -> str:
    """The operating curve for people."""
    noise = f"between runs {found.noise.between_runs * 100:.2f} %, step {found.noise.step * 100:.2f} %"
    lines = [
        f"{found.cell_id}: {noise}, prior {found.prior_sd * 100:.2f} %; too noisy to gate: {found.noisy * 100:.0f} %",
        "  planted   runs  measured    found  simulated  side by side (sensitive)",
        *map(_row, found.points),
    ]
    memory = {None: "not gated here", True: "found", False: "NOT FOUND"}[found.memory_found]
    told = [f"NOT SOUND: {fault}" for fault in found.faults]
    if not found.is_gated:
        told.append("not judged: shares of the few baselines that are quiet enough say nothing")
    numbers = "not asked"
    if found.wrong is not None:
        numbers = f"{len(found.wrong) or 'no'} difference{'s' * (len(found.wrong) != 1)}"
    lines += [f"  +{EXTRA_MIB} MiB: {memory}", f"  numbers: {numbers}"]
    return "\n".join([*lines, *(f"  {text}" for text in told)])


def _row(point: Point) -> str:
    measured = f"{point.planted * 100:6.1f} %  {point.num_runs:4d}  {point.change * 100:+6.2f} %"
    return f"  {measured}  {point.alone * 100:5.1f} %    {point.simulated * 100:5.1f} %  {point.beside * 100:5.1f} %"
