"""One step of a bisection: a tree measured beside the good commit, and whether its slowdown is above a threshold.

The tree may be older than this room. So it is measured from outside: this checkout's `perf`, the tree's `strategies`.
"""

import difflib
import math
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path

import msgspec
import pytest

from perf.facts.environment import git_finds_by_place
from perf.facts.matrix import cells_of
from perf.facts.measurement import STEP_TIME
from perf.judge.verdict import Comparison
from perf.measure.reference import SOURCE, own_folder
from perf.session import ending_in_order, run_pytest
from perf.settings import STATE
from perf.tell.results import Results
from strategies.value import Value

MOST_PAIRS = 16
SUITE = "perf/test_cells.py::test_cell"


class Judgement(StrEnum):
    """What a commit is to a bisection."""

    GOOD = "good"
    BAD = "bad"
    UNKNOWN = "cannot judge"


class Question(Value, frozen=True, kw_only=True):
    """Is the tree slower than the good commit by more than the threshold?"""

    cell_id: str
    threshold: float
    """Largest change of step time that is still good, as a fraction."""
    tree: str
    """Folder of the checkout that is bisected."""
    good: str | None = None
    """A commit of the tree's repository; None: the oldest that `git bisect` was told of."""
    matrix: str = "auto"
    pairs: int = 4
    most_pairs: int = MOST_PAIRS
    into: str = str(STATE / "bisect")
    """Folder for the results."""
    passed_on: tuple[str, ...] = ()
    """More options of pytest."""


class Answer(Value, frozen=True, kw_only=True):
    """What is said of a tree."""

    judgement: Judgement
    text: str
    """One line."""


def threshold(text: str) -> float:
    """A fraction, of `3%`, `3 %` or `0.03`. Raises ValueError for what could be meant in two ways or makes no sense."""
    number, percent, rest = text.partition("%")
    try:
        value = float(number) / (100 if percent else 1)
    except ValueError:
        value = math.nan
    if rest.strip() or not 0 < value < math.inf or (not percent and value >= 1):
        raise ValueError(f"threshold {text!r}: write the largest slowdown that is still good as 3% or 0.03")
    return value


def judged(interval: tuple[float, float], threshold: float) -> Judgement:
    """By the 95 % interval of the change: it must lie on one side of the threshold as a whole."""
    low, high = interval
    if high <= threshold:
        return Judgement.GOOD
    return Judgement.BAD if low > threshold else Judgement.UNKNOWN


@ending_in_order()
def ask(question: Question) -> Answer:
    """Measures the tree beside the good commit, with twice the pairs while the interval straddles the threshold.

    Raises:
        ValueError: the question is wrong, whatever commit is checked out.
    """
    _check(question)
    tree = Path(question.tree)
    good = oldest_good(tree) if question.good is None else commit(tree, question.good)
    name = _git(tree, "describe", "--always", "--dirty", "--exclude=*", "--abbrev=10")
    against = f"against {good[:10]}"
    if not _has_strategies(tree):
        return _unknown(f"{name} {against}", "it has no strategies/ to measure")
    with checked_out(tree, good) as reference:
        if not _has_strategies(reference):
            raise ValueError(
                f"the good commit {good[:10]} has no strategies/ to compare with; name another: --good REF"
            )
        return _look(question, reference, name, against)


def _look(question: Question, reference: Path, name: str, against: str) -> Answer:
    """As many looks as it takes, each with all pairs so far."""
    pairs, results = question.pairs, None
    limit = f"threshold {question.threshold * 100:g} %"
    while True:
        found, results = compare(question, reference, pairs, Path(question.into) / name, results)
        if isinstance(found, str):
            return _unknown(f"{name} {against}", found)
        assert found.interval is not None
        judgement = judged(found.interval, question.threshold)
        low, high = (f"{bound * 100:+.1f}" for bound in found.interval)
        change = f"{found.change * 100:+.1f} % [{low}, {high}]"
        text = f"{name} {change} {against}: {judgement} ({limit}), {pairs} pair{'s' * (pairs > 1)}"
        if judgement is not Judgement.UNKNOWN or pairs >= question.most_pairs:
            return Answer(judgement=judgement, text=text)
        print(f"{text} so far", file=sys.stderr, flush=True)
        pairs = min(2 * pairs, question.most_pairs)


