"""Room perf/facts/environment.py: the commit of the measured tree, and the variables that change how torch runs."""

import os
import platform
import subprocess
from pathlib import Path

import pytest

from perf.facts.environment import Source, environment, telling_variables
from perf.facts.hardware import Node
from tests.factory import CPU, SOFTWARE, write_text

NODE = Node(cpu="Test CPU", cpu_cores=2, gpus=())


def git(folder, *arguments):
    identity = ["-c", "user.name=Tester", "-c", "user.email=tester@example.org"]
    result = subprocess.run(
        ["git", "-C", folder, *identity, *arguments], capture_output=True, text=True, check=True, env=clean_variables()
    )
    return result.stdout.strip()


def clean_variables():
    return {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A git repository with one commit."""
    for name in set(os.environ) - set(clean_variables()):
        monkeypatch.delenv(name)
    git(tmp_path, "init", "--quiet")
    write_text(tmp_path / "strategies/spec.py", "one = 1\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "--message", "One")
    return tmp_path


@pytest.fixture
def variables(monkeypatch):
    """No variables but those that the test sets."""
    for name in list(os.environ):
        monkeypatch.delenv(name)
    return monkeypatch


def test_clean_tree_is_its_commit(repository):
    source = Source(repository)
    assert source.commit == git(repository, "rev-parse", "HEAD")
    assert len(source.commit) == 40
    assert source.dirty is False


def test_commit_is_found_from_a_folder_inside_the_tree(repository):
    assert Source(repository / "strategies").commit == Source(repository).commit


@pytest.mark.parametrize("staged", [False, True])
def test_changed_file_makes_the_tree_dirty(repository, staged):
    write_text(repository / "strategies/spec.py", "one = 2\n")
    if staged:
        git(repository, "add", ".")
    assert Source(repository).dirty is True


def test_new_results_do_not_make_the_tree_dirty(repository):
    write_text(repository / "results/run.json", "{}\n")
    assert Source(repository).dirty is False


def test_next_commit_is_another_one(repository):
    first = Source(repository).commit
    write_text(repository / "README.md", "Two\n")
    git(repository, "add", ".")
    git(repository, "commit", "--quiet", "--message", "Two")
    assert Source(repository).commit == git(repository, "rev-parse", "HEAD") != first


def test_approved_baselines_are_no_change_of_what_is_measured_committed_or_not(repository):
    """So a test run can be resumed after an approval, and the next night is of the same build."""
    before = Source(repository).commit
    for text in ("{}\n", "{1}\n"):
        write_text(repository / "baselines/machine/cell.json", text)
        git(repository, "add", ".")
        assert (Source(repository).commit, Source(repository).dirty) == (before, False)
        git(repository, "commit", "--quiet", "--message", "Approve")
        assert (Source(repository).commit, Source(repository).dirty) == (before, False)
    write_text(repository / "strategies/baselines/cell.json", "{}\n")
    git(repository, "add", ".")
    assert Source(repository).dirty is True


def test_said_commit_wins_and_says_nothing_of_changes(repository):
    write_text(repository / "strategies/spec.py", "one = 2\n")
    source = Source(repository, said="abc123")
    assert (source.commit, source.dirty) == ("abc123", None)


def test_folder_without_git_has_no_commit(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    source = Source(tmp_path)
    assert (source.commit, source.dirty) == (None, None)
    assert Source(tmp_path, said="abc123").commit == "abc123"


def test_repository_without_a_commit_has_none(tmp_path):
    git(tmp_path, "init", "--quiet")
    source = Source(tmp_path)
    assert (source.commit, source.dirty) == (None, None)


def test_machine_without_git_has_no_commit(repository, monkeypatch):
    monkeypatch.setenv("PATH", "")
    source = Source(repository)
    assert (source.commit, source.dirty) == (None, None)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("NCCL_P2P_DISABLE", "1"),
        ("NCCL_ALGO", "Ring"),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3"),
        ("TORCHINDUCTOR_MAX_AUTOTUNE", "1"),
        ("PYTORCH_ALLOC_CONF", "expandable_segments:True"),
        ("CUDA_VISIBLE_DEVICES", "0,1"),
        ("OMP_NUM_THREADS", "1"),
        ("GLOO_SOCKET_IFNAME", "lo"),
    ],
)
def test_variable_that_changes_how_torch_runs_is_kept(variables, name, value):
    variables.setenv(name, value)
    assert telling_variables() == {name: value}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TORCHINDUCTOR_CACHE_DIR", "/somewhere/cache"),
        ("NCCL_TOPO_FILE", "topology/file.xml"),
        ("CUDA_HOME", "/opt/cuda"),
        ("HOME", "nest"),
        ("MY_NCCL_ALGO", "Ring"),
        ("API_TOKEN", "secret"),
    ],
)
def test_path_and_foreign_variable_is_left_out(variables, name, value):
    variables.setenv(name, value)
    assert telling_variables() == {}


def test_variables_are_sorted_and_those_of_the_ranks_win(variables):
    variables.setenv("OMP_NUM_THREADS", "4")
    variables.setenv("NCCL_P2P_DISABLE", "0")
    assert list(telling_variables()) == ["NCCL_P2P_DISABLE", "OMP_NUM_THREADS"]
    whole = environment(
        CPU, NODE, SOFTWARE, source=Source(Path("nowhere"), said="abc"), variables={"NCCL_P2P_DISABLE": "1"}
    )
    assert whole.variables == {"NCCL_P2P_DISABLE": "1", "OMP_NUM_THREADS": "4"}


def test_environment_is_machine_host_software_and_source(repository):
    whole = environment(CPU, NODE, SOFTWARE, source=Source(repository), variables={})
    assert (whole.machine, whole.software, whole.host) == (CPU, SOFTWARE, platform.node())
    assert (whole.cpu, whole.cpu_cores) == (NODE.cpu, NODE.cpu_cores)
    assert (whole.commit, whole.dirty) == (git(repository, "rev-parse", "HEAD"), False)
