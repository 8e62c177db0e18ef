"""The size of text in a picture, before it is drawn: nothing may be cut off, however long a name is."""

import functools
import math

from matplotlib.font_manager import FontProperties
from matplotlib.textpath import TextPath

LINE = 1.25 / 72
"""Height of a line, in inches for each point of its font; a little more than it takes."""
_SLACK = 1.04
"""What is drawn is fitted to pixels, which makes it a little wider or narrower than its outlines."""


@functools.lru_cache(maxsize=4096)
def width(text: str, points: float, *, bold: bool = False) -> float:
    """Inches that the widest line takes."""
    font = FontProperties(family="DejaVu Sans", weight="bold" if bold else "normal")
    lines = [line for line in text.split("\n") if line.strip()]
    return max((TextPath((0, 0), line, size=points, prop=font).get_extents().width for line in lines), default=0) * (
        _SLACK / 72
    )


def height(text: str, points: float) -> float:
    """Inches that its lines take."""
    return len(text.split("\n")) * points * LINE


def turned(text: str, points: float, degrees: float) -> tuple[float, float]:
    """Width and height in inches of the upright box around text that is turned."""
    angle = math.radians(degrees)
    wide, high = width(text, points), height(text, points)
    return (
        wide * math.cos(angle) + high * math.sin(angle),
        wide * math.sin(angle) + high * math.cos(angle),
    )