def compare(
    question: Question, reference: Path, pairs: int, into: Path, begun: Results | None
) -> tuple[Comparison | str, Results | None]:
    """The comparison of step times, or why there is none; and the test run, which `begun` is to go on.

    Also of a cell that is NOISY: that word is about the suite's tolerance, the interval knows of the noise by itself.
    """
    before = set(into.glob("*"))
    where = f"--perf-results={into}"
    if begun is not None:
        # The pairs so far are the first ones of a longer test run: its plan is what says how many it has.
        manifest = begun.manifest()
        begun.write_manifest(msgspec.structs.replace(manifest, plan=msgspec.structs.replace(manifest.plan, runs=pairs)))
        where = f"--perf-resume={begun.folder}"
    code = run_pytest(_arguments(question, reference, pairs, where), output=sys.stderr)
    if code == pytest.ExitCode.INTERRUPTED:
        raise KeyboardInterrupt
    if code in (pytest.ExitCode.USAGE_ERROR, pytest.ExitCode.INTERNAL_ERROR):
        raise ValueError(f"pytest could not run {question.cell_id} (exit code {int(code)}): it says why above")
    results = begun or next((Results(folder) for folder in set(into.glob("*")) - before), None)
    verdict = next((one for one in results.verdicts() if one.cell_id == question.cell_id), None) if results else None
    if verdict is None:
        return f"no verdict (pytest's exit code {code})", results
    times = [comparison for comparison in verdict.comparisons if comparison.metric == STEP_TIME]
    if not times or times[0].interval is None:
        return f"{verdict.outcome}: {'; '.join(verdict.reasons) or 'no step time'}", results
    return times[0], results


def _arguments(question: Question, reference: Path, pairs: int, where: str) -> list[str]:
    return [
        f"{SUITE}[{question.cell_id}]",
        "-q",
        "--no-header",
        "-p",
        "no:cacheprovider",
        f"--perf-matrix={question.matrix}",
        f"--perf-ab={reference}",
        f"--perf-candidate={question.tree}",
        f"--perf-pairs={pairs}",
        "--perf-no-evidence",
        where,
        *question.passed_on,
    ]


def _has_strategies(tree: Path) -> bool:
    """Git leaves the folder where Python's caches lie in it."""
    return any((tree / "strategies").glob("*.py"))


def _unknown(subject: str, reason: str) -> Answer:
    first_line = reason.splitlines()[0]
    return Answer(judgement=Judgement.UNKNOWN, text=f"{subject}: {Judgement.UNKNOWN}: {first_line}")


def _check(question: Question) -> None:
    names = [cell.id for cell in cells_of(question.matrix)]
    if question.cell_id not in names:
        near = difflib.get_close_matches(question.cell_id, names, n=3)
        cure = f"; did you mean {', '.join(near)}?" if near else "; `pytest perf --collect-only -q` shows its cells"
        raise ValueError(f"{question.cell_id}: no cell of the matrix {question.matrix}{cure}")
    if not 1 <= question.pairs <= question.most_pairs:
        raise ValueError(f"{question.pairs} pairs at first, {question.most_pairs} at most: needs 1 <= first <= most")
    if not Path(question.tree).is_dir():
        raise ValueError(f"{question.tree}: no such folder; --tree names the checkout that is bisected")


def oldest_good(tree: Path) -> str:
    """Of the commits that the bisection in this checkout holds for good, the one that the others descend from."""
    marked = _git(tree, "for-each-ref", "--format=%(objectname)", "refs/bisect/good-*").split()
    if not marked:
        raise ValueError(
            f"{tree}: no bisection here knows a good commit: name one with --good REF, or `git bisect start BAD GOOD`"
        )
    history = _git(tree, "rev-list", "--topo-order", "--reverse", *marked).split() if len(marked) > 1 else marked
    return next(one for one in history if one in marked)


def commit(tree: Path, said: str) -> str:
    """The hash of what was said, in the repository of the tree, whose refs the measuring checkout may not have."""
    try:
        return _git(tree, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{said}^{{commit}}")
    except ValueError:
        raise ValueError(f"--good {said}: the repository of {tree} knows no such commit") from None


@contextmanager
def checked_out(tree: Path, commit: str) -> Iterator[Path]:
    """What the tree is at that commit, in a worktree that is gone afterwards."""
    prefix = _git(tree, "rev-parse", "--show-prefix")
    with own_folder() as place:
        worktree = place.resolve() / SOURCE
        _git(tree, "worktree", "add", "--detach", str(worktree), commit)
        yield worktree / prefix


def _git(tree: Path, *arguments: str) -> str:
    """What git says in the tree. Raises ValueError with git's own words."""
    command: Sequence[str] = ["git", "-C", str(tree), *arguments]
    try:
        result = subprocess.run(command, capture_output=True, text=True, env=git_finds_by_place(), check=False)
    except OSError as error:
        raise ValueError(f"git cannot be run: {error}") from None
    if result.returncode:
        words = result.stderr.strip().splitlines() or [f"exit code {result.returncode}"]
        raise ValueError(f"{tree}: git {arguments[0]} {arguments[-1]}: {words[-1]}")
    return result.stdout.strip()
