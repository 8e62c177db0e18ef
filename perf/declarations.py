"""The `--perf-...` options of pytest, as `pytest --help` shows them."""

from collections.abc import Callable
from pathlib import Path

import pytest

from perf.facts.cell import SamplingPlan
from perf.facts.matrix import NAMED
from perf.facts.outcome import FAILURES, VERDICTS, Outcome
from perf.judge.rule import PRESETS
from perf.judge.selftest import SLOWDOWNS
from perf.measure.connection import ROOT
from perf.settings import BASELINES, STATE

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
    add(
        "--perf-warmup",
        type=int,
        default=plan.warmup_steps,
        metavar="N",
        help="warm-up steps (default: %(default)s; a GPU takes 10 at least)",
    )
    add("--perf-timeout", type=float, default=600.0, metavar="S", help="most seconds of one run (default: %(default)g)")
    add("--perf-checkpoint", type=Path, metavar="DIR", help="start from the safetensors in this folder")
    _add_comparisons(add)
    add("--perf-commit", metavar="SHA", help="commit of the measured tree, where there is no git")
    fault = "break every run on purpose: slow_step=0.05, hang@1; a wrong kind lists all"
    add("--perf-plant", metavar="FAULT", help=fault)


def _add_comparisons(add: Callable[..., None]) -> None:
    """How cells are judged and beside what."""
    add("--perf-preset", default="default", metavar="NAME", help=f"tolerances: {', '.join(PRESETS)} (default: default)")
    add(
        "--perf-ab",
        metavar="REF",
        help="compare every cell side by side with this build, in pairs, without baselines: a git ref, a folder with "
        "strategies/, or a python interpreter",
    )
    add("--perf-candidate", metavar="REF", help="with --perf-ab: compare this build, instead of this checkout")
    add(
        "--perf-ab-env",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a variable of this build alone, such as NCCL_P2P_DISABLE=1; without --perf-ab, compared with its absence",
    )
    add(
        "--perf-reference", metavar="REF", help="a build that was good: suspicious cells are compared with it, in pairs"
    )
    add("--perf-pairs", type=int, metavar="N", help="pairs of a comparison side by side (default: by the cell's noise)")
    add("--perf-no-evidence", action="store_true", help="do not run regressed cells once more under a profiler")
    add("--perf-profile", action="store_true", help="run each cell once more under a profiler, not only regressed ones")
    add("--perf-time-budget", metavar="TIME", help="such as 2h: cells that would not fit any more are NOT_RUN")
    add("--perf-seed", type=int, metavar="N", help="of the random order of the cells (default: another one each time)")
    add("--perf-in-order", action="store_true", help="measure the cells in the order of the matrix")
    add("--perf-soak", type=int, metavar="N", help="one long run of N timed steps for each cell")
    add("--perf-selftest", action="store_true", help="measure the gate itself: how often is it red, by what is planted")
    add(
        "--perf-selftest-runs",
        type=int,
        default=10,
        metavar="N",
        help="runs with each fault, twice as many without (default: %(default)s)",
    )
    add(
        "--perf-selftest-slowdowns",
        default=",".join(map(str, SLOWDOWNS)),
        metavar="FRACTIONS",
        help="planted slowdowns, the largest of which must be found (default: %(default)s)",
    )
