"""The breaker: when many cells of a test run moved together, the machine is asked before any cell is blamed.

A driver, a power cap or a neighbour moves all cells; so can a new torch. Which it was, only a reference build on the
same machine can tell: where there is one, the quietest cells are compared beside it.
"""

import math
import statistics
from collections.abc import Sequence

from strategies.value import Value

LEAST_CELLS = 4
"""Fewer are no crowd: a single slow cell is half of two."""
SUSPICIOUS_SHARE = 0.25
MEDIAN_CHANGE = 0.015
NUM_QUIET = 4
"""Cells that are compared beside the reference."""


class Screen(Value, frozen=True, kw_only=True):
    """What the first look at a cell showed."""

    cell_id: str
    change: float
    """Of the log of the step time, against its baseline."""
    suspicious: bool
    sd: float
    """Between runs, of its baseline."""


class Shift(Value, frozen=True, kw_only=True):
    """A move of the whole suite."""

    num_cells: int
    num_suspicious: int
    change: float
    """Median log change of the step time over the cells."""
    beside: float | None = None
    """Median log change of the quietest cells beside a reference build; None where there is none."""

    @property
    def is_the_build(self) -> bool:
        """Whether the reference build, on this machine and now, is as much faster."""
        return self.beside is not None and self.beside > MEDIAN_CHANGE

    @property
    def text(self) -> str:
        """One sentence for people."""
        moved = (
            f"{self.num_suspicious} of {self.num_cells} cells are suspicious, the median moved {_signed(self.change)}"
        )
        if self.beside is None:
            return (
                f"ENVIRONMENT: {moved}; a build that was good (--perf-reference) would tell the build from the machine"
            )
        what = "SLOWER EVERYWHERE" if self.is_the_build else "ENVIRONMENT"
        return f"{what}: {moved}; beside the reference build {_signed(self.beside)}"


def tripped(screens: Sequence[Screen]) -> Shift | None:
    """The move that these first looks have in common, or None where cells moved each on its own."""
    if len(screens) < LEAST_CELLS:
        return None
    change = statistics.median(screen.change for screen in screens)
    num_suspicious = sum(screen.suspicious for screen in screens)
    if num_suspicious <= SUSPICIOUS_SHARE * len(screens) and abs(change) <= MEDIAN_CHANGE:
        return None
    return Shift(num_cells=len(screens), num_suspicious=num_suspicious, change=change)


def quietest(screens: Sequence[Screen]) -> list[str]:
    """Names of the cells whose runs differ least."""
    return [screen.cell_id for screen in sorted(screens, key=lambda screen: (screen.sd, screen.cell_id))[:NUM_QUIET]]


def _signed(change: float) -> str:
    """Of a log change."""
    return f"{math.expm1(change) * 100:+.1f} %"
