"""tools.bisect and perf/bisection.py: the door for `git bisect run`, on real repositories and real runs."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from perf.bisection import Judgement, Question, checked_out, compare, judged, oldest_good, threshold
from perf.measure.connection import ROOT
from perf.tell.results import Results
from tests.slow_copy import copy_strategies, make_slow
from tests.suite_runs import SINGLE

SHORT = ("--", "--perf-warmup=2", "--perf-steps=4")
TOOL = (sys.executable, "-m", "tools.bisect")


class Repository:
    """A repository of the measured code alone: it is older than the tool, as far as a bisection knows."""

    def __init__(self, root):
        self.root = root
        root.mkdir()
        self.git("init", "-q")
        self.room = copy_strategies(root)
        (root / ".gitignore").write_text("__pycache__/\n")

    def git(self, *arguments):
        command = ["git", "-C", self.root, "-c", "user.name=t", "-c", "user.email=t@t", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    def commit(self, subject):
        with self.room.open("a") as file:
            file.write(f"# {subject}\n")
        self.git("add", "-A")
        self.git("commit", "-qm", subject)
        return self.git("rev-parse", "HEAD")


@pytest.fixture
def repository(tmp_path, monkeypatch):
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    return Repository(tmp_path / "repository")


def bisect(*arguments):
    return subprocess.run([*TOOL, *map(str, arguments)], cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("text", ["3%", "3 %", " 3.0% ", "0.03"])
def test_threshold_is_a_percentage_or_a_fraction(text):
    assert threshold(text) == pytest.approx(0.03)


def test_threshold_above_one_is_a_percentage():
    assert threshold("150%") == 1.5


@pytest.mark.parametrize("text", ["3", "1", "0", "0%", "-3%", "", "%", "3%%", "3% or so", "nan", "inf%", "three"])
def test_threshold_that_could_mean_two_things_or_nothing_is_refused(text):
    with pytest.raises(ValueError, match=r"write the largest slowdown that is still good as 3% or 0\.03"):
        threshold(text)


@pytest.mark.parametrize(
    ("interval", "judgement"),
    [
        ((-0.02, 0.01), Judgement.GOOD),
        ((0.01, 0.03), Judgement.GOOD),
        ((0.029, 0.031), Judgement.UNKNOWN),
        ((0.03, 0.05), Judgement.UNKNOWN),
        ((0.031, 0.05), Judgement.BAD),
    ],
)
def test_whole_interval_must_lie_on_one_side_of_the_threshold(interval, judgement):
    assert judged(interval, 0.03) is judgement


def test_oldest_good_commit_is_found_among_those_of_one_second(repository):
    commits = [repository.commit(str(number)) for number in range(5)]
    repository.git("bisect", "start", commits[4], commits[2])
    repository.git("bisect", "good", commits[3])
    repository.git("bisect", "good", commits[1])
    assert oldest_good(repository.root) == commits[1]


def test_good_commit_is_checked_out_of_a_folder_of_the_repository_too_and_gone_afterwards(repository):
    first = repository.commit("first")
    repository.commit("second")
    with checked_out(repository.root / "strategies", first) as folder:
        assert (folder / "sharded.py").read_text().endswith("# first\n")
    assert len(repository.git("worktree", "list").splitlines()) == 1
    assert not folder.exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "required: CELL, --threshold"),
        ((SINGLE, "--threshold", "3"), "threshold '3': write"),
        ((SINGLE, "--threshold", "3%", "--such"), "unrecognized arguments: --such"),
        ((SINGLE, "--threshold", "3%", "--pairs", "many"), "invalid int value: 'many'"),
        ((SINGLE, "--threshold", "3%", "--pairs", "0"), "0 pairs at first, 16 at most"),
        (("single-tiny-eager-w2-gloo", "--threshold", "3%"), f"did you mean {SINGLE}"),
        ((SINGLE, "--threshold", "3%", "--matrix", "none"), "no matrix 'none'"),
        ((SINGLE, "--threshold", "3%", "--tree", "/nowhere"), "/nowhere: no such folder"),
        ((SINGLE, "--threshold", "3%", "--tree", 300 * "a"), "File name too long"),
        ((SINGLE, "--threshold", "3%", "--matrix", 300 * "a"), "File name too long"),
    ],
)
def test_mistake_of_usage_ends_the_bisection_and_is_one_line(arguments, says):
    result = bisect(*arguments)
    assert result.returncode == 129
    assert says in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert not result.stdout


def test_mistake_about_the_repository_ends_the_bisection(repository, tmp_path):
    repository.commit("first")
    (tmp_path / "bare").mkdir()
    for arguments, says in (
        (("--tree", repository.root), "no bisection here knows a good commit: name one with --good REF"),
        (("--tree", repository.root, "--good", "none"), "--good none: the repository of"),
        (("--tree", tmp_path / "bare"), "not a git repository"),
        (("--tree", repository.root, "--good", "HEAD", "--", "--perf-such"), "pytest could not run"),
    ):
        result = bisect(SINGLE, "--threshold", "3%", *arguments)
        assert (result.returncode, says in result.stderr) == (129, True), result.stderr


def test_interpreter_without_our_packages_ends_the_bisection():
    command = [sys.executable, "-S", *TOOL[1:], SINGLE, "--threshold", "3%"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 129
    assert "ModuleNotFoundError" in result.stderr


@pytest.mark.long
def test_git_bisect_names_the_slow_commit(repository, tmp_path):
    """In a linked worktree, for which git tells all that it starts of its own GIT_DIR."""
    good = repository.commit("good")
    repository.commit("harmless")
    make_slow(repository.room)
    slow = repository.commit("slow")
    bad = repository.commit("harmless too")
    tree = tmp_path / "linked"
    repository.git("worktree", "add", "--detach", str(tree))
    repository.git("-C", str(tree), "bisect", "start", bad, good)
    options = ("--threshold=50 %", "--matrix=smoke", "--pairs=1", f"--into={tmp_path}/results", *SHORT)
    run = ("bisect", "run", "env", "-C", str(ROOT), *TOOL, SINGLE, f"--tree={tree}", *options)
    said = repository.git("-C", str(tree), *run)
    assert f"{slow} is the first bad commit" in said
    (line,) = (line for line in said.splitlines() if line.startswith(f"{slow[:10]} +"))
    assert f"] against {good[:10]}: bad (threshold 50 %), " in line
    assert len(repository.git("worktree", "list").splitlines()) == 2
    (folder,) = (tmp_path / "results" / slow[:10]).iterdir()
    results = Results(folder)
    assert {run.environment.commit for run in results.runs(SINGLE)} == {slow}
    assert {run.environment.commit for run in results.reference_runs(SINGLE)} == {good}


def test_commit_that_cannot_run_is_skipped(repository, tmp_path):
    good = repository.commit("good")
    with repository.room.open("a") as file:
        file.write("def broken(\n")
    broken = repository.commit("broken")
    into, tree = f"--into={tmp_path}/results", f"--tree={repository.root}"
    result = bisect(SINGLE, "--threshold=3%", "--matrix=smoke", tree, f"--good={good}", into, *SHORT)
    assert result.returncode == 125
    assert result.stdout.startswith(f"{broken[:10]} against {good[:10]}: cannot judge: ERROR: ")
    repository.git("rm", "-qrf", "strategies")
    repository.git("commit", "-qm", "nothing to measure")
    result = bisect(SINGLE, "--threshold=3%", "--matrix=smoke", tree, f"--good={good}", into, *SHORT)
    assert result.returncode == 125
    assert result.stdout.endswith("cannot judge: it has no strategies/ to measure\n")


@pytest.mark.long
def test_more_pairs_go_on_with_those_that_are_there(repository, tmp_path):
    good = repository.commit("good")
    repository.commit("harmless")
    question = Question(
        cell_id=SINGLE, threshold=0.03, tree=str(repository.root), matrix="smoke", passed_on=SHORT[1:], good=good
    )
    with checked_out(repository.root, good) as reference:
        first, results = compare(question, reference, 1, tmp_path / "results", None)
        (before,) = results.runs(SINGLE)
        second, again = compare(question, reference, 2, tmp_path / "results", results)
    assert again.folder == results.folder
    assert [len(read(SINGLE)) for read in (again.runs, again.reference_runs)] == [2, 2]
    assert again.runs(SINGLE)[0] == before
    assert first.interval != second.interval
    assert again.verdicts()[0].num_pairs == 2


def test_checkout_of_a_killed_tool_is_removed_by_the_next_one(repository):
    first = repository.commit("first")
    hold = (
        "import sys, time; from pathlib import Path; from perf.bisection import checked_out\n"
        "with checked_out(Path(sys.argv[1]), sys.argv[2]) as folder: print(folder, flush=True); time.sleep(600)"
    )
    command = [sys.executable, "-c", hold, str(repository.root), first]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        folder = Path(process.stdout.readline().strip())
        process.kill()
    assert (folder / "strategies").exists()
    with checked_out(repository.root, first):
        assert not folder.parent.exists()
        assert len(repository.git("worktree", "list").splitlines()) == 2
    assert len(repository.git("worktree", "list").splitlines()) == 1


@pytest.mark.long
@pytest.mark.parametrize(("sent", "send", "code"), [(signal.SIGINT, os.killpg, 130), (signal.SIGTERM, os.kill, 143)])
def test_interrupted_tool_ends_the_bisection_and_leaves_nothing(repository, tmp_path, sent, send, code):
    """The terminal tells every process of ctrl-C, a scheduler may tell this one alone that it has to end."""
    repository.commit("good")
    options = (f"--tree={repository.root}", "--good=HEAD", f"--into={tmp_path}/results", "--matrix=smoke")
    command = [*TOOL, SINGLE, "--threshold=3%", *options]
    with tempfile.TemporaryDirectory() as place:
        environment = os.environ | {"TMPDIR": place}
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, start_new_session=True, stderr=subprocess.DEVNULL
        )
        deadline = time.monotonic() + 120
        while not list(tmp_path.glob("results/*/*/r*/*/0.json")) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert len(repository.git("worktree", "list").splitlines()) == 2
        family = psutil.Process(process.pid).children(recursive=True)
        assert len(family) >= 2, "pytest and its server"
        send(process.pid, sent)
        assert process.wait(60) == code
        assert psutil.wait_procs(family, timeout=10)[1] == []
        assert [path.name for path in Path(place).glob("shardmark-*")] == []
    assert len(repository.git("worktree", "list").splitlines()) == 1
