"""`python -m perf.measure.server`: imports torch and transformers once, and forks the ranks of a run on request.

Forking from it takes 0.1 s where a fresh interpreter per rank takes 4 to 10. It never runs a torch operation and never
touches CUDA, so that its children start clean. It speaks JSON lines: requests on stdin, events on stdout (ranks write
their own events to the same pipe). When its stdin closes, or a run ends, no process that came from it stays alive.
"""

import faulthandler
import gc
import importlib
import json
import os
import platform
import select
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import psutil

from perf.facts.provenance import imported
from perf.measure.process_tree import adopt_orphans, end_with_parent

PRELOAD = (
    "torch",
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "transformers.models.qwen3.modeling_qwen3",
    "perf.measure.worker",
)
POLL_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class RankContext:
    """What a rank knows beside its job."""

    rank: int
    world_size: int
    folder: Path
    """Of this run: shared by its ranks, removed after it."""
    event_fd: int

    @property
    def store(self) -> Path:
        """File of the rendezvous, on a path that no other run has used."""
        return self.folder / "store"

    def report(self, phase: str, **details: object) -> None:
        """Tells the parent where this rank is. One short line, written at once: lines of ranks never mix."""
        line = json.dumps({"event": "phase", "rank": self.rank, "phase": phase, **details}) + "\n"
        os.write(self.event_fd, line.encode())


def main() -> None:
    """Serves until stdin closes."""
    event_fd = os.dup(1)
    os.dup2(2, 1)  # nothing that a library prints may reach the event pipe
    scratch = Path(tempfile.mkdtemp(prefix="shardmark-"))
    server = Server(event_fd, scratch)
    try:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        adopt_orphans()
        server.preload()
        server.serve()
    finally:
        server.end_all()
        shutil.rmtree(scratch, ignore_errors=True)


class Server:
    """The loop of one server process."""

    def __init__(self, event_fd: int, scratch: Path) -> None:
        self._event_fd = event_fd
        self._scratch = scratch
        self._ranks: dict[int, int] = {}  # pid -> rank

    def preload(self) -> None:
        """Imports what every rank needs, then says hello with the versions, or with the import that failed."""
        try:
            for name in PRELOAD:
                importlib.import_module(name)
                _check_forkable(name)
        except BaseException:
            self._send({"event": "hello", "error": traceback.format_exc(), "scratch": str(self._scratch)})
            raise
        gc.collect()
        gc.freeze()  # the collector of a child need not walk, and so copy, the pages it shares with its siblings
        hello = {"software": software(), "imported": msgspec.to_builtins(imported())}
        self._send({"event": "hello", **hello, "scratch": str(self._scratch), "pid": os.getpid()})

    def serve(self) -> None:
        pending = b""
        while True:
            ready, _, _ = select.select([0], [], [], POLL_S if self._ranks else None)
            if ready:
                chunk = os.read(0, 65536)
                if not chunk:
                    return
                *lines, pending = (pending + chunk).split(b"\n")
                for line in lines:
                    self._handle(json.loads(line))
            self._reap()

    def _handle(self, request: dict[str, Any]) -> None:
        match request["op"]:
            case "run":
                self._fork_ranks(request)
            case "stacks":
                for pid in self._ranks:
                    os.kill(pid, signal.SIGUSR1)
            case "end":
                self.end_all()
                shutil.rmtree(request["folder"], ignore_errors=True)
                self._send({"event": "ended"})
            case unknown:
                raise AssertionError(unknown)

    def _fork_ranks(self, request: dict[str, Any]) -> None:
        folder = Path(request["folder"])
        folder.mkdir()
        for rank in range(request["world_size"]):
            context = RankContext(rank=rank, world_size=request["world_size"], folder=folder, event_fd=self._event_fd)
            pid = os.fork()
            if pid == 0:
                _live_as_rank(context, request)
            self._ranks[pid] = rank
        self._send({"event": "started", "pids": list(self._ranks)})

    def _reap(self) -> None:
        for pid, rank in list(self._ranks.items()):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                del self._ranks[pid]
                self._send({"event": "exited", "rank": rank, "code": os.waitstatus_to_exitcode(status)})

    def end_all(self) -> None:
        """Kills every process that came from this one, also those that left their parent or their session."""
        self._ranks.clear()
        while descendants := psutil.Process().children(recursive=True):
            for process in descendants:
                try:
                    process.kill()
                except psutil.NoSuchProcess:
                    pass
            psutil.wait_procs(descendants, timeout=5)
            _reap_adopted()

    def _send(self, event: dict[str, Any]) -> None:
        try:
            os.write(self._event_fd, (json.dumps(event) + "\n").encode())
        except BrokenPipeError:
            pass  # the parent is gone; stdin will say so


def _check_forkable(name: str) -> None:
    """Raises RuntimeError when an import has touched CUDA: no child could use a GPU any more.

    Without a GPU there is nothing to lose: a CUDA build of torch then asks the CUDA runtime, for lack of a driver.
    """
    import torch

    if torch.cuda.is_initialized():
        raise RuntimeError(f"importing {name} has initialised CUDA, so that no forked rank could use a GPU")
    pid = os.fork()
    if pid == 0:
        spoilt = True
        try:
            spoilt = torch.cuda._is_in_bad_fork() and torch.cuda.device_count() > 0
        finally:
            os._exit(spoilt)
    if os.waitpid(pid, 0)[1]:
        raise RuntimeError(f"importing {name} has touched CUDA, so that no forked rank could use a GPU")


def software() -> dict[str, str | None]:
    """Versions of what the ranks import, without touching CUDA."""
    import torch
    import transformers

    cuda = torch.version.cuda
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if cuda else None
    return {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "cuda": cuda,
        "nccl": nccl,
    }


def _live_as_rank(context: RankContext, request: dict[str, Any]) -> None:
    """The whole life of a forked rank. Never returns: no cleanup of the parent's interpreter may run in a child."""
    code = 1
    try:
        _settle(context, request["env"])
        entry = _resolve(request["entry"])
        entry(request["payload"], context)
        code = 0
    except BaseException as error:
        record = {"type": type(error).__name__, "message": str(error), "traceback": traceback.format_exc()}
        (context.folder / f"error-{context.rank}.json").write_text(json.dumps(record))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # Without a hard exit some ranks hang in the interpreter's shutdown after destroy_process_group.
        os._exit(code)


def _settle(context: RankContext, variables: dict[str, str]) -> None:
    """Own session, own output file, dies with the server, answers SIGUSR1 with its stack."""
    parent = os.getppid()
    os.setsid()
    end_with_parent(parent, signal.SIGKILL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    log = os.open(context.folder / f"log-{context.rank}.txt", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    stack_file = (context.folder / f"stack-{context.rank}.txt").open("w")
    faulthandler.enable(sys.stderr)
    faulthandler.register(signal.SIGUSR1, file=stack_file, all_threads=True)
    os.environ.update(variables)
    os.environ.update(RANK=str(context.rank), LOCAL_RANK=str(context.rank), WORLD_SIZE=str(context.world_size))


def _resolve(entry: str) -> Callable[[dict[str, Any], RankContext], None]:
    module, _, name = entry.partition(":")
    function: Callable[[dict[str, Any], RankContext], None] = getattr(importlib.import_module(module), name)
    return function


def _reap_adopted() -> None:
    """Collects the ends of children, among them orphans that the kernel gave to this process."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


if __name__ == "__main__":
    main()
