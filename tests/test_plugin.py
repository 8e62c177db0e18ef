"""perf.plugin: `pytest perf` as its users run it, in a pytest of its own with real ranks."""

import json
import shutil
import xml.etree.ElementTree as ET
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from perf.facts import jsonfile
from perf.facts.matrix import cells_of
from perf.facts.outcome import Outcome
from perf.judge import baseline as baselines
from perf.judge.baseline import Baseline, Invariants
from perf.measure.connection import ROOT
from perf.plugin import CELLS, selected_cells
from tests.factory import H200X2
from tests.suite_runs import DDP, SINGLE, SuiteRuns, seed_that_begins_with


def test_collection_names_every_cell_and_writes_nothing(suite_runs):
    outcomes = suite_runs.run("--collect-only", "-q", "--perf-matrix=auto", cache=False)
    assert outcomes.exit_code == 0
    assert [line.split("[")[1].rstrip("]") for line in outcomes.text.splitlines() if "::" in line] == [
        cell.id for cell in cells_of("auto")
    ]
    assert not (suite_runs.root / "results").exists()


TIMEOUTS = ("0", "-1", "inf", "nan", "1e+300")


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("--perf-matrix=nonsense", "no matrix 'nonsense'; known: auto, smoke, node"),
        ("--perf-allow=regressed", "--perf-allow regressed: not an outcome without a verdict; known: environment"),
        ("--perf-plant=nonsense", "cannot plant 'nonsense'"),
        ("--perf-plant=", "cannot plant ''"),
        (
            "--perf-plant=truncated=10",
            "--perf-plant truncated=10: leaves every timed step of --perf-steps 10; name fewer",
        ),
        ("--perf-plant=truncated=9 --perf-soak=9", "leaves every timed step of --perf-soak 9"),
        ("--perf-runs=0", "--perf-runs 0: must be at least 1 run"),
        ("--perf-soak=1000001", "--perf-soak 1000001: must be at least 1 timed step and at most 1000000"),
        ("--perf-steps=0", "--perf-steps 0: must be at least 1 timed step"),
        ("--perf-warmup=-1", "--perf-warmup -1: must be at least 1 warm-up step"),
        ("--perf-seed=1.5", "argument --perf-seed: invalid int value: '1.5'"),
        ("--perf-results=" + 300 * "a", "aaa: File name too long"),
        ("--perf-preset=strict", "--perf-preset strict: unknown; known: default, sensitive, lenient"),
        ("--perf-ab=no_such_ref", "--perf-ab no_such_ref: no Python interpreter"),
        (f"--perf-ab={ROOT}", "is this very build; nothing would be compared with nothing"),
        ("--perf-ab-env=NAME", "--perf-ab-env NAME: write NAME=VALUE"),
        ("--perf-ab-env=A=1 --perf-ab-env=A=2", "--perf-ab-env A=2: write NAME=VALUE, each name once"),
        ("--perf-ab=", "--perf-ab an empty name; give a git ref"),
        ("--perf-ab=HEAD --perf-candidate=", "--perf-candidate an empty name; give a git ref"),
        ("--perf-ab=" + 300 * "a", "aaa: File name too long"),
        ("--perf-resume=" + 300 * "a", "aaa: File name too long"),
        ("--perf-candidate=HEAD", "--perf-candidate goes with --perf-ab"),
        (f"--perf-results={ROOT / 'README.md'}", "README.md is no folder"),
        (f"--perf-state={ROOT / 'README.md/state'}", "README.md is no folder"),
        ("--perf-baselines=nowhere", "--perf-baselines nowhere: no such folder"),
        ("--perf-soak=90 --perf-runs=2", "--perf-soak makes one long run of each cell"),
        ("--perf-selftest --perf-ab-env=A=B", "--perf-selftest measures one build"),
        ("--perf-profile --perf-no-evidence", "give one of them"),
        ("--perf-pairs=0", "--perf-pairs 0: must be at least 1"),
        ("--perf-pairs=4", "--perf-pairs goes with --perf-ab or --perf-ab-env"),
        ("--perf-pairs=4 --perf-reference=HEAD", "--perf-pairs goes with --perf-ab or --perf-ab-env"),
        ("--perf-ab-env=A=B --perf-runs=5", "its runs are pairs: --perf-pairs N"),
        ("--perf-soak=0", "--perf-soak 0: must be at least 1 timed step"),
        ("--perf-time-budget=soon", "time budget 'soon': write 2h"),
        *((f"--perf-timeout={odd}", f"--perf-timeout {odd}: must be more than 0 seconds") for odd in TIMEOUTS),
        ("--perf-checkpoint=nowhere", "no folder with *.safetensors"),
        ("--perf-resume=nowhere", "nowhere is not a test run"),
    ],
)
def test_bad_option_is_one_usage_error_and_writes_nothing(suite_runs, option, says):
    outcomes = suite_runs.run(*option.split(), plan=())
    assert outcomes.exit_code == pytest.ExitCode.USAGE_ERROR
    assert says in outcomes.text
    assert "Traceback" not in outcomes.text
    assert outcomes.results is None


