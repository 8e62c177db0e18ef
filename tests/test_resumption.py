"""Room perf/resumption.py: what a test run has is read before anything is measured, and refused as a whole."""

import json
import shutil
import subprocess

import pytest
from msgspec.structs import replace

from perf import resumption
from perf.facts import environment as room
from perf.facts.environment import Source, telling_variables
from perf.facts.failure import NotResumable
from perf.facts.fault import Fault
from perf.facts.hardware import link_variables, this_node
from perf.measure.connection import ROOT
from perf.measure.reference import Reference
from perf.settings import Settings
from perf.tell.results import Manifest, Results
from tests import nodes
from tests.factory import PLAN, cell, environment, run_record

NODE, DDP = this_node(), cell()
HERE = Source(ROOT, "c0ffee")


@pytest.fixture
def settings(tmp_path):
    return Settings(
        matrix="smoke", plan=PLAN, baselines=tmp_path, state=tmp_path, deadline_s=60.0, commit="c0ffee"
    )  # fmt: skip


def run(source=HERE, **changes):
    env = environment(NODE.machine_for(DDP), variables=telling_variables() | link_variables(DDP.link))
    env = replace(env, commit=source.commit, dirty=source.dirty, digest=source.digest)
    return run_record(DDP, env=replace(env, **changes))


@pytest.fixture
def results(tmp_path):
    """A test run of one cell, as this tree would have made it a moment ago."""
    made = Results(tmp_path / "results" / "run")
    made.write_manifest(Manifest(run_id="run", started_at="2026-11-30", matrix="smoke", plan=PLAN, cells=(DDP,)))
    made.write_run(run())
    return made


def test_test_run_of_this_tree_and_machine_goes_on(results, settings):
    resumption.check(results, settings, NODE)
    resumption.check(results, replace(settings, plan=replace(PLAN, runs=9)), NODE)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"commit": "dead"}, "commit dead when measured, c0ffee now"),
        ({"dirty": True}, "uncommitted changes True when measured, None now"),
        ({"variables": {"OMP_X": "1"}}, "variable OMP_X 1 when measured, unset now"),
        ({"digest": "0123"}, f"sources 0123 when measured, {HERE.digest} now"),
        ({"machine": nodes.H200S}, f"machine {nodes.H200S.key} when measured, {NODE.machine_for(DDP).key} now"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_other_code_or_machine_is_refused(results, settings, changes, says):
    results.write_run(replace(run(**changes), index=1))
    with pytest.raises(NotResumable) as caught:
        resumption.check(results, settings, NODE)
    assert str(caught.value) == f"{results.folder}: {DDP.id}: {says}; start a new test run"


def test_cell_that_cannot_run_here_any_more_is_refused(results, settings):
    of = cell(size="0.6b", world_size=512, link="native")
    results.write_manifest(replace(results.manifest(), cells=(of,)))
    results.write_run(replace(run(machine=NODE.machine_for(of)), cell=of))
    shutil.rmtree(results.folder / "runs" / DDP.id)
    with pytest.raises(NotResumable, match=r"machine .* when measured, needs 512 GPUs, sees"):
        resumption.check(results, settings, NODE)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"fault": Fault.parse("slow_step=1")}, "measured with no fault planted, now slow_step=1"),
        (
            {"plan": replace(PLAN, timed_steps=7)},
            r"was measured with 3 runs of 5 \+ 10 steps, not with 3 runs of 5 \+ 7",
        ),
        ({"reference": Reference(said="main")}, "was measured with nothing beside, not suspicious cells of this check"),
    ],
    ids=["fault", "plan", "reference"],
)
def test_other_question_is_refused(results, settings, changes, says):
    with pytest.raises(NotResumable, match=says):
        resumption.check(results, replace(settings, **changes), NODE)


def test_copy_for_one_report_is_never_gone_on_with(results, settings):
    results.write_manifest(replace(results.manifest(), gathered=("one", "two")))
    with pytest.raises(NotResumable, match="is a copy of one, two, for one report; resume one of these"):
        resumption.check(results, settings, NODE)


def test_runs_that_are_no_cells_of_this_test_run_are_named(results, settings):
    other = replace(DDP, label="b")
    results.write_run(replace(run(), cell=other))
    with pytest.raises(ValueError, match=f"has runs of {other.id}, which its manifest lacks"):
        resumption.check(results, settings, NODE)
    folder = results.folder / "runs"
    (folder / other.id / "0.json").rename(folder / DDP.id / "0.json")
    (folder / other.id).rmdir()
    with pytest.raises(ValueError, match=rf"runs/{DDP.id}/0\.json is a record of another cell"):
        resumption.check(results, settings, NODE)


EVERY_KIND = ["runs/DDP/0", "reference/DDP/0", "verdicts/DDP", "shift", "preflight", "evidence/DDP/candidate"]


@pytest.mark.parametrize("name", [f"{kind}.json" for kind in EVERY_KIND])
def test_damaged_file_is_named_also_of_a_cell_that_is_not_selected(results, settings, name):
    path = results.folder / name.replace("DDP", DDP.id)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{")
    with pytest.raises(ValueError, match=str(path)):
        resumption.check(results, settings, NODE)


def test_reference_folder_that_git_does_not_know_has_changed(results, settings, tmp_path):
    folder = tmp_path / "other"
    shutil.copytree(ROOT / "strategies", folder / "strategies")
    settings = replace(settings, reference=Reference(said="other", folder=str(folder)))
    results.write_manifest(replace(results.manifest(), beside=settings.beside))
    results.write_reference_run(run(Source(folder)))
    resumption.check(results, settings, NODE)
    (folder / "strategies" / "new.py").write_text("")
    with pytest.raises(NotResumable, match="sources "):
        resumption.check(results, settings, NODE)


def test_reference_of_a_commit_is_the_last_that_changed_more_than_baselines(tmp_path):
    """As in the worktree that will be made of it."""

    def git(*arguments):
        said = ("-c", "user.name=x", "-c", "user.email=x@y")
        done = subprocess.run(["git", "-C", tmp_path, *said, *arguments], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    git("init", "-q")
    for name in ("code", "baselines/a", "more"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
        git("add", ".")
        git("commit", "-qm", name)
    commits = git("rev-list", "--reverse", "HEAD").split()
    found = Source(tmp_path, revision=commits[1])
    assert (found.commit, found.dirty, found.digest) == (commits[0], False, None)


def test_self_test_of_other_code_is_refused(tmp_path, settings):
    made = Results(tmp_path / "results" / "selftest-run")
    made.write_sample(run())
    resumption.check_selftest(made, settings, NODE)
    path = made.folder / "selftest" / DDP.id / "0.json"
    text = json.loads(path.read_text())
    text["environment"]["commit"] = "dead"
    path.write_text(json.dumps(text))
    with pytest.raises(NotResumable, match="commit dead when measured"):
        resumption.check_selftest(made, settings, NODE)


def test_digest_is_of_what_is_measured_and_of_what_measures(tmp_path, monkeypatch):
    (tmp_path / "strategies").mkdir()
    asked = []
    monkeypatch.setattr(room, "digest", lambda folder: asked.append(folder) or "0123456789abcdef")
    assert Source(tmp_path).digest == "0123456701234567"
    assert asked == [tmp_path / "strategies", ROOT / "perf"]
