"""The breaker: when many cells of a test run moved together, the machine is asked before any cell is blamed.

A driver, a power cap or a neighbour moves all cells; so can a new torch. Which it was, only a reference build on the
same machine can tell: where there is one, the quietest cells are compared beside it; where these are not slower, the
quietest of the suspicious ones too, since cells that did not move say nothing of what is slow, such as a compiler.
"""

import math
import statistics
from collections.abc import Sequence

from perf.facts.stats import standard_error
from strategies.value import Value

LEAST_CELLS = 4
"""Fewer are no crowd: a single slow cell is half of two."""
SUSPICIOUS_SHARE = 0.25
MEDIAN_CHANGE = 0.015
DRIFT_ERRORS = 3.0
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
    suspicious_beside: float | None = None
    """The same of the quietest suspicious cells; None where the others have told enough."""
    control: str = ""
    """Cell that was measured first, and once more before any suspicious one."""
    drift: float = 0.0
    """Log change of the control cell between these two, where it is more than noise."""

    @property
    def is_common(self) -> bool:
        """Whether cells moved together; else only the control cell did, in time."""
        return self.num_suspicious > SUSPICIOUS_SHARE * self.num_cells or abs(self.change) > MEDIAN_CHANGE

    @property
    def size(self) -> float:
        """Log change that is the machine's: to be taken off every suspicious cell's.

        Never below 0: that others became faster makes no cell slower.
        """
        if self.is_the_build or self.is_part_of_the_build:
            return 0.0
        return max(0.0, self.change - (self.beside or 0.0) if self.is_common else self.drift)

    @property
    def is_the_build(self) -> bool:
        """Whether the reference build, on this machine and now, is as much faster."""
        return self.beside is not None and self.beside > MEDIAN_CHANGE

    @property
    def is_part_of_the_build(self) -> bool:
        """Whether only the suspicious cells are slower beside it: each has to be compared then."""
        return not self.is_the_build and self.suspicious_beside is not None and self.suspicious_beside > MEDIAN_CHANGE

    @property
    def text(self) -> str:
        """One sentence for people."""
        drifted = f"{self.control} moved {_signed(self.drift)} while the suite was measured" if self.drift else ""
        if not self.is_common:
            return f"ENVIRONMENT: the machine drifted: {drifted}"
        moved = f"{self.num_suspicious} of {self.num_cells} cells are suspicious, the median moved"
        moved = "; ".join(filter(None, [f"{moved} {_signed(self.change)}", drifted]))
        if self.beside is None:
            return (
                f"ENVIRONMENT: {moved}; a build that was good (--perf-reference) would tell the build from the machine"
            )
        said = f"{moved}; beside the reference build {_signed(self.beside)}"
        if self.suspicious_beside is not None:
            said += f", the suspicious cells {_signed(self.suspicious_beside)}"
        if self.is_part_of_the_build:
            return f"SLOWER IN PART: {said}"
        return f"{'SLOWER EVERYWHERE' if self.is_the_build else 'ENVIRONMENT'}: {said}"


def tripped(screens: Sequence[Screen], *, control: str = "", drift: float = 0.0) -> Shift | None:
    """The move that these first looks have in common, or the drift of the control cell; None: each moved on its own."""
    if len(screens) < LEAST_CELLS:
        return None
    shift = Shift(
        num_cells=len(screens),
        num_suspicious=sum(screen.suspicious for screen in screens),
        change=statistics.median(screen.change for screen in screens),
        control=control,
        drift=drift,
    )
    return shift if shift.is_common or drift else None


def drift_of(first: Sequence[float], last: Sequence[float], sd: float) -> float:
    """Log change between the levels of two sets of runs of one cell; 0 where noise of this sd explains it."""
    change = statistics.median(last) - statistics.median(first)
    noise = DRIFT_ERRORS * standard_error(sd, len(last), len(first))
    return change if abs(change) > max(MEDIAN_CHANGE, noise) else 0.0


def quietest(screens: Sequence[Screen]) -> list[str]:
    """Names of the cells whose runs differ least."""
    return [screen.cell_id for screen in sorted(screens, key=lambda screen: (screen.sd, screen.cell_id))[:NUM_QUIET]]


def _signed(change: float) -> str:
    """Of a log change."""
    return f"{math.expm1(change) * 100:+.1f} %"
