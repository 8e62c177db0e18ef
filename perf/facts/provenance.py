"""Which code a process has imported: what a comparison of two builds has to prove before its numbers mean anything."""

import hashlib
import sys
from pathlib import Path

from strategies.value import Value


class Imported(Value, frozen=True, kw_only=True):
    """Where the measured code came from, as the process that ran it says."""

    strategies: str
    """Folder of the package, links followed."""
    torch: str
    """Folder of the package, links followed."""
    digest: str
    """Of all sources of `strategies`."""


def imported() -> Imported:
    """What this process has imported; it must have imported torch and strategies."""
    strategies = _folder("strategies")
    return Imported(strategies=str(strategies), torch=str(_folder("torch")), digest=digest(strategies))


def digest(folder: Path) -> str:
    """Of the names and contents of all Python files in a folder and below."""
    found = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        found.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes() + b"\0")
    return found.hexdigest()[:16]


def _folder(package: str) -> Path:
    file = sys.modules[package].__file__
    assert file is not None
    return Path(file).resolve().parent
