"""docs/strategies.md tells of every strategy, and its counts are those that every run is checked against."""

import re

import pytest

from perf.facts.matrix import smoke
from perf.judge.baseline import INVARIANTS, Invariants, read
from perf.measure.connection import ROOT
from perf.settings import BASELINES
from strategies.spec import Mode, StrategyName

PAGE = (ROOT / "docs" / "strategies.md").read_text(encoding="utf-8")
CELLS = [of for of in smoke() if of.mode is Mode.EAGER and of.strategy is not StrategyName.SINGLE]


def row(of):
    """The first rank's collectives; what a router decides, as the sum over the ranks."""
    ledgers = read(BASELINES / INVARIANTS / f"{of.id}.json", Invariants).ledger
    assert len(ledgers) == 1 or of.strategy == StrategyName.EP
    texts = []
    for entries in zip(*(ledger.entries for ledger in ledgers for _ in ledger.ranks), strict=True):
        first, routed = entries[0], (entries[0].op, entries[0].axis) == ("all_to_all", "ep")
        text = f"{first.op} over `{first.axis}` {first.count} x, "
        texts.append(text + (f"{sum(e.bytes for e in entries):,} of all ranks" if routed else f"{first.bytes:,}"))
    return f"| `{of.strategy}` | {'; '.join(texts)} |"


@pytest.mark.parametrize("of", CELLS, ids=lambda of: of.strategy)
def test_counts_are_the_recorded_ones(of):
    assert row(of) in PAGE


def test_every_strategy_has_its_row():
    named = re.findall(r"^\| `([a-z0-9_]+)` \|", PAGE, re.MULTILINE)
    assert set(StrategyName) <= set(named)