def test_overrides_that_contradict_each_other_for_a_cell_are_one_usage_error(suite_runs):
    text = "".join(
        f'[[override]]\ncells = "{cells}"\n{number}\nreason = "a"\n'
        for cells, number in (("ddp-*", "cap = 0.04"), ("*-w2-*", "floor = 0.05"))
    )
    (suite_runs.baselines / "overrides.toml").write_text(text)
    outcomes = suite_runs.run(plan=())
    assert outcomes.exit_code == pytest.ExitCode.USAGE_ERROR
    assert f"overrides.toml: {DDP}: its overrides together cannot be met" in outcomes.text
    assert outcomes.results is None


def test_unknown_strategy_in_a_file_is_refused_with_the_known_ones(suite_runs):
    suite_runs.matrix.write_text(suite_runs.matrix.read_text().replace('"ddp"', '"dpp"'))
    outcomes = suite_runs.run()
    assert outcomes.exit_code == pytest.ExitCode.USAGE_ERROR
    assert "known: single, ddp, zero1" in outcomes.text


def test_selection_of_nothing_is_not_green(suite_runs):
    outcomes = suite_runs.run("-k", "no_such_cell")
    assert outcomes.exit_code == pytest.ExitCode.NO_TESTS_COLLECTED
    assert outcomes.results is None


