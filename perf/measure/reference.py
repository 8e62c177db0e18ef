"""The reference build of a comparison side by side: a git ref, a folder, or a Python interpreter with another torch.

Both builds are measured by this checkout's `perf`; of the reference come `strategies`, or the interpreter with its
torch. What is made for it, a worktree and a folder of links, is gone afterwards.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from perf.facts.environment import git_finds_by_place
from perf.measure.connection import ROOT
from strategies.value import Value

PREFIX = "shardmark-reference-"
"""Begins the name of what is made for a reference; the process that made it follows."""
SOURCE = "source"
"""Name of the worktree in it, where it has one."""


class Reference(Value, frozen=True, kw_only=True):
    """What the user named, checked, with nothing made yet."""

    said: str
    """As the user wrote it; empty: this checkout with this interpreter."""
    commit: str | None = None
    folder: str | None = None
    """A tree with `strategies`."""
    python: str | None = None

    @property
    def is_this_build(self) -> bool:
        """Whether it names this checkout, or the interpreter that runs this, by whichever of its names."""
        return self.folder == str(ROOT) or (
            self.python is not None and _environment(self.python) == _environment(sys.executable)
        )


class Build(Value, frozen=True, kw_only=True):
    """One side of a comparison: what a server is started with."""

    python: str
    root: Path
    """Imported from: holds `perf` and `strategies`."""
    source: Path
    """The source tree that `strategies` comes from; git is asked for its commit."""
    variables: tuple[tuple[str, str], ...] = ()
    without: tuple[str, ...] = ()
    """Names of variables of this process that the build does not get."""


CANDIDATE = Build(python=sys.executable, root=ROOT, source=ROOT)
"""This checkout, with the interpreter that runs pytest."""


def parse(said: str) -> Reference:
    """What `said` names. Raises ValueError when it is no interpreter, folder with `strategies` or git ref."""
    if not said:
        raise ValueError("an empty name; give a git ref, a folder with strategies/, or a Python interpreter")
    path = Path(said)
    try:
        path.exists()
    except OSError as error:
        raise ValueError(f"{said}: {error.strerror}") from None
    if path.is_dir():
        if (path / "strategies").is_dir():
            return Reference(said=said, folder=str(path.resolve()))
        if (path / "bin" / "python").exists():
            return Reference(said=said, python=str(path.absolute() / "bin" / "python"))
        raise ValueError(f"{said}: a reference folder holds strategies/, or bin/python of an environment")
    if path.is_file() and os.access(path, os.X_OK):
        # Not resolved: an environment's python is a link, and finds its packages by where the link stands.
        return Reference(said=said, python=str(path.absolute()))
    found = _git("rev-parse", "--verify", "--quiet", f"{said}^{{commit}}")
    if found is None or found.returncode:
        where = "there is no git here" if found is None else f"git knows no commit {said!r}"
        raise ValueError(f"{said}: no Python interpreter, no folder with strategies/, and {where}")
    return Reference(said=said, commit=found.stdout.strip())


@contextmanager
def opened(reference: Reference, variables: tuple[tuple[str, str], ...] = ()) -> Iterator[Build]:
    """The build, for as long as it is measured.

    Raises:
        ValueError: git cannot make a worktree of the commit, or it holds no `strategies`.
    """
    if reference.python is not None or not reference.said:
        python = reference.python or sys.executable
        yield Build(python=python, root=ROOT, source=ROOT, variables=variables)
        return
    with own_folder() as place:
        source = Path(reference.folder) if reference.folder else _worktree(reference, place / SOURCE)
        if not (source / "strategies").is_dir():
            raise ValueError(f"{reference.said}: has no strategies/ to measure")
        root = place / "root"
        root.mkdir()
        (root / "perf").symlink_to(ROOT / "perf")
        (root / "strategies").symlink_to(source / "strategies")
        yield Build(python=sys.executable, root=root, source=source, variables=variables)


@contextmanager
def own_folder() -> Iterator[Path]:
    """A temporary folder of this process, of whatever repository the worktree is that is made in it as `SOURCE`.

    Both are gone afterwards. Where this process is killed, the next one that needs a folder removes them.
    """
    remove_left_behind()
    place = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-"))
    try:
        yield place
    finally:
        _remove(place)


def remove_left_behind() -> None:
    """Removes what was made for the references of processes that were killed."""
    for place in Path(tempfile.gettempdir()).glob(f"{PREFIX}*-*"):
        pid = place.name.removeprefix(PREFIX).partition("-")[0]
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            _remove(place)


def _environment(python: str) -> tuple[Path, Path]:
    """What tells an interpreter from others: the folder it stands in, and what it is a link to.

    Neither is enough: bin/ holds python and python3, and the python of each environment is a link to one and the same.
    """
    return Path(python).parent.resolve(), Path(python).resolve()


def _remove(place: Path) -> None:
    """A folder of a reference, with its worktree where it has one."""
    if (source := place / SOURCE).exists():
        # Asked from inside, git finds the repository. Twice: one whose making was killed is still locked.
        _git("worktree", "remove", "--force", "--force", str(source), at=source)
    shutil.rmtree(place, ignore_errors=True)


def _worktree(reference: Reference, place: Path) -> Path:
    assert reference.commit is not None
    made = _git("worktree", "add", "--detach", "--force", str(place), reference.commit)
    if made is None or made.returncode:
        reason = made.stderr.strip() if made else "there is no git here"
        raise ValueError(f"{reference.said}: git cannot check it out beside this tree: {reason}")
    return place


def _git(*arguments: str, at: Path | None = None) -> subprocess.CompletedProcess[str] | None:
    """What git answers, in this checkout unless told where; None where there is none."""
    command = ["git", "-C", str(at or ROOT), *arguments]
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=120, env=git_finds_by_place(), check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
