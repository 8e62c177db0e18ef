"""A test run whose runs take as long as a script says, for the tests of what is decided between them.

Everything but the making of a run is the real thing: results, baselines, looks, breaker, verdicts.
"""

import contextlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

import perf.suite
from perf.facts.cell import Cell, SamplingPlan
from perf.facts.failure import LaunchError
from perf.facts.hardware import this_node
from perf.facts.provenance import Imported
from perf.facts.record import RunRecord
from perf.judge import baseline as baselines
from perf.measure.reference import Reference
from perf.settings import Settings
from perf.suite import Suite
from perf.tell.progress import Progress
from perf.tell.results import Manifest, Results
from perf.trials import Trials
from tests import factory

NODE = this_node()
RECORDED_S = 0.1
Script = Callable[[str, int], float]
"""Label of a cell and index of a run -> its step time in seconds; a run that gives no record raises LaunchError."""


def labelled(num_cells: int) -> list[Cell]:
    return [replace(factory.cell(), label=label) for label in "abcdefghijkl"[:num_cells]]


class ScriptedArm:
    """A build whose runs are made up."""

    def __init__(self, name: str, script: Script, *, proves: bool) -> None:
        self.name, self.fault, self.software = name, None, factory.SOFTWARE
        self.source = SimpleNamespace(commit="c0ffee", dirty=False)
        self.made: list[tuple[str, int]] = []
        self.changes: dict[tuple[str, int], dict[str, object]] = {}
        """Label and index -> what is otherwise in the records of the ranks."""
        self._script = script
        self._imported = Imported(strategies=f"/{name}", torch="/torch", digest=name) if proves else None

    def run(self, cell: Cell, index: int, plan: SamplingPlan, *_: object) -> RunRecord:
        self.made.append((cell.label, index))
        env = factory.environment(NODE.machine_for(cell))
        run = factory.run_record(cell, index=index, step_time_s=self._script(cell.label, index), env=env)
        changes = {"imported": self._imported} | self.changes.get((cell.label, index), {})
        run = replace(run, plan=replace(run.plan, runs=plan.runs))
        return replace(factory.change_ranks(run, **changes), arm=self.name if self._imported else None)


class ScriptedRun:
    """One pytest process over the cells of a folder, which may hold runs of an earlier one."""

    def __init__(
        self, root: Path, cells: list[Cell], script: Script, *, reference: Script | None = None, **settings: object
    ) -> None:
        self.cells = cells
        for cell in cells:
            stored = factory.baseline(cell, nights=((RECORDED_S,) * 3,) * 3, machine=NODE.machine_for(cell))
            baselines.write(root / "baselines", stored)
            baselines.write(root / "baselines", factory.invariants(cell))
        options = {"matrix": "smoke", "plan": factory.PLAN, "baselines": root / "baselines", "deadline_s": 60.0}
        options |= {"state": root / "state", "evidence": frozenset()} | settings
        if reference is not None:
            options["reference"] = Reference(said="good", commit="beef")
        self.results = Results(root / "results" / "run")
        manifest = Manifest(
            run_id="run", started_at="2026-11-30", matrix="smoke", plan=factory.PLAN, cells=tuple(cells)
        )
        self.results.write_manifest(manifest)
        self.suite = Suite(Settings(**options), NODE, self.results, Progress(len(cells), None))
        self.candidate = ScriptedArm("candidate", script, proves=reference is not None)
        self.reference = ScriptedArm("reference", reference or script, proves=True)
        self.suite._arms = SimpleNamespace(candidate=self.candidate, reference=lambda: self.reference)
        self.trials = Trials(self.suite)
        self._ended: dict[str, str] = {}

    def go(self) -> dict[str, str]:
        """As the plugin does it: the control cell first, suspicious cells last; label -> outcome or error."""
        control = self.trials.common.choose_control(self.cells)
        order = sorted(self.cells, key=lambda cell: cell != control)
        held = [cell for cell in order if self._ends_at_once(cell) is None]
        for cell in held:
            self._decide(cell)
        self.trials.common.look_back()
        outcomes = {verdict.cell_id: verdict.outcome for verdict in self.results.verdicts()}
        return {cell.label: str(outcomes.get(cell.id, self._ended[cell.label])) for cell in self.cells}

    def _ends_at_once(self, cell: Cell) -> bool | None:
        return None if self.trials.holds(cell) is not None else self._decide(cell)

    def _decide(self, cell: Cell) -> bool:
        self._ended[cell.label] = "NOT_RUN" if self.trials.postponed(cell) else "ERROR"
        if self._ended[cell.label] == "ERROR":
            with contextlib.suppress(LaunchError, ValueError):
                measurement, verdict = self.trials.decide(cell)
                self.suite.conclude(verdict, measurement)
        return True


def go_or_stop(
    folder: Path, build: dict[str, float], reference: dict[str, float], most_runs: int = 999
) -> tuple[dict[str, str], float]:
    """Outcomes and common change where cells are so many percent slower than recorded, on a build and beside another.

    Raises StopIteration, as an interruption, after so many runs.
    """
    left = iter(range(most_runs))

    def counted(percent: dict[str, float]) -> Script:
        def script(label: str, _: int) -> float:
            next(left)
            return RECORDED_S * (1 + percent[label] / 100)

        return script

    run = ScriptedRun(folder, labelled(len(build)), counted(build), reference=counted(reference))
    outcomes, shift = run.go(), run.results.shift()
    assert shift is not None
    return outcomes, shift.change


@pytest.fixture
def alone(monkeypatch):
    """Nothing is timed, so nobody has to wait for the node."""
    monkeypatch.setattr(perf.suite, "Lease", lambda *_: contextlib.nullcontext())
