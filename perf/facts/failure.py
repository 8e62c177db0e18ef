"""Why a run gave no record: the kinds of failure, and how the ranks' ends are read."""

import signal
from dataclasses import dataclass
from enum import StrEnum

from strategies.value import Value


class FailureKind(StrEnum):
    """The name under which a failed launch is reported."""

    OOM = "OOM"
    """An allocator refused."""
    HANG = "HANG"
    """Not finished at the deadline."""
    CRASH = "CRASH"
    """An exception, a bad exit code or a fault in native code."""
    KILLED = "KILLED"
    """SIGKILL or SIGTERM from outside, most often the kernel's out-of-memory killer."""
    COMM = "COMM"
    """Only communication errors were seen, and no rank to blame for them."""
    REFUSED = "REFUSED"
    """The run was refused before or while it was built: a user's mistake, not a crash."""


class LaunchError(RuntimeError):
    """A run that gave no record. `kind` names how; the message leads with the failing rank's own error."""

    def __init__(self, kind: FailureKind, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind


class ReferenceFailure(RuntimeError):  # noqa: N818 - not an error of what is measured
    """A run of the reference build gave no record, which says nothing of the candidate."""


class NotResumable(ValueError):  # noqa: N818 - a refusal
    """A test run cannot go on in its folder: what it has was made with something else, and has to stay as it is."""


class RankError(Value, frozen=True, kw_only=True):
    """The exception of one rank, written by that rank."""

    type: str
    message: str
    traceback: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEnd:
    """How one rank ended without having been measured."""

    rank: int
    order: int
    """When, among the ranks that failed: 0 first."""
    exit_code: int | None
    """Negative: ended by that signal; None: still alive at the deadline."""
    error: RankError | None
    last_phase: str
    log_tail: str = ""
    stack: str = ""


# Messages of a rank whose peer went away first; lower case.
_VICTIM_SIGNS = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "connection was likely closed",
    "connection abort",
    "broken pipe",
    "socket timeout",
    "timed out waiting",
    "remote process exited",
    "remote peer",
    "ncclremoteerror",
    "pair is not connected",
    "watchdog",
)
BUILDING = ("start", "group")
"""Phases in which a ValueError is the user's: before the model stands, only the request can be wrong."""
_OOM_SIGNS = (
    "cannot allocate memory",
    "can't allocate memory",
    "memoryerror",
    "not enough memory",
    "out of memory",
    "outofmemoryerror",
)


def explain(ends: list[RankEnd], *, deadline_s: float) -> LaunchError:
    """The error of a failed run. `ends` has one entry for each rank that did not deliver."""
    assert ends
    alive = [end for end in ends if end.exit_code is None]
    ended = [end for end in ends if end.exit_code is not None]
    culprits = sorted((end for end in ended if not _is_victim(end)), key=lambda end: end.order)
    if culprits:
        first = culprits[0]
        others = [end for end in ends if end is not first]
        return LaunchError(_kind(first), "\n".join([_tell(first), *(_brief(end) for end in others)]))
    if alive:
        return _hang(alive, deadline_s)
    first = min(ends, key=lambda end: end.order)
    return LaunchError(FailureKind.COMM, "\n".join([_tell(first), *(_brief(end) for end in ends if end is not first)]))


def _hang(alive: list[RankEnd], deadline_s: float) -> LaunchError:
    """Blames the ranks that are outside of torch while others wait inside of it, or all; each one's stack follows."""
    frames = {end.rank: _top_frame(end.stack) for end in alive}
    outside = [end for end in alive if "/torch/" not in frames[end.rank]]
    blamed = outside or alive
    names = "; ".join(f"rank {end.rank} in {frames[end.rank] or 'no stack: it did not answer'}" for end in blamed)
    stacks = [f"--- rank {end.rank}, last seen at {end.last_phase}\n{end.stack.rstrip()}" for end in alive]
    return LaunchError(FailureKind.HANG, "\n".join([f"timeout after {deadline_s:g} s, {names}", *stacks]))


def _top_frame(stack: str) -> str:
    """The innermost Python frame of the thread that took the signal, as faulthandler prints it."""
    _, _, thread = stack.partition("Current thread")
    lines = (thread or stack).splitlines()
    return next((line.strip() for line in lines if line.strip().startswith("File ")), "")


def _is_victim(end: RankEnd) -> bool:
    """Whether the rank only reports that a peer went away."""
    return end.error is not None and any(sign in end.error.message.lower() for sign in _VICTIM_SIGNS)


def _kind(end: RankEnd) -> FailureKind:
    if end.error is not None:
        text = f"{end.error.type}: {end.error.message}".lower()
        if any(sign in text for sign in _OOM_SIGNS):
            return FailureKind.OOM
        refused = end.error.type == "ValueError" and end.last_phase in BUILDING
        return FailureKind.REFUSED if refused else FailureKind.CRASH
    return FailureKind.KILLED if end.exit_code in (-signal.SIGKILL, -signal.SIGTERM) else FailureKind.CRASH


def _tell(end: RankEnd) -> str:
    """The whole story of one rank, its own error first."""
    if end.error is not None:
        return f"rank {end.rank}: {end.error.type}: {end.error.message}\n{end.error.traceback}".rstrip()
    return f"rank {end.rank} {_exit(end)} at {end.last_phase}\n{end.log_tail}".rstrip()


def _brief(end: RankEnd) -> str:
    if end.error is not None:
        return f"(rank {end.rank}: {end.error.type}: {end.error.message.splitlines()[0] if end.error.message else ''})"
    return f"(rank {end.rank} {_exit(end)} at {end.last_phase})"


def _exit(end: RankEnd) -> str:
    if end.exit_code is None:
        return "was still running"
    if end.exit_code == -signal.SIGKILL:
        return "was killed by SIGKILL, possibly out of memory"
    if end.exit_code < 0:
        return f"was ended by {signal.Signals(-end.exit_code).name}"
    if end.exit_code == 0:
        return "exited with code 0 without a record"
    return f"exited with code {end.exit_code}"
