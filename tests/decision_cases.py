"""Ten thousand made-up cells for the sequential rule: each a baseline, fresh runs, and pairs with a reference.

Drawn from `random.Random` alone, whose stream is the same in every version of Python. What an independent reference
decided of each, once, lies in data/decisions.txt: outcome, fresh runs outside of pairs, change.
"""

import random
from dataclasses import dataclass

SPREADS = (0.001, 0.003, 0.007, 0.015, 0.03)
CHANGES = (0.0, 0.0, 0.0, 0.01, 0.015, 0.02, 0.025, 0.03, 0.05, 0.1, -0.03, -0.08)
DRIFTS = (0.0, 0.0, 0.01, 0.02)
NUM_CASES = 10_000
MOST_RUNS, MOST_PAIRS = 9, 6


@dataclass(frozen=True, kw_only=True)
class DecisionCase:
    """Levels: logs of step times."""

    nights: tuple[tuple[float, ...], ...]
    runs: tuple[float, ...]
    pairs: tuple[tuple[float, float], ...]
    has_reference: bool


def decision_cases() -> list[DecisionCase]:
    source = random.Random(20261130)
    return [_case(source) for _ in range(NUM_CASES)]


def _case(source: random.Random) -> DecisionCase:
    sd, change, drift = source.choice(SPREADS), source.choice(CHANGES), source.choice(DRIFTS)

    def level(moved: float) -> float:
        return moved + sd * (sum(source.random() for _ in range(12)) - 6)

    num_nights = 3 + int(4 * source.random())
    return DecisionCase(
        nights=tuple(tuple(level(0.0) for _ in range(3)) for _ in range(num_nights)),
        runs=tuple(level(change + drift) for _ in range(MOST_RUNS)),
        pairs=tuple((level(drift), level(change + drift)) for _ in range(MOST_PAIRS)),
        has_reference=source.random() < 0.5,
    )
