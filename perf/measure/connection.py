"""The pytest process' side of a server: starts one, speaks with it, and ends it with all that came from it."""

import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Collection
from pathlib import Path
from typing import IO, Any

import msgspec

from perf.facts.failure import FailureKind, LaunchError
from perf.facts.provenance import Imported
from perf.facts.record import Software

ROOT = Path(__file__).resolve().parent.parent.parent
HELLO_S = 300.0
"""Most seconds that importing torch and transformers may take (10-16 s from a cold disk)."""
POLL_S = 0.1
"""The parent looks at events at most this often: on a small machine its own work would disturb the ranks."""


class Connection:
    """A server process and the pipes to it.

    Args:
        python: interpreter of the server; the ranks import its torch.
        root: source tree whose `strategies` and `perf` the ranks import.
        variables: environment variables that must stand before torch is imported.
        without: names of variables of this process that the server does not get.

    Raises:
        LaunchError: the server cannot import what a rank needs.
    """

    def __init__(self, *, python: str, root: Path, variables: dict[str, str], without: Collection[str] = ()) -> None:
        begun = time.monotonic()
        self._pending = b""
        # Asking NVML whether there are GPUs, torch does not touch CUDA, and its children can.
        without_cuda = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
        inherited = {name: value for name, value in os.environ.items() if name not in without}
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the server
        # In a session of its own, a user's ctrl-C reaches this process alone: the server then ends its ranks in order.
        self._process = subprocess.Popen(
            [python, "-m", "perf.measure.server"],
            cwd=root,
            env=inherited | without_cuda | {"PYTHONPATH": python_path(root)} | variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,
        )
        self.rank_pids: list[int] = []
        """Of the run that goes on."""
        hello = self._hello(python)
        self.scratch = Path(hello["scratch"])
        """Folder of the server's runs."""
        self.software = msgspec.convert(hello["software"], Software)
        self.imported = msgspec.convert(hello["imported"], Imported)
        self.start_up_s = time.monotonic() - begun

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def send(self, request: dict[str, Any]) -> None:
        """Raises LaunchError when the server is gone."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write((json.dumps(request) + "\n").encode())
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._lost() from None

    def events(self) -> list[dict[str, Any]]:
        """The events that have come since the last call. Raises LaunchError when the server is gone."""
        assert self._process.stdout is not None
        fd = self._process.stdout.fileno()
        if not select.select([fd], [], [], 0)[0]:
            if not self.is_alive:
                raise self._lost()  # no end of file: an orphan of a killed server still holds the pipe
            return []
        chunk = os.read(fd, 1 << 16)
        if not chunk:
            raise self._lost()
        *lines, self._pending = (self._pending + chunk).split(b"\n")
        events = [json.loads(line) for line in lines]
        for event in events:
            if event["event"] == "started":
                self.rank_pids = event["pids"]
        return events

    def wait_for(self, name: str, timeout_s: float) -> dict[str, Any] | None:
        """The next event of this name, or None after `timeout_s`; others are dropped."""
        limit = time.monotonic() + timeout_s
        while time.monotonic() < limit:
            for event in self.events():
                if event["event"] == name:
                    return event
            time.sleep(POLL_S)
        return None

    def close(self) -> None:
        """Ends the server and everything that came from it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.close()
        except BrokenPipeError:
            pass
        try:
            self._process.wait(timeout=15.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._errors.close()
        if self._process.returncode != 0:
            self._clean_up()

    def _hello(self, python: str) -> dict[str, Any]:
        try:
            hello = self.wait_for("hello", HELLO_S)
        except LaunchError:
            hello = None
        if hello is not None and "error" not in hello:
            return hello
        self._errors.seek(0)
        reason = (
            hello["error"] if hello else self._errors.read().decode(errors="replace") or f"silent for {HELLO_S:g} s"
        )
        if hello is None:
            self._process.kill()
        self.close()
        raise LaunchError(FailureKind.REFUSED, f"{python} cannot serve ranks; `make perf` makes one that can\n{reason}")

    def _lost(self) -> LaunchError:
        return LaunchError(FailureKind.KILLED, "the server process is gone; was it killed from outside?")

    def _clean_up(self) -> None:
        """After a server that could not: each rank leads a session of its own, with all that it started."""
        for pid in self.rank_pids:
            try:
                os.killpg(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        if hasattr(self, "scratch"):
            shutil.rmtree(self.scratch, ignore_errors=True)


def python_path(root: Path) -> str:
    """PYTHONPATH of a child that imports `root` first, and what this process finds beside it."""
    return os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
