"""tools.compare: which options of the suite its words become, and a real comparison through the door."""

import subprocess
import sys

import pytest

from perf.facts.outcome import Outcome
from perf.measure.connection import ROOT
from perf.tell.results import Results
from tests.slow_copy import copy_strategies, make_slow
from tests.suite_runs import SINGLE
from tools.compare import main, pytest_arguments


def test_one_build_is_compared_with_this_checkout():
    assert pytest_arguments(["HEAD"]) == ["perf", "--perf-ab=HEAD"]


def test_every_word_becomes_an_option_that_pytest_understands_in_the_root_of_this_checkout(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "one" / "strategies").mkdir(parents=True)
    (tmp_path / "cells.toml").write_text(
        '[[cells]]\nstrategy = "ddp"\nsize = "tiny"\nmode = "eager"\nworld_size = 2\nlink = "gloo"\n'
    )
    words = ["one", sys.executable, "-k", "ddp and eager", "--pairs", "2", "--matrix", "cells.toml"]
    words += ["--preset", "lenient", "--into", "here", "--env", "A=1", "--env", "B=2", "--", "--perf-steps", "20", "-x"]
    assert pytest_arguments(words) == [
        "perf",
        "-kddp and eager",
        f"--perf-ab={tmp_path / 'one'}",
        f"--perf-candidate={sys.executable}",
        "--perf-pairs=2",
        f"--perf-matrix={tmp_path / 'cells.toml'}",
        "--perf-preset=lenient",
        f"--perf-results={tmp_path / 'here'}",
        "--perf-ab-env=A=1",
        "--perf-ab-env=B=2",
        "--perf-steps",
        "20",
        "-x",
    ]


def test_variable_alone_is_compared_with_its_absence():
    assert pytest_arguments(["--env", "NCCL_P2P_DISABLE=1"]) == ["perf", "--perf-ab-env=NCCL_P2P_DISABLE=1"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("", "nothing to compare: name A"),
        ("-- --perf-steps 20", "nothing to compare: name A"),
        ("no_such_build", "no_such_build: no Python interpreter"),
        ("HEAD no_such_build", "no_such_build: no Python interpreter"),
        (300 * "a", "aaa: File name too long"),
        ("HEAD --pairs 0", "--pairs 0: must be at least 1"),
        ("HEAD --pairs many", "invalid int value: 'many'; --help shows all options"),
        ("HEAD --preset none", "--preset none: unknown; known: default"),
        ("HEAD --matrix none", "no matrix 'none'"),
        ("HEAD --env NAME", "--env NAME: write NAME=VALUE"),
        (". ", "is this very build"),
        ("HEAD --such", "unrecognized arguments: --such"),
    ],
)
def test_mistake_is_one_line_and_nothing_is_run(words, says, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert main(words.split()) == 2
    said = capsys.readouterr()
    assert says in said.err
    assert len(said.err.splitlines()) == 1
    assert not said.out


def test_slower_build_gives_the_exit_code_of_pytest_and_its_output(tmp_path, monkeypatch):
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    make_slow(copy_strategies(tmp_path / "slow"))
    (tmp_path / "baselines").mkdir()
    override = '[[override]]\ncells = "*"\ncap = 0.9\npair_floor = 0.5\nreason = "one pair of a tiny cell"\n'
    (tmp_path / "baselines" / "overrides.toml").write_text(override)
    words = [ROOT, tmp_path / "slow", "-k", "single", "--matrix", "smoke", "--pairs", "1", "--into", tmp_path / "runs"]
    passed_on = [f"--perf-baselines={tmp_path / 'baselines'}", "--perf-no-evidence", "--perf-warmup=2"]
    command = [sys.executable, "-m", "tools.compare", *map(str, words), "--", *passed_on, "--perf-steps=4"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 1, result.stdout + result.stderr
    assert f"REGRESSED   {SINGLE} | step time" in result.stdout
    (folder,) = (tmp_path / "runs").iterdir()
    (verdict,) = Results(folder).verdicts()
    assert (verdict.outcome, verdict.num_pairs) == (Outcome.REGRESSED, 1)
    assert Results(folder).manifest().plan.timed_steps == 4
