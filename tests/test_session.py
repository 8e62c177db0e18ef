"""Room perf/session.py: pytest in a process of its own, which no way of ending the tool leaves running."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from perf.measure.connection import ROOT
from perf.session import ending_in_order

SLEEPS = """
import os, time
from pathlib import Path
import pytest

PLACE = Path(__file__).parent


@pytest.fixture
def server():
    yield
    (PLACE / "ended").touch()


def test_sleeps(server):
    (PLACE / "new").write_text(str(os.getpid()))
    (PLACE / "new").rename(PLACE / "pid")
    time.sleep(600)
"""
TOOL = """
import signal, sys
from perf.session import run_pytest
if sys.argv[2] == "deaf":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
sys.exit(run_pytest([f"{sys.argv[1]}/test_sleeps.py", "-c", f"{sys.argv[1]}/empty.ini", "-p", "no:cacheprovider"]))
"""


class Tool:
    """A tool whose pytest sleeps in a test, with something to end after it."""

    def __init__(self, place: Path, kind: str) -> None:
        self._place = place
        (place / "test_sleeps.py").write_text(SLEEPS)
        (place / "empty.ini").write_text("[pytest]\n")
        self.process = subprocess.Popen(
            [sys.executable, "-c", TOOL, str(place), kind], cwd=ROOT, stdout=subprocess.DEVNULL
        )
        assert within(60, (place / "pid").exists)
        self.pytest = psutil.Process(int((place / "pid").read_text()))

    def has_ended(self) -> bool:
        return within(20, lambda: not self.pytest.is_running() or self.pytest.status() == psutil.STATUS_ZOMBIE)

    @property
    def is_in_order(self) -> bool:
        """Whether pytest had time to end what it had started."""
        return (self._place / "ended").exists()


def within(limit_s, happened):
    deadline = time.monotonic() + limit_s
    while not happened() and time.monotonic() < deadline:
        time.sleep(0.05)
    return happened()


@pytest.fixture
def start(tmp_path):
    tools = []

    def start(kind):
        tools.append(Tool(tmp_path, kind))
        return tools[-1]

    yield start
    for tool in tools:
        for process in (tool.process, tool.pytest):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        tool.process.wait()


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_ended_tool_ends_its_pytest_in_order_and_says_which_signal_it_was(start, sent, code):
    tool = start("usual")
    tool.process.send_signal(sent)
    assert tool.process.wait(60) == code
    assert not tool.pytest.is_running()
    assert tool.is_in_order


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child that its parent is gone")
def test_killed_tool_leaves_no_pytest_behind(start):
    tool = start("usual")
    tool.process.kill()
    assert tool.has_ended()
    assert tool.is_in_order


def test_pytest_that_ignores_ctrl_c_is_ended_too(start):
    """As in the background of a script, where the shell has it ignored."""
    tool = start("deaf")
    tool.process.terminate()
    assert tool.process.wait(20) == 143
    assert not tool.pytest.is_running()


def test_handlers_are_as_before_afterwards_and_those_of_others_are_left_alone():
    before = {one: signal.getsignal(one) for one in (signal.SIGHUP, signal.SIGTERM)}
    try:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        with pytest.raises(SystemExit) as ended, ending_in_order():  # noqa: PT012 - the second one is ignored
            os.kill(os.getpid(), signal.SIGHUP)
            try:
                os.kill(os.getpid(), signal.SIGTERM)
            finally:
                os.kill(os.getpid(), signal.SIGTERM)
        assert ended.value.code == 143
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
