"""Intervals on a line, as sorted, disjoint and not empty pairs: union, difference, part within a window.

Of whole numbers, such as nanoseconds, so that lengths add up exactly.
"""

from collections.abc import Iterable

Interval = tuple[int, int]
"""[start, end)."""


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """What at least one of them covers; they may come in any order, overlap, touch and be empty."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if start >= end:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def subtract(minuend: list[Interval], subtrahend: list[Interval]) -> list[Interval]:
    """What the first union covers and the second does not."""
    left: list[Interval] = []
    index = 0
    for start, end in minuend:
        while index < len(subtrahend) and subtrahend[index][1] <= start:
            index += 1
        at = index
        while at < len(subtrahend) and subtrahend[at][0] < end:
            if start < subtrahend[at][0]:
                left.append((start, subtrahend[at][0]))
            start = max(start, subtrahend[at][1])
            at += 1
        if start < end:
            left.append((start, end))
    return left


def within(intervals: list[Interval], window: Interval) -> list[Interval]:
    """The part of a union that lies in a window."""
    low, high = window
    return [(max(start, low), min(end, high)) for start, end in intervals if max(start, low) < min(end, high)]


def length(intervals: Iterable[Interval]) -> int:
    return sum(end - start for start, end in intervals)
