"""The `--perf-...` options of pytest, read into settings or refused, each with the cure."""

import os
from pathlib import Path

import pytest

from perf.budget import seconds
from perf.declarations import ALLOWABLE
from perf.facts.cell import SamplingPlan
from perf.facts.fault import Fault, FaultKind
from perf.facts.matrix import cells_of
from perf.facts.outcome import MEASURED, Outcome
from perf.judge.rule import OVERRIDES, PRESETS, RUNS_A_LOOK, Override, Rule, check_together, overrides
from perf.measure.reference import Reference, parse
from perf.settings import Settings

MAX_COUNT = 10**6
"""Of steps, whose batches are made before the first one, and of runs."""
MAX_SLOWDOWN = 100
LONGEST_S = 365 * 24 * 3600
"""Of one run; what waits for it takes no infinity."""


def settings(config: pytest.Config) -> Settings:
    """The options as settings. Raises ValueError with the option's name and the cure."""
    try:
        return _settings(config)
    except OSError as error:  # of a path that cannot even be asked for, such as one with too long a name
        raise ValueError(f"{error.filename}: {error.strerror}") from None


def _settings(config: pytest.Config) -> Settings:
    option = config.getoption
    _check_numbers(config)
    checkpoint: Path | None = option("perf_checkpoint")
    if checkpoint is not None and not any(checkpoint.glob("*.safetensors")):
        raise ValueError(f"--perf-checkpoint {checkpoint}: no folder with *.safetensors of a Hugging Face model")
    soak, pairs, budget = option("perf_soak"), option("perf_pairs"), option("perf_time_budget")
    preset: str = option("perf_preset")
    if preset not in PRESETS:
        raise ValueError(f"--perf-preset {preset}: unknown; known: {', '.join(PRESETS)}")
    reference, variables = _reference(config)
    side_by_side = option("perf_ab") is not None or bool(variables)
    if side_by_side and option("perf_runs") != SamplingPlan().runs:
        raise ValueError("--perf-runs says nothing of a comparison side by side; its runs are pairs: --perf-pairs N")
    if soak and option("perf_runs") != SamplingPlan().runs:
        raise ValueError("--perf-soak makes one long run of each cell; leave --perf-runs away")
    if option("perf_selftest") and reference is not None:
        raise ValueError("--perf-selftest measures one build; leave --perf-ab, --perf-ab-env and --perf-reference away")
    if (resumed := option("perf_resume")) is not None and not resumed.is_dir():
        raise ValueError(f"--perf-resume {resumed} is not a test run: it is no folder; pass one below results/")
    if not option("perf_baselines").is_dir():
        raise ValueError(f"--perf-baselines {option('perf_baselines')}: no such folder")
    for name, folder in (("--perf-results", option("perf_results")), ("--perf-state", option("perf_state"))):
        if reason := _not_a_folder(folder):
            raise ValueError(f"{name} {folder}: {reason}")
    if pairs is not None and not side_by_side:
        raise ValueError("--perf-pairs goes with --perf-ab or --perf-ab-env; else the noise of a cell says how many")
    runs = (pairs or Rule().pairs) if side_by_side else option("perf_runs")
    return Settings(
        matrix=option("perf_matrix"),
        plan=SamplingPlan(
            warmup_steps=option("perf_warmup"),
            timed_steps=_timed_steps(config)[1],
            runs=1 if soak and not side_by_side else runs,
            checkpoint=str(checkpoint.resolve()) if checkpoint else None,
        ),
        baselines=option("perf_baselines"),
        state=option("perf_state"),
        deadline_s=option("perf_timeout"),
        preset=preset,
        evidence=_evidence(config),
        in_order=option("perf_in_order"),
        overrides=_overrides(config),
        reference=reference,
        candidate=_candidate(config),
        variables=variables,
        side_by_side=side_by_side,
        pairs=pairs,
        time_budget_s=None if budget is None else seconds(budget),
        keep_provisional=option("perf_provisional"),
        fault=_fault(config),
        commit=option("perf_commit"),
    )


def _check_numbers(config: pytest.Config) -> None:
    """Raises ValueError for a number that says nothing, whatever the other options say."""
    counted = {"runs": "run", "steps": "timed step", "warmup": "warm-up step", "soak": "timed step", "pairs": "pair"}
    for name, what in counted.items():
        if (number := config.getoption(f"perf_{name}")) is not None and not 1 <= number <= MAX_COUNT:
            raise ValueError(f"--perf-{name} {number}: must be at least 1 {what} and at most {MAX_COUNT}")
    timeout_s: float = config.getoption("perf_timeout")
    if not 0 < timeout_s <= LONGEST_S:
        raise ValueError(f"--perf-timeout {timeout_s:g}: must be more than 0 seconds, at most {LONGEST_S}, a year")


def _timed_steps(config: pytest.Config) -> tuple[str, int]:
    """Of each run, and the option that says how many."""
    soak = config.getoption("perf_soak")
    return ("--perf-steps", config.getoption("perf_steps")) if soak is None else ("--perf-soak", soak)


def _overrides(config: pytest.Config) -> tuple[Override, ...]:
    """Those among the baselines. Raises ValueError where those of one cell contradict each other."""
    option = config.getoption
    path: Path = option("perf_baselines") / OVERRIDES
    if chosen := overrides(path):
        check_together(chosen, [cell.id for cell in cells_of(option("perf_matrix"))], option("perf_preset"), str(path))
    return chosen


