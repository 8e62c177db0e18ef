"""A test run in a pytest process of its own, for the doors that start one."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import IO

from perf.measure.connection import ROOT

ENDING_S = 30.0
"""How long pytest may take to end its servers after Ctrl-C."""
_ABOUT_ANOTHER_REPOSITORY = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX", "GIT_COMMON_DIR")


def run_pytest(arguments: Sequence[str], *, output: IO[str] | None = None) -> int:
    """Runs pytest in this checkout's root, with this interpreter; relative paths are below that root.

    Args:
        output: where its standard output goes, a file of the system; None: where this process has its own.

    Returns:
        pytest's exit code; negative, the number of the signal that ended it.
    """
    command = [sys.executable, "-m", "pytest", *arguments]
    with subprocess.Popen(command, cwd=ROOT, env=git_finds_by_place(), stdout=output) as process:
        try:
            return process.wait()
        except KeyboardInterrupt:
            # The terminal has told pytest as well, which ends its servers and removes what it made for a build.
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(ENDING_S)
            raise
        finally:
            if process.poll() is None:
                process.kill()


def git_finds_by_place() -> dict[str, str]:
    """The environment in which `git -C FOLDER` is about FOLDER, also where git itself has started this process."""
    return {name: value for name, value in os.environ.items() if name not in _ABOUT_ANOTHER_REPOSITORY}
