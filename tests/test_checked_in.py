"""The files under baselines/: whole, of cells that exist, and recorded with today's recipes."""

from perf.facts.matrix import cells_of, known_cells
from perf.judge.baseline import CEILINGS, INVARIANTS, Baseline, Invariants, RecordedCeilings, read
from perf.settings import BASELINES
from tests.factory import PLAN


def test_checked_in_baselines_are_whole_and_of_known_cells():
    known = known_cells()
    paths = [path for path in BASELINES.rglob("*.json") if path.parent.name not in ("published", CEILINGS)]
    assert paths
    for path in paths:
        kind = Invariants if path.parent.name == INVARIANTS else Baseline
        stored = read(path, kind)
        assert stored.cell_id in known, f"{path}: no matrix has this cell"
        cell = known[stored.cell_id]
        assert not stored.recipe.differences(cell.recipe(cell.plan(PLAN))), f"{path}: recorded with another recipe"


def test_checked_in_ceilings_are_whole_and_of_gpus():
    for path in (BASELINES / CEILINGS).glob("*.json"):
        assert read(path, RecordedCeilings).machine.is_gpu, f"{path}: a CPU is held to no ceilings"


def test_every_smoke_cell_has_invariants():
    assert {path.stem for path in (BASELINES / INVARIANTS).glob("*.json")} >= {of.id for of in cells_of("smoke")}
