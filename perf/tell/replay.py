"""pytest-benchmark as a view: the recorded step times, replayed into its fixture through its public `timer`.

pytest-benchmark never measures here and never judges; its tables, histograms and --benchmark-json show our steps.
"""

from collections.abc import Iterator, Sequence
from itertools import chain, repeat
from typing import Any


class ReplayClock:
    """A timer that returns the borders of recorded steps: started before a step, read again after it."""

    def __init__(self) -> None:
        self._borders: Iterator[float] = repeat(0.0)

    def load(self, step_times_s: Sequence[float]) -> None:
        """Makes the next reads those of these steps, one after the other from 0."""
        borders, now = [], 0.0
        for step_time_s in step_times_s:
            borders += [now, now + step_time_s]
            now += step_time_s
        self._borders = chain(borders, repeat(now))

    def __call__(self) -> float:
        return next(self._borders)


CLOCK = ReplayClock()
"""The timer of every cell's `benchmark` fixture."""


def replay(benchmark: Any, step_times_s: Sequence[float], extra_info: dict[str, Any]) -> None:
    """Shows recorded steps to a `benchmark` fixture as its rounds. Nothing to show: the fixture is left alone."""
    if not step_times_s:
        return
    CLOCK.load(step_times_s)
    benchmark.extra_info.update(extra_info)
    benchmark.pedantic(lambda: None, rounds=len(step_times_s), iterations=1)
