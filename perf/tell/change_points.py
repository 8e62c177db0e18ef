"""What changed over test runs: the level of a metric, as apache-otava finds it, and the environment.

Otava (the optional extra `history`) looks for E-divisive means (Matteson and James, "A Nonparametric Approach for
Multiple Change Point Analysis of Multivariate Data", 2014) in windows, tests each by Student's t and merges weak ones
(Fleming and others, "Hunter: Using Change Point Detection to Hunt for Performance Regressions", 2023). What it finds is
shown and judges nothing.

Version 0.8.0 asks for exactly numpy 2.2.0, for an older scipy than ours and for clients of services that its command
line talks to. What is used here needs numpy and scipy alone and gives the same with numpy 2.4.6 and scipy 1.17.1, so it
is installed without its dependencies and changes nothing of what is measured: `GET_OTAVA` says how.
"""

import itertools
from collections.abc import Sequence

from perf.tell.history import COMMIT, Series, in_time
from strategies.value import Value

SIGNIFICANCE = 1e-3
"""A change point's p-value lies below this."""
LEAST_CHANGE = 0.01
"""Smallest step of a change point, as a fraction."""
WINDOW = 50
"""Test runs that are searched at a time; otava's own default."""
LEAST_POINTS = 5
"""With fewer, nothing but values that repeat to the byte could be significant."""
GET_OTAVA = "change points need apache-otava: pip install scipy, then pip install --no-deps 'apache-otava<0.9'"


class Change(Value, frozen=True, kw_only=True):
    """What was different from this test run on."""

    run_id: str
    texts: tuple[str, ...]
    """Each `name old -> new`."""


class ChangePoint(Value, frozen=True, kw_only=True):
    """Where the level of a series changed."""

    run_id: str
    """The first test run on the new level."""
    old: float
    new: float
    """Means of the levels before and after, each up to the next change point."""
    change: float
    """(new - old) / old."""
    p_value: float


def change_points(series: Series) -> tuple[ChangePoint, ...] | None:
    """Where the level changed: significant at p < .001 and a step of at least 1 %. None without apache-otava.

    A slow drift is a row of small steps, and is told as one or several change points on its way. On noise alone a
    point is found in about one of fifty series of 30 test runs, one of twenty of 60, where the noise is 2 %.
    """
    if len(series.points) < LEAST_POINTS:
        return ()
    try:
        from otava.analysis import compute_change_points
    except ImportError:
        return None
    # A list: otava ignores the bounds of its windows where it is given an array.
    values = [point.median for point in series.points]
    found, _ = compute_change_points(values, window_len=WINDOW, max_pvalue=SIGNIFICANCE, min_magnitude=LEAST_CHANGE)
    return tuple(
        ChangePoint(
            run_id=series.points[int(one.index)].run_id,
            old=float(one.stats.mean_1),
            new=float(one.stats.mean_2),
            change=float(one.stats.mean_2 / one.stats.mean_1 - 1),
            p_value=float(one.stats.pvalue),
        )
        for one in found
    )


def changes(lines: Sequence[Series], *, commits: bool = False) -> tuple[Change, ...]:
    """What changed between one test run and the next over the lines of a chart: environment and recipe.

    Args:
        lines: of one cell, machine and metric.
        commits: also tell each change of the commit, or of whether there were uncommitted changes.
    """
    visits = in_time(lines)
    found = []
    for (old, old_recipe), (new, new_recipe) in itertools.pairwise(visits):
        texts = [f"recipe {text}" for text in old_recipe.differences(new_recipe)]
        for name in dict.fromkeys((*old.environment, *new.environment)):
            before, after = (point.environment.get(name, "unset") for point in (old, new))
            if before != after and (commits or name != COMMIT):
                texts.append(f"{name} {before} -> {after}")
        if texts:
            found.append(Change(run_id=new.run_id, texts=tuple(texts)))
    return tuple(found)
