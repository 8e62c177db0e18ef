"""Test runs to be approved, and the fixtures of the tests of it."""

from pathlib import Path

import pytest

from perf.facts.cell import Cell
from perf.facts.record import RunRecord
from perf.tell.results import Manifest, Results
from strategies.spec import StrategyName
from tests import nodes
from tests.factory import PLAN, cell, run_record
from tools.approve import main

DDP, FSDP2 = cell(), cell(StrategyName.FSDP2)


def results(folder: Path, *cells: Cell, run_id: str = "2026-11-29T02-00-00", ran: dict[str, list[RunRecord]]) -> Path:
    made = Results(folder / run_id)
    manifest = Manifest(run_id=run_id, started_at="2026-11-29T02:00:00+00:00", matrix="smoke", plan=PLAN, cells=cells)
    made.write_manifest(manifest)
    for runs in ran.values():
        for run in runs:
            made.write_run(run)
    return made.folder


def runs_of(of: Cell, step_time_s: float = 0.1) -> list[RunRecord]:
    return [run_record(of, index=index, step_time_s=step_time_s) for index in range(3)]


def files(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in sorted(root.rglob("*.json"))}


@pytest.fixture
def root(tmp_path) -> Path:
    return tmp_path / "baselines"


@pytest.fixture
def one_night(tmp_path) -> Path:
    return results(tmp_path, DDP, FSDP2, ran={DDP.id: runs_of(DDP)})


def approve(root: Path, *arguments: object) -> int:
    return main([*map(str, arguments), "--baselines", str(root)])


CEILINGS = f"ceilings/{nodes.H200S.key}.json"


def with_preflight(night: Path, preflight=None) -> Path:
    Results(night).write_preflight(preflight or nodes.preflight())
    return night
