"""Where and on what code a test run is made: host, commit, and the variables that change how torch runs."""

import os
import platform
import subprocess
from collections.abc import Collection
from pathlib import Path

from perf.facts.hardware import Machine, Node
from perf.facts.provenance import digest
from perf.facts.record import Environment, Software

_ABOUT_ANOTHER_REPOSITORY = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX", "GIT_COMMON_DIR")
_PREFIXES = ("NCCL_", "TORCH", "PYTORCH_", "CUDA_", "OMP_", "MKL_", "GLOO_", "KMP_", "CUBLAS_")


def environment(
    machine: Machine,
    node: Node,
    software: Software,
    *,
    source: "Source",
    variables: dict[str, str],
    without: Collection[str] = (),
) -> Environment:
    """The environment of a run; `variables` are those that only its ranks get, `without` those that they do not."""
    return Environment(
        machine=machine,
        host=platform.node(),
        cpu=node.cpu,
        cpu_cores=node.cpu_cores,
        software=software,
        commit=source.commit,
        dirty=source.dirty,
        digest=source.digest,
        variables=variables_of_ranks(variables, without),
    )


def variables_of_ranks(variables: dict[str, str], without: Collection[str] = ()) -> dict[str, str]:
    """What is recorded of a run: telling ones of this process, less `without`, and those that only its ranks get."""
    return {name: value for name, value in telling_variables().items() if name not in without} | variables


def telling_variables() -> dict[str, str]:
    """Those of this process that torch and its libraries read, paths left out: they say where, not how."""
    return {
        name: value for name, value in sorted(os.environ.items()) if name.startswith(_PREFIXES) and "/" not in value
    }


def git_finds_by_place() -> dict[str, str]:
    """The environment in which `git -C FOLDER` is about FOLDER, also where git itself has started this process."""
    return {name: value for name, value in os.environ.items() if name not in _ABOUT_ANOTHER_REPOSITORY}


class Source:
    """The measured source tree: its commit, as git knows it or as the user says it.

    Without `baselines/`: approving one, and committing it, changes nothing that is measured. So the commit is the last
    one that changed anything else, as far as the history goes: in a clone of depth 1 it is always the newest.

    Args:
        revision: another than the one that is checked out, as it would be in a worktree.
    """

    def __init__(self, root: Path | str, said: str | None = None, *, revision: str = "HEAD") -> None:
        self.commit = said or _git(root, "rev-list", "-1", revision, *_MEASURED) or _git(root, "rev-parse", revision)
        self.dirty: bool | None = None
        self.digest: str | None = None
        if revision != "HEAD":
            self.dirty = False
            return
        if self.commit and not said:
            status = _git(root, "status", "--porcelain", "--untracked-files=no", *_MEASURED)
            self.dirty = None if status is None else bool(status)
        strategies = Path(root) / "strategies"
        if strategies.is_dir():
            self.digest = digest(strategies)[:8] + digest(Path(__file__).parents[1])[:8]


_MEASURED = ("--", ":/", ":(exclude)baselines")


def _git(root: Path | str, *arguments: str) -> str | None:
    """Output of git in `root`; None where there is no git or no repository."""
    command = ["git", "-C", str(root), *arguments]
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=30, env=git_finds_by_place(), check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() if result.returncode == 0 else None
