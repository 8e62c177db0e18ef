"""A test run's time budget: which cells still fit, by what they took before."""

import math
import re
import time
from collections.abc import Callable
from statistics import median


def seconds(text: str) -> float:
    """From `2h`, `90m`, `1h30m`, `45s` or a number of seconds. Raises ValueError with the forms."""
    match = re.fullmatch(r"(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s?)?", text.strip())
    parts = [float(part or 0) for part in match.groups()] if match else [0.0]
    total_s = sum(part * unit for part, unit in zip(parts, (3600, 60, 1), strict=True)) if match else 0.0
    if not 0 < total_s < math.inf:
        raise ValueError(f"time budget {text!r}: write 2h, 90m, 1h30m or 45s")
    return total_s


def duration(value_s: float) -> str:
    """`1:02:03` or `2:03`."""
    minutes, rest_s = divmod(round(value_s), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest_s:02d}" if hours else f"{minutes}:{rest_s:02d}"


class Budget:
    """Counts from its making.

    Args:
        known: cell id -> seconds that the cell's runs will take, by earlier ones, or None.
        profiles: whether every cell is run once more under a profiler.
    """

    def __init__(self, total_s: float, known: Callable[[str], float | None], *, profiles: bool = False) -> None:
        self._total_s = total_s
        self._known = known
        self._profiles = profiles
        self._profiled_s: list[float] = []
        self._begun = time.monotonic()
        self._took: list[float] = []
        self._reserved_s = 0.0

    def took(self, cell_s: float) -> None:
        """Notes what a cell of this test run took."""
        self._took.append(cell_s)

    def profiled(self, profile_s: float) -> None:
        """Notes what a profiled run of a cell took."""
        self._profiled_s.append(profile_s)

    def reserve(self, rerun_s: float) -> None:
        """Keeps time for a cell that has to be looked at again."""
        self._reserved_s += rerun_s

    def exceeded_by(self, cell_id: str) -> str | None:
        """Why a cell does not fit any more, or None. The first cell of an unknown length always does."""
        used_s = time.monotonic() - self._begun
        cell_s = self._known(cell_id)
        if cell_s is None and not self._took:
            return None
        cell_s = median(self._took) if cell_s is None else cell_s
        if self._profiles and self._profiled_s:
            cell_s += median(self._profiled_s)
        if used_s + self._reserved_s + cell_s <= self._total_s:
            return None
        kept = f", {duration(self._reserved_s)} are kept for reruns" if self._reserved_s else ""
        return (
            f"not run: {duration(used_s)} of the time budget {duration(self._total_s)} are used{kept}, "
            f"this cell takes about {duration(cell_s)}"
        )
