"""A test run in a pytest process of its own, for the doors that start one."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from types import FrameType
from typing import IO, NoReturn

from perf.facts.environment import git_finds_by_place
from perf.measure.connection import ROOT
from perf.measure.process_tree import end_with_parent
from perf.measure.reference import remove_left_behind

ENDING_S = 30.0
"""How long pytest may take to end its servers after Ctrl-C."""


@contextlib.contextmanager
def ending_in_order() -> Iterator[None]:
    """SIGTERM and SIGHUP raise SystemExit(128 + number) inside, so that all is cleaned up as after Ctrl-C.

    One that this process was started to ignore, as by nohup, or that somebody else handles, is left alone.
    """
    is_main = threading.current_thread() is threading.main_thread()
    taken = [one for one in (signal.SIGTERM, signal.SIGHUP) if is_main and signal.getsignal(one) is signal.SIG_DFL]

    def end(number: int, frame: FrameType | None) -> NoReturn:
        for one in taken:  # `timeout` tells twice, and the second one must not stop the cleaning up
            signal.signal(one, signal.SIG_IGN)
        raise SystemExit(128 + number)

    for one in taken:
        signal.signal(one, end)
    try:
        yield
    finally:
        for one in taken:
            signal.signal(one, signal.SIG_DFL)


@ending_in_order()
def run_pytest(arguments: Sequence[str], *, output: IO[str] | None = None) -> int:
    """Runs pytest in this checkout's root, with this interpreter; relative paths are below that root.

    However this process ends, pytest does not outlive it.

    Args:
        output: where its standard output goes, a file of the system; None: where this process has its own.

    Returns:
        pytest's exit code; negative, the number of the signal that ended it.
    """
    command = [sys.executable, "-m", "pytest", *arguments]
    # Ctrl-C, after which pytest ends its servers and removes what it made for a build. It does not hear it where this
    # process was started to ignore it, as a job in the background of a script is.
    is_deaf = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    ending = signal.SIGTERM if is_deaf else signal.SIGINT
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=git_finds_by_place(),
        stdout=output,
        preexec_fn=partial(end_with_parent, os.getpid(), ending),
    ) as process:
        try:
            return process.wait()
        except (KeyboardInterrupt, SystemExit) as reason:
            if isinstance(reason, SystemExit):
                process.send_signal(ending)
            # else the terminal has told pytest as well, which a second time would stop in its cleaning up
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(ENDING_S)
            raise
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
            if process.returncode < 0:
                remove_left_behind()
