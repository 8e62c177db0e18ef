"""The parent's side of a run: one request to the server, a deadline, and every rank's record or the reason why not.

Never imports torch. A `Launcher` owns one server process; two launchers can serve two interpreters or two source trees.
"""

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from perf import jsonfile
from perf.failure import FailureKind, LaunchError, RankEnd, RankError, explain
from perf.record import Software

ROOT = Path(__file__).resolve().parent.parent
HELLO_S = 300.0
"""Most seconds that importing torch and transformers may take (10-16 s from a cold disk)."""
LAST_WORDS_S = 3.0
"""How long the other ranks may still speak after one has failed: a victim's error often arrives before the culprit's."""
TEARDOWN_S = 10.0
"""How long a rank may take to end once its record is written."""
POLL_S = 0.1
"""The parent looks at events at most this often: on a small machine its own work would disturb the ranks."""


@dataclass(slots=True)
class Ranks:
    """What is known of a run's ranks while it goes on."""

    world_size: int
    phase: dict[int, str] = field(default_factory=dict)
    exited: dict[int, int] = field(default_factory=dict)
    failed: list[int] = field(default_factory=list)
    """Ranks that ended badly, in order."""

    def take(self, event: dict[str, Any]) -> None:
        if event["event"] == "phase":
            self.phase[event["rank"]] = event["phase"]
        elif event["event"] == "exited":
            self.exited[event["rank"]] = event["code"]
            if event["code"] != 0:
                self.failed.append(event["rank"])

    @property
    def all_recorded(self) -> bool:
        return all(self.phase.get(rank) == "recorded" for rank in range(self.world_size))

    @property
    def all_exited(self) -> bool:
        return len(self.exited) == self.world_size


