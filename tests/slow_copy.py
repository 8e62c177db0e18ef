"""A copy of `strategies` whose every step takes longer, as a slow commit would make it."""

import shutil
from pathlib import Path

from perf.measure.connection import ROOT

STEP = "    loss = sharded.forward_backward(micro_batches)\n    sharded.step()\n"
SLEEP = "    import time\n\n    time.sleep(0.1)\n"


def copy_strategies(tree: Path) -> Path:
    """`strategies` below `tree`, with nothing that Python or a run left there; its room of the training step."""
    shutil.copytree(ROOT / "strategies", tree / "strategies", ignore=shutil.ignore_patterns("__pycache__"))
    return tree / "strategies" / "sharded.py"


def make_slow(room: Path) -> None:
    """0.1 s longer a step, some five times what a tiny cell takes."""
    text = room.read_text(encoding="utf-8")
    assert text.count(STEP) == 1
    room.write_text(text.replace(STEP, SLEEP + STEP), encoding="utf-8")
