"""Decay within one long run: whether its last steps took longer than its first ones.

A run that slows down as it goes has fragmented its allocator, leaks what each step then walks over, or meets a GPU that
grows hot. Seen is the step time alone. Memory is recorded as the peak over all timed steps and the GPU's clocks as the
lowest and highest of the run, so that neither tells when it changed: a leak that costs no time shows as a higher peak
than a shorter run of the cell has, or not at all.
"""

import itertools
import math
import statistics
from collections.abc import Sequence

from perf.facts.record import RunRecord
from strategies.value import Value

LEAST_STEPS = 60
"""Timed steps. With fewer, a third of them is too short for a median that stands for it."""
LEAST_CHANGE = 0.01
"""A smaller change is never called one."""
ERRORS = 3.0
"""Standard errors that a change must exceed."""
BLOCKS = 5
"""Into which a third is cut for its standard error."""


class Decay(Value, frozen=True, kw_only=True):
    """The last third of a run's timed steps against the first."""

    num_steps: int
    first_s: float
    """Median step time of the first third, slowest rank."""
    last_s: float
    change: float
    """(last - first) / first."""
    bound: float
    """What the change must exceed to be called one: max(1 %, 3 standard errors of it)."""

    @property
    def slower(self) -> bool:
        """Whether the run slowed down, beyond what its own unrest explains."""
        return self.change > self.bound


def decay(run: RunRecord) -> Decay | None:
    """Compares the thirds; None for a run of fewer than 60 timed steps, or a damaged one.

    The standard error is that of the mean of the medians of consecutive blocks (batch means: Law and Kelton,
    "Simulation Modeling and Analysis"), for steps resemble their neighbours. Of made-up undisturbed runs of 300 steps
    whose neighbours have a correlation of 0.9, an error from single steps calls 20 of 100 slower, this one 3. Of runs
    of 60 such steps it still calls 15: a long run says more. What lasts for a third of a run, such as another user of
    the machine, looks like decay and is no fault of the code: only a change in most runs of a cell speaks of it.
    """
    times_s = run.step_times_s
    uneven = any(len(rank.step_times_s) != len(times_s) for rank in run.ranks)
    if len(times_s) < LEAST_STEPS or uneven or not all(0 < time_s < math.inf for time_s in times_s):
        return None
    third = len(times_s) // 3
    first, last = times_s[:third], times_s[-third:]
    first_s, last_s = statistics.median(first), statistics.median(last)
    error_s = math.sqrt((_variance(first) + _variance(last)) / BLOCKS)
    return Decay(
        num_steps=len(times_s),
        first_s=first_s,
        last_s=last_s,
        change=(last_s - first_s) / first_s,
        bound=max(LEAST_CHANGE, ERRORS * error_s / first_s),
    )


def _variance(times_s: Sequence[float]) -> float:
    """Between the medians of consecutive blocks of nearly equal length."""
    cuts = [len(times_s) * block // BLOCKS for block in range(BLOCKS + 1)]
    return statistics.variance(statistics.median(times_s[start:stop]) for start, stop in itertools.pairwise(cuts))
