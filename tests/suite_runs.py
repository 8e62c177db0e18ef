"""Runs of the real suite in a pytest of their own, for the tests of the plugin and of what comes after it."""

import random
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from msgspec.structs import replace

from perf.facts.outcome import Outcome
from perf.judge import baseline as baselines
from perf.judge.baseline import Baseline
from perf.measure.connection import ROOT
from perf.tell.results import Results

MATRIX = """
[[cells]]
strategy = "single"
size = "tiny"
mode = "eager"
world_size = 1
link = "gloo"

[[cells]]
strategy = "ddp"
size = "tiny"
mode = "eager"
world_size = 2
link = "gloo"
"""
SINGLE, DDP = "single-tiny-eager-w1-gloo", "ddp-tiny-eager-w2-gloo"
PLAN = ("--perf-warmup=2", "--perf-steps=4", "--perf-runs=3")


@dataclass(frozen=True, kw_only=True)
class Outcomes:
    """How one pytest over the suite ended."""

    exit_code: int
    text: str
    results: Results | None

    @property
    def by_cell(self) -> dict[str, Outcome]:
        assert self.results is not None
        return {verdict.cell_id: verdict.outcome for verdict in self.results.verdicts()}


class SuiteRuns:
    """A place with a matrix, baselines, state and results of its own."""

    def __init__(self, pytester: pytest.Pytester, recorded_state: Path) -> None:
        self._pytester = pytester
        self._recorded_state = recorded_state
        self.root = pytester.path
        self.baselines, self.state = self.root / "baselines", self.root / "state"
        self.baselines.mkdir()
        self.matrix = self.root / "cells.toml"
        self.matrix.write_text(MATRIX)

    def run(self, *options: str, plan: tuple[str, ...] = PLAN, cache: bool = True, evidence: bool = False) -> Outcomes:
        """`pytest perf` with these options; results are those of the test run that it made, if any."""
        before = set(self._folders())
        arguments = self._arguments(*options, plan=plan, cache=cache, evidence=evidence)
        result = self._pytester.runpytest_subprocess(*arguments, timeout=300)
        new = sorted(set(self._folders()) - before)
        text = result.stdout.str() + result.stderr.str()
        return Outcomes(exit_code=int(result.ret), text=text, results=Results(new[0]) if new else None)

    def command(self, *options: str) -> list[str]:
        """The same as a command line, for a process that the test itself ends."""
        return [sys.executable, "-m", "pytest", *self._arguments(*options, plan=PLAN, cache=False, evidence=False)]

    def _arguments(self, *options: str, plan: tuple[str, ...], cache: bool, evidence: bool) -> list[str]:
        return [
            str(ROOT / "perf"),
            f"--rootdir={ROOT}",
            f"--config-file={ROOT / 'pyproject.toml'}",
            f"--perf-matrix={self.matrix}",
            f"--perf-results={self.root / 'results'}",
            f"--perf-baselines={self.baselines}",
            f"--perf-state={self.state}",
            *(("-o", f"cache_dir={self.root / 'cache'}") if cache else ("-p", "no:cacheprovider")),
            *(() if evidence else ("--perf-no-evidence",)),
            *plan,
            *options,
        ]

    def record(self, *options: str) -> Outcomes:
        """A first run that leaves local provisional baselines."""
        outcomes = self.run("--perf-provisional", "--perf-allow=no-baseline", *options)
        assert outcomes.exit_code == 0, outcomes.text
        return outcomes

    def be_recorded(self) -> None:
        """As after `record`, which is really run by the first test that asks."""
        if not self._recorded_state.exists():
            self.record()
            shutil.copytree(self.state / "baselines", self._recorded_state)
        else:
            shutil.copytree(self._recorded_state, self.state / "baselines")

    def be_steady(self, cell_id: str, *, factor: float = 1.0) -> None:
        """Makes a cell's baseline what three nights without noise would have left, at `factor` times its step time."""
        path = self.baseline_path(cell_id)
        old = baselines.read(path, Baseline)
        (night,) = old.nights
        step_time_s = factor * night.runs[0].step_times_s[0]
        runs = tuple(replace(run, step_times_s=(step_time_s,) * len(run.step_times_s)) for run in night.runs)
        nights = (replace(night, origin=replace(night.origin, run_id=f"night {n}"), runs=runs) for n in range(3))
        baselines.write(path.parent.parent, replace(old, nights=tuple(nights)))

    def baseline_path(self, cell_id: str) -> Path:
        (path,) = (path for path in self.state.glob(f"baselines/*/{cell_id}.json") if path.parent.name != "invariants")
        return path

    def _folders(self) -> list[Path]:
        folder = self.root / "results"
        return list(folder.iterdir()) if folder.exists() else []


def seed_that_begins_with(first: str) -> int:
    """Of an order of the two cells of the matrix."""
    for seed in range(100):
        order = [SINGLE, DDP]
        random.Random(seed).shuffle(order)
        if order[0] == first:
            return seed
    raise AssertionError
