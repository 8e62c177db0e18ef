"""docs/strategies.md tells of every strategy, and its counts are those that every run is checked against."""

import re

import pytest

from perf.baseline import INVARIANTS, Invariants, read
from perf.connection import ROOT
from perf.matrix import smoke
from perf.suite import BASELINES
from strategies.spec import Mode, StrategyName

PAGE = (ROOT / "docs" / "strategies.md").read_text(encoding="utf-8")
CELLS = [of for of in smoke() if of.mode is Mode.EAGER and of.strategy is not StrategyName.SINGLE]


@pytest.mark.parametrize("of", CELLS, ids=lambda of: of.strategy)
def test_counts_are_the_recorded_ones(of):
    (ledger,) = read(BASELINES / INVARIANTS / f"{of.id}.json", Invariants).ledger
    told = "; ".join(f"{e.op} over `{e.axis}` {e.count} x, {e.bytes:,}" for e in ledger.entries)
    assert f"| `{of.strategy}` | {told} |" in PAGE


def test_every_strategy_has_its_row():
    named = re.findall(r"^\| `([a-z0-9_]+)` \|", PAGE, re.MULTILINE)
    assert set(StrategyName) <= set(named)
