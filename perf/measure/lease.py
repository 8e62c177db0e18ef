"""The lease of the node: held while a cell is timed, so that no two timed cells share it, whoever started them."""

import contextlib
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from filelock import FileLock, Timeout

from perf.facts import jsonfile
from strategies.value import Value

NODE = Path(tempfile.gettempdir()) / "shardmark" / "node.lock"
"""In a folder that is everybody's: in the temporary one itself, nobody may open what another user made."""
ASK_EVERY_S = 1.0


class Owner(Value, frozen=True, kw_only=True):
    """Who holds a lease."""

    pid: int
    since_s: float
    """Seconds since the epoch."""
    what: str


class Lease:
    """A lock on a file, with its owner's name beside it.

    The operating system drops the lock of a process that dies, so a dead owner's lease is free at once; what it left in
    the owner's file is overwritten by the next.

    Args:
        what: what the owner does with the node, for those who wait.
        tell: called every second with who is being waited for, and how long they have held the node.
    """

    def __init__(self, what: str, tell: Callable[[str], None], *, path: Path = NODE) -> None:
        self._what = what
        self._tell = tell
        self._lock = FileLock(path, mode=0o666)
        self._owner = path.with_suffix(".owner")

    def __enter__(self) -> Self:
        while True:
            try:
                _make_common(Path(self._lock.lock_file).parent)
                self._lock.acquire(timeout=ASK_EVERY_S)
                break
            except Timeout:
                self._tell(self._whom())
            except PermissionError as error:
                raise ValueError(
                    f"cannot lease the node: {error}; {self._lock.lock_file} and its folder must be writable for "
                    "all who measure here; their owner may delete them while nothing runs"
                ) from error
        with contextlib.suppress(OSError):  # another user's file, left by a dead owner: the lease holds without a name
            jsonfile.write(self._owner, Owner(pid=os.getpid(), since_s=time.time(), what=self._what))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):
            self._owner.unlink(missing_ok=True)
        self._lock.release()

    def _whom(self) -> str:
        try:
            owner = jsonfile.read(self._owner, Owner)
        except (OSError, ValueError):
            return "waiting for the node"
        held_s = time.time() - owner.since_s
        return f"waiting for process {owner.pid}, which has held the node for {held_s:.0f} s: {owner.what}"


def _make_common(folder: Path) -> None:
    """Lets every user of the machine write there, whatever the first one's umask."""
    with contextlib.suppress(FileExistsError):
        folder.mkdir()
        folder.chmod(0o777)