class Launcher:
    """A running server and the one door to it.

    Args:
        python: interpreter of the server; the ranks import its torch.
        root: source tree whose `strategies` and `perf` the ranks import.
        variables: environment variables that must stand before torch is imported.
    """

    def __init__(
        self, *, python: str = sys.executable, root: Path = ROOT, variables: dict[str, str] | None = None
    ) -> None:
        self._command = [python, "-m", "perf.server"]
        self._root = root
        self._variables = variables or {}
        self._process: subprocess.Popen[bytes] | None = None
        self._pending = b""
        self._scratch: Path | None = None
        self._rank_pids: list[int] = []
        self.software: Software | None = None
        """Versions that the ranks import; known once the server runs."""
        self.start_up_s = 0.0
        """Seconds that starting servers has taken so far."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def start(self) -> None:
        """Starts the server if none runs. Raises LaunchError when it cannot import what a rank needs."""
        if self._process is not None and self._process.poll() is None:
            return
        self.close()
        begun = time.monotonic()
        # A user's ctrl-C must reach this process alone: the server then ends its ranks in order.
        self._process = subprocess.Popen(
            self._command,
            cwd=self._root,
            env=os.environ | {"PYTHONPATH": str(self._root)} | self._variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        hello = self._wait_for("hello", HELLO_S)
        if hello is None or "error" in hello:
            reason = hello["error"] if hello else f"no answer within {HELLO_S:g} s"
            self.close()
            raise LaunchError(
                FailureKind.REFUSED, f"{self._command[0]} cannot serve ranks; `make perf` sets one up\n{reason}"
            )
        self._scratch = Path(hello["scratch"])
        self.software = msgspec.convert(hello["software"], Software)
        self.start_up_s += time.monotonic() - begun

    def run(
        self,
        entry: str,
        payload: object,
        *,
        world_size: int,
        record: type[Any],
        deadline_s: float,
        variables: dict[str, str] | None = None,
        on_event: Callable[[dict[str, Any]], None] = lambda event: None,
    ) -> tuple[list[Any], bool]:
        """Runs `entry` in fresh ranks and reads the record that each one writes.

        Args:
            entry: `module:function`, called as function(payload, context) in every rank.
            record: type of the records `record-<rank>.json`.
            variables: set in the ranks before `entry` is imported.

        Returns:
            The records in rank order, and whether the ranks had to be killed after all had recorded.

        Raises:
            LaunchError: no record of every rank; all processes of the run are gone.
        """
        self.start()
        assert self._scratch is not None
        folder = self._scratch / uuid.uuid4().hex
        ranks = Ranks(world_size)
        request = {
            "op": "run",
            "entry": entry,
            "payload": msgspec.to_builtins(payload),
            "world_size": world_size,
            "env": loopback_variables() | (variables or {}),
            "folder": str(folder),
        }
        try:
            self._send(request)
            self._follow(ranks, time.monotonic() + deadline_s, on_event)
            if not ranks.all_recorded:
                raise explain(self._ends(ranks, folder), deadline_s=deadline_s)
            records = [jsonfile.read(folder / f"record-{rank}.json", record) for rank in range(world_size)]
            return records, not ranks.all_exited
        finally:
            self._end_run(folder)

    def _follow(self, ranks: Ranks, deadline: float, on_event: Callable[[dict[str, Any]], None]) -> None:
        """Takes events until all ranks have ended, or there is no more to wait for."""
        limit = deadline
        while not ranks.all_exited and time.monotonic() < limit:
            recorded_before, failed_before = ranks.all_recorded, bool(ranks.failed)
            time.sleep(POLL_S)
            for event in self._events(0):
                if event["event"] == "started":
                    self._rank_pids = event["pids"]
                ranks.take(event)
                on_event(event)
            if ranks.all_recorded and not recorded_before:
                limit = time.monotonic() + TEARDOWN_S
            elif ranks.failed and not failed_before:
                limit = min(limit, time.monotonic() + LAST_WORDS_S)

    def _ends(self, ranks: Ranks, folder: Path) -> list[RankEnd]:
        """How each rank ended that has no record; asks those still alive for their stacks."""
        alive = [rank for rank in range(ranks.world_size) if rank not in ranks.exited]
        if alive:
            self._send({"op": "stacks"})
            time.sleep(1.0)
        ends = []
        for rank in range(ranks.world_size):
            if ranks.phase.get(rank) == "recorded":
                continue
            failed_at = ranks.failed.index(rank) if rank in ranks.failed else len(ranks.failed)
            ends.append(
                RankEnd(
                    rank=rank,
                    order=failed_at,
                    exit_code=ranks.exited.get(rank),
                    error=_read_error(folder / f"error-{rank}.json"),
                    last_phase=ranks.phase.get(rank, "start"),
                    log_tail=_tail(folder / f"log-{rank}.txt", lines=20),
                    stack=_tail(folder / f"stack-{rank}.txt", lines=60),
                )
            )
        return ends

    def _end_run(self, folder: Path) -> None:
        """Has the server kill what is left of a run; if the server itself does not answer, ends it."""
        if self._process is None:
            return
        try:
            self._send({"op": "end", "folder": str(folder)})
            answered = self._wait_for("ended", 15.0) is not None
        except (LaunchError, BrokenPipeError):
            answered = False
        if not answered:
            self.close()

    def close(self) -> None:
        """Ends the server and everything that came from it."""
        if self._process is None:
            return
        process, self._process, self._pending = self._process, None, b""
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.close()
        except BrokenPipeError:
            pass
        try:
            process.wait(timeout=15.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()
        if process.returncode != 0:
            self._kill_sessions()
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)

    def _kill_sessions(self) -> None:
        """After a server that could not clean up: each rank leads a session of its own, with all that it started."""
        for pid in self._rank_pids:
            try:
                os.killpg(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass

    def _send(self, request: dict[str, Any]) -> None:
        assert self._process is not None and self._process.stdin is not None
        try:
            self._process.stdin.write((json.dumps(request) + "\n").encode())
            self._process.stdin.flush()
        except BrokenPipeError:
            raise LaunchError(FailureKind.KILLED, "the server process was killed from outside") from None

    def _events(self, timeout_s: float) -> list[dict[str, Any]]:
        """The events that have come, after waiting at most `timeout_s`. Raises LaunchError when the server is gone."""
        assert self._process is not None and self._process.stdout is not None
        fd = self._process.stdout.fileno()
        if not select.select([fd], [], [], timeout_s)[0]:
            return []
        chunk = os.read(fd, 1 << 16)
        if not chunk:
            raise LaunchError(FailureKind.KILLED, "the server process ended; was it killed from outside?")
        *lines, self._pending = (self._pending + chunk).split(b"\n")
        return [json.loads(line) for line in lines]

    def _wait_for(self, name: str, timeout_s: float) -> dict[str, Any] | None:
        limit = time.monotonic() + timeout_s
        while time.monotonic() < limit:
            for event in self._events(POLL_S):
                if event["event"] == name:
                    return event
        return None


def loopback_variables() -> dict[str, str]:
    """Ranks of one node talk over the loopback interface: gloo needs no resolvable host name then."""
    return {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {"GLOO_SOCKET_IFNAME": "lo0"}


def _read_error(path: Path) -> RankError | None:
    return jsonfile.read(path, RankError) if path.exists() else None


def _tail(path: Path, *, lines: int) -> str:
    if not path.exists():
        return ""
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])
