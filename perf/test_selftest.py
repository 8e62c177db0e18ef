"""The suite's own proof on this machine, with --perf-selftest: how often the gate is red, by what is planted."""

import pytest

from perf.facts.cell import Cell
from perf.gate import Gate
from perf.plugin import CELLS


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test per cell of the matrix, named by its id."""
    cells = metafunc.config.stash[CELLS]
    metafunc.parametrize("cell", cells, ids=[cell.id for cell in cells])


def test_gate(cell: Cell, gate: Gate) -> None:
    """Nothing planted is never red, ten percent always are, and so is a little more memory."""
    gate.refuse(cell)
    gate.conclude(gate.measure(cell))
