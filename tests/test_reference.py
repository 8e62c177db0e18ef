"""Room perf/measure/reference.py: what a reference can be, and that nothing of it stays behind."""

import subprocess
import sys
from pathlib import Path

import pytest

from perf.facts.provenance import digest
from perf.measure import reference as room
from perf.measure.connection import ROOT
from perf.measure.launch import Launcher
from perf.measure.reference import Reference, opened, parse


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A repository of two commits, whose `strategies` differ; its `perf` is this one."""
    root = tmp_path / "repository"
    (root / "strategies").mkdir(parents=True)
    git = ["git", "-C", root, "-c", "user.name=t", "-c", "user.email=t@t"]
    subprocess.run([*git, "init", "-q"], check=True)
    for number in (1, 2):
        (root / "strategies" / "number.py").write_text(f"NUMBER = {number}\n")
        subprocess.run([*git, "add", "-A"], check=True)
        subprocess.run([*git, "commit", "-qm", str(number)], check=True)
    (root / "perf").symlink_to(ROOT / "perf")
    monkeypatch.setattr(room, "ROOT", root)
    return root


def num_worktrees(repository):
    listed = subprocess.run(["git", "-C", repository, "worktree", "list"], capture_output=True, text=True, check=True)
    return len(listed.stdout.splitlines())


def test_git_ref_is_checked_out_beside_and_gone_afterwards(repository):
    reference = parse("HEAD~1")
    assert len(reference.commit) == 40
    with opened(reference) as build:
        assert (build.root / "strategies" / "number.py").read_text() == "NUMBER = 1\n"
        assert (build.root / "perf").resolve() == ROOT / "perf"
        assert (repository / "strategies" / "number.py").read_text() == "NUMBER = 2\n"
        place = build.root.parent
    assert not place.exists()
    assert num_worktrees(repository) == 1


def test_worktree_is_gone_after_an_error_too(repository):
    with pytest.raises(KeyboardInterrupt), opened(parse("HEAD")) as build:  # noqa: PT012 - the place is needed after
        place = build.root.parent
        raise KeyboardInterrupt
    assert not place.exists()


def test_what_a_killed_process_left_is_removed_by_the_next_one(repository):
    hold = (
        "import pathlib, sys, time; from perf.measure import reference as room\nroom.ROOT = pathlib.Path(sys.argv[1])\n"
        "with room.opened(room.parse('HEAD~1')) as build: print(build.root.parent, flush=True); time.sleep(600)"
    )
    command = [sys.executable, "-c", hold, str(repository)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        place = Path(process.stdout.readline().strip())
        with opened(parse("HEAD")):
            assert (place / "source" / "strategies").is_dir(), "of a process that lives"
        process.kill()
    assert place.exists()
    with opened(parse("HEAD")):
        assert not place.exists()
    assert num_worktrees(repository) == 1


def test_folder_gives_its_strategies_and_the_candidate_its_perf(tmp_path):
    write = tmp_path / "other" / "strategies"
    write.mkdir(parents=True)
    (write / "number.py").write_text("NUMBER = 3\n")
    with opened(parse(str(tmp_path / "other"))) as build:
        assert (build.root / "strategies").resolve() == write
        assert build.source == tmp_path / "other"
    assert (write / "number.py").exists()


def test_interpreter_or_its_environment_measures_this_checkout(tmp_path):
    for said in (sys.executable, str(Path(sys.executable).parent.parent)):
        with opened(parse(said)) as build:
            assert (Path(build.python).parent, build.root) == (Path(sys.executable).parent, ROOT)


def test_this_build_is_known_by_each_of_its_names(tmp_path):
    names = [name for name in ("python", "python3") if (Path(sys.executable).parent / name).exists()]
    said = [sys.executable, str(Path(sys.executable).parent.parent), str(ROOT)]
    assert [parse(name).is_this_build for name in said] == [True] * 3
    assert all(parse(str(Path(sys.executable).parent / name)).is_this_build for name in names)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(Path(sys.executable).resolve())
    assert not parse(str(tmp_path)).is_this_build, "another environment of the same interpreter"
    other = Path(sys.executable).parent / "pytest"
    assert not parse(str(other)).is_this_build, "another program of the same environment"


def test_variables_alone_are_compared_with_their_absence():
    with opened(Reference(said="")) as build:
        assert (build.python, build.root, build.variables) == (sys.executable, ROOT, ())


@pytest.mark.parametrize(
    ("said", "says"),
    [
        ("no_such_ref", "no Python interpreter, no folder with strategies/, and git knows no commit 'no_such_ref'"),
        ("empty", "holds strategies/, or bin/python"),
        ("", "an empty name; give a git ref"),
        ("a" * 300, "File name too long"),
        ("--upload-pack=x", "git knows no commit"),
    ],
)
def test_reference_that_is_none_is_refused_with_what_it_could_be(tmp_path, monkeypatch, said, says):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=says):
        parse(said)


def test_commit_without_strategies_is_refused(repository):
    git = ["git", "-C", repository, "-c", "user.name=t", "-c", "user.email=t@t"]
    subprocess.run([*git, "rm", "-qr", "--cached", "strategies"], check=True)
    subprocess.run([*git, "commit", "-qm", "none"], check=True)
    with pytest.raises(ValueError, match="has no strategies/"), opened(parse("HEAD")):
        pass


def test_server_of_a_reference_imports_its_strategies_and_says_so(tmp_path):
    copy = tmp_path / "copy" / "strategies"
    copy.mkdir(parents=True)
    for path in (ROOT / "strategies").glob("*.py"):
        (copy / path.name).write_text(path.read_text(encoding="utf-8"), encoding="utf-8")
    with opened(parse(str(tmp_path / "copy"))) as build, Launcher(python=build.python, root=build.root) as launcher:
        imported = launcher.start().imported
    assert imported.strategies == str(copy)
    assert imported.digest == digest(ROOT / "strategies")
    (copy / "norm.py").write_text("", encoding="utf-8")
    assert imported.digest != digest(copy)