def _fault(config: pytest.Config) -> Fault | None:
    """The one to plant in every run. Raises ValueError for one that would change nothing."""
    text, (name, num_steps) = config.getoption("perf_plant"), _timed_steps(config)
    if text is None:
        return None
    fault = Fault.parse(text)
    if fault.kind is FaultKind.TRUNCATED and fault.amount >= num_steps:
        raise ValueError(f"--perf-plant {text}: leaves every timed step of {name} {num_steps}; name fewer")
    return fault


def _not_a_folder(path: Path) -> str | None:
    """Why nothing can be written below a path that need not exist yet, or None."""
    first = next(place for place in (path, *path.resolve().parents) if place.exists())
    if not first.is_dir():
        return f"{first} is no folder"
    return None if os.access(first, os.W_OK) else f"nothing can be written to {first}"


def _evidence(config: pytest.Config) -> frozenset[Outcome]:
    """Outcomes that are asked why."""
    never, always = config.getoption("perf_no_evidence"), config.getoption("perf_profile")
    if never and always:
        raise ValueError("--perf-profile runs every cell under a profiler, --perf-no-evidence none; give one of them")
    return MEASURED if always else frozenset() if never else frozenset({Outcome.REGRESSED})


def selftest(config: pytest.Config) -> tuple[tuple[float, ...], int]:
    """Slowdowns to plant, and in how many runs each. Raises ValueError for what cannot be meant."""
    text, num_runs = config.getoption("perf_selftest_slowdowns"), config.getoption("perf_selftest_runs")
    try:
        slowdowns = tuple(float(part) for part in text.split(","))
    except ValueError:
        slowdowns = ()
    if not slowdowns or not all(0 < slowdown <= MAX_SLOWDOWN for slowdown in slowdowns):
        raise ValueError(
            f"--perf-selftest-slowdowns {text}: write fractions above 0, at most {MAX_SLOWDOWN}, such as 0.01,0.03"
        )
    if num_runs < RUNS_A_LOOK:
        raise ValueError(f"--perf-selftest-runs {num_runs}: must be at least {RUNS_A_LOOK}")
    asked = config.getoption("perf_selftest")
    if asked and config.getoption("perf_time_budget") is not None:
        raise ValueError(
            "--perf-time-budget plans whole cells, and a self-test is one long cell; leave it away: "
            "--perf-selftest-runs and -k make a self-test shorter, --perf-resume goes on with an interrupted one"
        )
    if asked and config.getoption("perf_plant") is not None:
        raise ValueError("--perf-plant: a self-test plants its own faults, and needs runs without any; leave it away")
    name, num_steps = _timed_steps(config)
    if asked and num_steps < 2:
        raise ValueError(
            f"{name} {num_steps}: a self-test needs at least 2 timed steps, to tell their noise from that of runs"
        )
    return tuple(sorted(slowdowns)), num_runs


def _reference(config: pytest.Config) -> tuple[Reference | None, tuple[tuple[str, str], ...]]:
    """The build to compare with, and the variables of this one alone."""
    option = config.getoption
    side, stages = option("perf_ab"), option("perf_reference")
    if side is not None and stages is not None:
        raise ValueError("--perf-ab compares every cell, --perf-reference only suspicious ones; give one of them")
    variables: list[tuple[str, str]] = []
    for text in option("perf_ab_env"):
        name, equals, value = text.partition("=")
        if not name or not equals or name in dict(variables):
            raise ValueError(f"--perf-ab-env {text}: write NAME=VALUE, each name once")
        variables.append((name, value))
    if variables and stages is not None:
        raise ValueError("--perf-ab-env goes with --perf-ab, or alone; --perf-reference compares only suspicious cells")
    said = side if side is not None else stages
    if said is None:
        return (Reference(said="") if variables else None), tuple(variables)
    name = "--perf-ab" if side is not None else "--perf-reference"
    try:
        reference = parse(said)
    except ValueError as error:
        raise ValueError(f"{name} {error}") from None
    if reference.is_this_build and not variables and option("perf_candidate") is None:
        raise ValueError(f"{name} {said}: is this very build; nothing would be compared with nothing")
    return reference, tuple(variables)


def _candidate(config: pytest.Config) -> Reference | None:
    """The build to compare, where it is not this checkout."""
    said = config.getoption("perf_candidate")
    if said is None:
        return None
    if config.getoption("perf_ab") is None:
        raise ValueError("--perf-candidate goes with --perf-ab: baselines are compared with the build of this checkout")
    try:
        return parse(said)
    except ValueError as error:
        raise ValueError(f"--perf-candidate {error}") from None


def allowed(config: pytest.Config) -> frozenset[Outcome]:
    """Outcomes of --perf-allow. Raises ValueError for an unknown one."""
    names = [name.strip() for name in config.getoption("perf_allow").split(",") if name.strip()]
    if unknown := [name for name in names if name not in ALLOWABLE]:
        raise ValueError(f"--perf-allow {unknown[0]}: not an outcome without a verdict; known: {', '.join(ALLOWABLE)}")
    return frozenset(ALLOWABLE[name] for name in names)
