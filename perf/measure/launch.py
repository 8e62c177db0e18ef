"""The parent's side of a run: one request to the server, a deadline, and every rank's record or the reason why not.

Never imports torch. A `Launcher` owns one server; two launchers can serve two interpreters or two source trees.
"""

import sys
import time
import uuid
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from perf.facts import jsonfile
from perf.facts.failure import LaunchError, RankEnd, RankError, explain
from perf.measure.connection import POLL_S, ROOT, Connection

LAST_WORDS_S = 3.0
"""How long other ranks may still speak after one has failed: a victim's error often comes before the culprit's."""
STACKS_S = 1.0
"""How long the ranks that hang have to write down their stacks."""
TEARDOWN_S = 10.0
"""How long a rank may take to end once its record is written."""


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
    """Runs on one interpreter and one source tree; the server is started with the first run and kept warm.

    Args: as of `Connection`.
    """

    def __init__(
        self,
        *,
        python: str = sys.executable,
        root: Path = ROOT,
        variables: dict[str, str] | None = None,
        without: Collection[str] = (),
    ) -> None:
        self._python = python
        self._root = root
        self._variables = variables or {}
        self._without = without
        self._connection: Connection | None = None
        self.start_up_s = 0.0
        """Seconds that starting servers has taken so far."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self) -> Connection:
        """The running server; a new one if none runs. Raises LaunchError when it cannot import what a rank needs."""
        if self._connection is not None and self._connection.is_alive:
            return self._connection
        self.close()
        self._connection = Connection(
            python=self._python, root=self._root, variables=self._variables, without=self._without
        )
        self.start_up_s += self._connection.start_up_s
        return self._connection

    def close(self) -> None:
        """Ends the server and everything that came from it."""
        if self._connection is not None:
            connection, self._connection = self._connection, None
            connection.close()

    def run(
        self,
        entry: str,
        payload: object,
        *,
        world_size: int,
        record: type[Any],
        deadline_s: float,
        variables: dict[str, str] | None = None,
        on_event: Callable[[dict[str, Any]], None] = lambda _: None,
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
        server = self.start()
        folder = server.scratch / uuid.uuid4().hex
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
            server.send(request)
            _follow(server, ranks, time.monotonic() + deadline_s, on_event)
            if not ranks.all_recorded:
                raise explain(_ends(server, ranks, folder), deadline_s=deadline_s)
            records = [jsonfile.read(folder / f"record-{rank}.json", record) for rank in range(world_size)]
            return records, not ranks.all_exited
        finally:
            self._end_run(server, folder)

    def _end_run(self, server: Connection, folder: Path) -> None:
        """Has the server kill what is left of a run; a server that does not answer is ended itself."""
        try:
            server.send({"op": "end", "folder": str(folder)})
            answered = server.wait_for("ended", 15.0) is not None
        except LaunchError:
            answered = False
        if not answered:
            self.close()


def _follow(server: Connection, ranks: Ranks, deadline: float, on_event: Callable[[dict[str, Any]], None]) -> None:
    """Takes events until all ranks have ended, or there is no more to wait for."""
    limit = deadline
    while not ranks.all_exited and time.monotonic() < limit:
        recorded_before, failed_before = ranks.all_recorded, bool(ranks.failed)
        time.sleep(POLL_S)
        for event in server.events():
            ranks.take(event)
            on_event(event)
        if ranks.all_recorded and not recorded_before:
            limit = time.monotonic() + TEARDOWN_S
        elif ranks.failed and not failed_before:
            limit = min(limit, time.monotonic() + LAST_WORDS_S)


def _ends(server: Connection, ranks: Ranks, folder: Path) -> list[RankEnd]:
    """How each rank ended that has no record; asks those still alive for their stacks."""
    if len(ranks.exited) < ranks.world_size:
        server.send({"op": "stacks"})
        time.sleep(STACKS_S)
    return [
        RankEnd(
            rank=rank,
            order=ranks.failed.index(rank) if rank in ranks.failed else len(ranks.failed),
            exit_code=ranks.exited.get(rank),
            error=_read_error(folder / f"error-{rank}.json"),
            last_phase=ranks.phase.get(rank, "start"),
            log_tail=_tail(folder / f"log-{rank}.txt", lines=20),
            stack=_tail(folder / f"stack-{rank}.txt", lines=60),
        )
        for rank in range(ranks.world_size)
        if ranks.phase.get(rank) != "recorded"
    ]


def loopback_variables() -> dict[str, str]:
    """Ranks of one node talk over the loopback interface: gloo needs no resolvable host name then."""
    return {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {"GLOO_SOCKET_IFNAME": "lo0"}


def _read_error(path: Path) -> RankError | None:
    return jsonfile.read(path, RankError) if path.exists() else None


def _tail(path: Path, *, lines: int) -> str:
    if not path.exists():
        return ""
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])
