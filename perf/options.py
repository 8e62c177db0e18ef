"""The `--perf-...` options of pytest: declared, and read into settings."""

from pathlib import Path

import pytest

from perf.cell import SamplingPlan
from perf.connection import ROOT
from perf.fault import Fault
from perf.matrix import NAMED
from perf.suite import BASELINES, STATE, Settings
from perf.verdict import FAILURES, VERDICTS, Outcome

ALLOWABLE = {
    outcome.value.lower().replace("_", "-"): outcome
    for outcome in Outcome
    if outcome not in FAILURES | VERDICTS | {Outcome.UNSUPPORTED}
}
"""Outcomes without a verdict, as `--perf-allow` spells them."""


def add_options(parser: pytest.Parser) -> None:
    """Declares the options; every one begins with --perf."""
    plan = SamplingPlan()
    group = parser.getgroup("perf", "performance regression of distributed training (pytest perf)")
    add = group.addoption
    add(
        "--perf-matrix",
        default="auto",
        metavar="NAME",
        help=f"cells: {', '.join(NAMED)} or a TOML file (default: auto)",
    )
    add("--perf-results", type=Path, default=ROOT / "results", metavar="DIR", help="where test runs are kept")
    add("--perf-baselines", type=Path, default=BASELINES, metavar="DIR", help="the checked-in baselines")
    add("--perf-state", type=Path, default=STATE, metavar="DIR", help="compile caches and local provisional baselines")
    add("--perf-resume", type=Path, metavar="RUN", help="go on with an interrupted test run: keep its finished runs")
    add(
        "--perf-allow",
        default="",
        metavar="OUTCOMES",
        help=f"outcomes without a verdict that do not set exit code 8: {', '.join(ALLOWABLE)}",
    )
    add("--perf-provisional", action="store_true", help="record a local provisional baseline where there is none")
    add("--perf-runs", type=int, default=plan.runs, metavar="N", help="runs of each cell (default: %(default)s)")
    add("--perf-steps", type=int, default=plan.timed_steps, metavar="N", help="timed steps (default: %(default)s)")
    add("--perf-warmup", type=int, default=plan.warmup_steps, metavar="N", help="warm-up steps (default: %(default)s)")
    add("--perf-timeout", type=float, default=600.0, metavar="S", help="most seconds of one run (default: %(default)g)")
    add("--perf-checkpoint", type=Path, metavar="DIR", help="start from the safetensors in this folder")
    add("--perf-commit", metavar="SHA", help="commit of the measured tree, where there is no git")
    add("--perf-plant", metavar="FAULT", help="break every run on purpose, such as slow_step=0.05 or hang@1")


def settings(config: pytest.Config) -> Settings:
    """The options as settings. Raises ValueError with the option's name and the cure."""
    option = config.getoption
    checkpoint: Path | None = option("perf_checkpoint")
    if checkpoint is not None and not any(checkpoint.glob("*.safetensors")):
        raise ValueError(f"--perf-checkpoint {checkpoint}: no folder with *.safetensors of a Hugging Face model")
    timeout_s: float = option("perf_timeout")
    if not timeout_s > 0:
        raise ValueError(f"--perf-timeout {timeout_s:g}: must be more than 0 seconds")
    return Settings(
        matrix=option("perf_matrix"),
        plan=SamplingPlan(
            warmup_steps=option("perf_warmup"),
            timed_steps=option("perf_steps"),
            runs=option("perf_runs"),
            checkpoint=str(checkpoint.resolve()) if checkpoint else None,
        ),
        baselines=option("perf_baselines"),
        state=option("perf_state"),
        deadline_s=timeout_s,
        keep_provisional=option("perf_provisional"),
        fault=Fault.parse(option("perf_plant")) if option("perf_plant") else None,
        commit=option("perf_commit"),
    )


def allowed(config: pytest.Config) -> frozenset[Outcome]:
    """Outcomes of --perf-allow. Raises ValueError for an unknown one."""
    names = [name.strip() for name in config.getoption("perf_allow").split(",") if name.strip()]
    if unknown := [name for name in names if name not in ALLOWABLE]:
        raise ValueError(f"--perf-allow {unknown[0]}: not an outcome without a verdict; known: {', '.join(ALLOWABLE)}")
    return frozenset(ALLOWABLE[name] for name in names)
