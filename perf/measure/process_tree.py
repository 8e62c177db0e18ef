"""What the kernel does for a family of processes: a child ends with its parent, orphans come to their grandparent."""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def end_with_parent(parent: int, number: signal.Signals) -> None:
    """This process is sent `number` when its parent ends, even by SIGKILL. Linux only.

    Args:
        parent: as it was before this process was forked: one that is gone already can tell nothing.
    """
    _prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def adopt_orphans() -> None:
    """What descends from this process and loses its parent becomes its child. Linux only."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)