def test_cells_that_cannot_run_here_are_skipped_with_the_arithmetic(suite_runs, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    bad = suite_runs.matrix.read_text().replace('strategy = "ddp"', 'strategy = "ddp"\nmicro_batch = 3')
    suite_runs.matrix.write_text(bad.replace("world_size = 1", "world_size = 1\nmicro_batch = 5"))
    outcomes = suite_runs.run("-rs")
    assert "8 sequences a step do not divide into data degree 2 x micro-batch 3 = 6" in outcomes.text
    assert outcomes.exit_code == 8, "nothing ran"
    outcomes = suite_runs.run("--perf-matrix=node", "-k", "ddp and 1.7b and compile")
    assert outcomes.by_cell == {"ddp-1.7b-compile-w2-native": Outcome.UNSUPPORTED}
    assert "needs 2 GPUs, sees 0" in outcomes.text


def test_first_run_says_that_nothing_was_compared(suite_runs):
    outcomes = suite_runs.run()
    assert outcomes.exit_code == 8
    assert set(outcomes.by_cell.values()) == {Outcome.NO_BASELINE}
    assert not suite_runs.state.joinpath("baselines").exists()
    assert not list(suite_runs.baselines.iterdir())


def test_provisional_baseline_is_recorded_loudly_and_compared_with_next_time(suite_runs):
    first = suite_runs.record()
    assert "no baseline on this machine" in first.text
    assert "2 cells had no timing baseline on this machine" in first.text
    recorded = suite_runs.baseline_path(DDP).read_bytes()
    second = suite_runs.run("--perf-provisional", "--perf-allow=noisy")
    assert Outcome.NO_BASELINE not in second.by_cell.values()
    assert "3 runs vs 3 (provisional)" in second.text
    assert suite_runs.baseline_path(DDP).read_bytes() == recorded, "a test run never updates a baseline"
    assert not list(suite_runs.baselines.iterdir())
    for name in ("report.md", "report.html", "throughput.png", "step_time.png", "peak_memory.png"):
        assert (second.results.folder / name).stat().st_size > 0


@pytest.fixture
def regressed(suite_runs) -> SuiteRuns:
    """Both cells have a baseline; ddp's is ten times as fast as it really is, single's three times as slow."""
    suite_runs.be_recorded()
    suite_runs.be_steady(DDP, factor=0.1)
    suite_runs.be_steady(SINGLE, factor=3.0)
    return suite_runs


def test_regression_is_a_red_test_with_the_whole_comparison(regressed):
    report = regressed.root / "junit.xml"
    outcomes = regressed.run(f"--junitxml={report}", f"--benchmark-json={regressed.root / 'benchmark.json'}")
    assert outcomes.exit_code == 1
    assert outcomes.by_cell == {DDP: Outcome.REGRESSED, SINGLE: Outcome.IMPROVED}
    assert "python -m tools.approve" in outcomes.text
    assert "--accept-regression --reason" in outcomes.text
    cases = {case.get("name"): case for case in ET.parse(report).iter("testcase")}
    failure = cases[f"test_cell[{DDP}]"].find("failure")
    assert failure is not None
    assert "REGRESSED" in failure.get("message", "")
    assert "step time" in failure.get("message", "")
    properties = {p.get("name"): p.get("value") for p in cases[f"test_cell[{SINGLE}]"].iter("property")}
    assert properties["outcome"] == "IMPROVED"
    shown = json.loads((regressed.root / "benchmark.json").read_text())["benchmarks"]
    assert {row["extra_info"]["cell"]: row["stats"]["rounds"] for row in shown} == {DDP: 24, SINGLE: 12}
    assert "6 runs vs 9 (+" in outcomes.text
    lines = [line.split()[:2] for line in outcomes.text.splitlines()]
    assert lines.index(["SUSPICIOUS", DDP]) < lines.index(["REGRESSED", DDP])
    assert lines.index(["IMPROVED", SINGLE]) < lines.index(["REGRESSED", DDP]), "others have their turn first"
    assert float(cases[f"test_cell[{DDP}]"].get("time")) > sum(run.wall_s for run in outcomes.results.runs(DDP))


@pytest.mark.parametrize("first", [DDP, SINGLE])
def test_first_failure_stops_with_x_and_the_rest_is_named(regressed, first):
    """A suspicious cell waits for its second look, which an earlier failure prevents."""
    (other,) = {DDP, SINGLE} - {first}
    path = regressed.baseline_path(SINGLE)
    path.write_text(path.read_text()[:400])
    outcomes = regressed.run("-x", f"--perf-seed={seed_that_begins_with(first)}")
    assert outcomes.exit_code == 1
    assert outcomes.by_cell == {SINGLE: Outcome.ERROR, DDP: Outcome.NOT_RUN}
    assert (f"SUSPICIOUS  {DDP}" in outcomes.text) is (first == DDP)
    assert (f"NOT_RUN      {DDP}" in outcomes.text or f"NOT_RUN  {DDP}" in outcomes.text) is True
    assert other in outcomes.text


@pytest.mark.long
def test_suspicious_cell_before_a_test_of_another_module_does_not_wait(regressed):
    """pytest has its module set up for it, and the next one would find that in its way."""
    other = regressed.root / "test_other.py"
    other.write_text("def test_other():\n    pass\n")
    outcomes = regressed.run(str(other), f"--perf-seed={seed_that_begins_with(SINGLE)}")
    assert outcomes.by_cell == {DDP: Outcome.REGRESSED, SINGLE: Outcome.IMPROVED}, outcomes.text
    assert "1 failed, 2 passed" in outcomes.text


@pytest.mark.long
def test_last_failed_runs_only_what_failed(regressed):
    regressed.run()
    outcomes = regressed.run("--lf")
    assert outcomes.by_cell == {DDP: Outcome.REGRESSED}


def test_xdist_measures_everything_and_says_the_same(regressed):
    outcomes = regressed.run("-n", "2")
    assert outcomes.exit_code == 1
    assert outcomes.by_cell == {DDP: Outcome.REGRESSED, SINGLE: Outcome.IMPROVED}
    assert {cell_id: len(outcomes.results.runs(cell_id)) for cell_id in (DDP, SINGLE)} == {DDP: 6, SINGLE: 3}
    assert f"REGRESSED   {DDP}" in outcomes.text


@pytest.mark.long
def test_verdicts_are_whole_without_benchmarks_and_nothing_unmeasured_passes(regressed):
    outcomes = regressed.run("--benchmark-disable")
    assert outcomes.by_cell == {DDP: Outcome.REGRESSED, SINGLE: Outcome.IMPROVED}
    skipped = regressed.run("--benchmark-skip")
    assert skipped.exit_code == 8
    assert set(skipped.by_cell.values()) == {Outcome.NOT_RUN}


def test_damaged_baseline_fails_its_cell_before_anything_is_measured(regressed):
    path = regressed.baseline_path(DDP)
    path.write_text(path.read_text()[:400])
    outcomes = regressed.run("-k", "ddp")
    assert outcomes.exit_code == 1
    assert outcomes.by_cell == {DDP: Outcome.ERROR}
    assert path.name in outcomes.text
    assert not outcomes.results.runs(DDP)


def test_another_machines_baseline_is_never_used(regressed):
    path = regressed.baseline_path(DDP)
    other = path.parent.with_name("2x-nvidia-h100-80gb-hbm3-80gib-700w")
    shutil.move(path.parent, other)
    assert set(regressed.run().by_cell.values()) == {Outcome.NO_BASELINE}
    shutil.copytree(other, path.parent)
    jsonfile.write(path, replace(baselines.read(path, Baseline), machine=H200X2).sealed())
    assert regressed.run("-k", "ddp").by_cell == {DDP: Outcome.ERROR}


def test_cell_that_departs_from_its_invariants_never_becomes_a_provisional_baseline(suite_runs):
    """Wrong without a planted fault: the recorded ledger differs, and there is no timing baseline yet."""
    suite_runs.be_recorded()
    suite_runs.baseline_path(DDP).unlink()
    (path,) = suite_runs.state.glob(f"baselines/invariants/{DDP}.json")
    recorded = baselines.read(path, Invariants)
    jsonfile.write(path, replace(recorded, ledger=()).sealed())
    outcomes = suite_runs.run("-k", "ddp", "--perf-provisional")
    assert outcomes.by_cell == {DDP: Outcome.WRONG}
    assert not list(suite_runs.state.glob(f"baselines/cpu-*/{DDP}.json"))


def test_baseline_that_no_cell_uses_is_listed(regressed):
    path = regressed.baseline_path(DDP)
    shutil.copyfile(path, path.with_name("hsdp-7b-compile-w2x2-native.json"))  # of a matrix file that comes along
    path.rename(path.with_name("ddp-tiny-eager-w2-renamed.json"))
    outcomes = regressed.run("-k", "ddp")
    assert outcomes.by_cell == {DDP: Outcome.NO_BASELINE}
    assert "has baselines that no cell uses: ddp-tiny-eager-w2-renamed;" in outcomes.text


def test_only_tests_that_measure_count_as_cells():
    """Another test may have a parameter of this name: its cell is not expected to have a result."""
    of = cells_of("smoke")[0]
    spec = SimpleNamespace(params={"cell": of})
    items = [SimpleNamespace(callspec=spec, fixturenames=names) for names in (["bench", "cell"], ["cell"])]
    config = SimpleNamespace(stash={CELLS: cells_of("smoke")})
    assert selected_cells(SimpleNamespace(items=items, config=config)) == [of]
