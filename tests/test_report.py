"""The report of a test run: made from its folder alone, with the records' own numbers, failing cells first."""

import csv
import html.parser
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from perf.facts.fault import Fault
from perf.facts.measurement import STEP_TIME, THROUGHPUT
from perf.facts.outcome import Outcome
from perf.judge.rule import Rule
from perf.judge.verdict import Verdict, judge
from perf.tell.render import quantity
from perf.tell.report import write_report
from perf.tell.results import Manifest, Results
from strategies.spec import LinkProfile, Mode, StrategyName
from tests import factory

ROOT = Path(__file__).parents[1]
HOSTILE = (
    "CRASH: rank 1: ValueError: <script>alert('x')</script> | `tick` ``` \x1b[31mred\x1b[0m\nTraceback of many lines"
)
DDP = factory.cell()
FSDP2 = factory.cell(StrategyName.FSDP2)
BROKEN = factory.cell(mode=Mode.COMPILE)
ON_GPUS = factory.cell(size="0.6b", world_size=8, link=LinkProfile.NATIVE)


def manifest(*cells, run_id="2026-11-29T14-00-00"):
    return Manifest(
        run_id=run_id, started_at="2026-11-29T14:00:00+00:00", matrix="auto", plan=factory.PLAN, cells=tuple(cells)
    )


def judged(results, measurement, baseline):
    for run in measurement.runs:
        results.write_run(run)
    results.write_verdict(judge(measurement, baseline, factory.invariants(measurement.cell), Rule()))


@pytest.fixture
def results(tmp_path):
    """One cell passes, one regressed, one failed without a run, one is refused."""
    found = Results(tmp_path / "results" / "2026-11-29T14-00-00")
    found.write_manifest(manifest(DDP, FSDP2, BROKEN, ON_GPUS))
    judged(found, factory.measurement(DDP, step_times_s=(0.1, 0.09, 0.11)), factory.baseline(DDP))
    judged(found, factory.measurement(FSDP2, step_times_s=(0.31, 0.3, 0.33)), factory.baseline(FSDP2))
    found.write_verdict(Verdict(cell_id=BROKEN.id, outcome=Outcome.ERROR, reasons=(HOSTILE,)))
    reason = "needs 8 GPUs, sees 0"
    found.write_verdict(Verdict(cell_id=ON_GPUS.id, outcome=Outcome.UNSUPPORTED, reasons=(reason,)))
    return found


def text_of(results, name="report.md"):
    write_report(results)
    return (results.folder / name).read_text(encoding="ascii")


def test_it_writes_the_page_the_text_the_runs_and_three_charts(results):
    names = ["report.md", "report.html", "runs.csv", "throughput.png", "step_time.png", "peak_memory.png"]
    assert [path.name for path in write_report(results)] == names
    assert all((results.folder / name).stat().st_size for name in names)


def test_the_headline_counts_and_failing_rows_come_first(results):
    text = text_of(results)
    assert "**2 of 4 cells failed: 1 ERROR, 1 REGRESSED, 1 PASS, 1 UNSUPPORTED.**" in text
    rows = [text.index(f"| {outcome} | ") for outcome in ("ERROR", "REGRESSED", "PASS", "UNSUPPORTED")]
    assert rows == sorted(rows)


def test_its_numbers_are_those_of_the_records(results):
    text = text_of(results)
    for measurement in results.measurements():
        times = [value for value in measurement.values(STEP_TIME) if value is not None]
        low, high = (quantity(value, STEP_TIME).removesuffix(" ms") for value in (min(times), max(times)))
        assert f"| {quantity(measurement.median(STEP_TIME), STEP_TIME)} [{low}, {high}] |" in text
        assert f"| {quantity(measurement.median(THROUGHPUT), THROUGHPUT)} [" in text
    with (results.folder / "runs.csv").open(encoding="ascii") as file:
        rows = list(csv.DictReader(file))
    assert [(row["cell"], row["run"], float(row["step_time_s"])) for row in rows] == [
        (run.cell.id, str(run.index), value)
        for measurement in results.measurements()
        for run, value in zip(measurement.runs, measurement.values(STEP_TIME), strict=True)
    ]


def test_ratios_and_order_are_relative_to_the_fastest_alike_cell(results):
    text = text_of(results)
    assert f"| {FSDP2.id} | 0.32 x | 1.00 x |" in text
    assert "tiny, 2 ranks on CPU, fastest first: ddp eager 5,120 tok/s > fsdp2 eager 1,652 tok/s" in text
    assert "least peak resident first: ddp eager 400.0 MiB ~ fsdp2 eager 400.0 MiB" in text


def test_cells_without_a_run_appear_with_their_reason(results):
    text = text_of(results)
    assert "UNSUPPORTED; needs 8 GPUs, sees 0 |" in text
    assert "Traceback of many lines" in text
    results.write_manifest(manifest(DDP, FSDP2, BROKEN, ON_GPUS, factory.cell(world_size=4)))
    assert "| NOT_RUN | ddp-tiny-eager-w4-gloo |" in text_of(results)


def test_wall_time_adds_up(results):
    row = next(line for line in text_of(results).splitlines() if line.startswith("| total |"))
    assert row == "| total | 0.6 s | 1.8 s | 6.0 s | 3.6 s | 12.0 s | 50 % |"


class Page(html.parser.HTMLParser):
    """What a browser would load or run."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.links, self.open = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [value for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_is_self_contained_and_escapes_what_a_run_printed(results):
    text = text_of(results, "report.html")
    page = Page(text)
    assert page.open == []
    assert "script" not in page.tags
    assert len(page.links) == 3
    assert all(link.startswith("data:image/png;base64,") for link in page.links)
    assert "&lt;script&gt;alert(" in text
    assert "@import" not in text
    assert "url(" not in text


def test_what_a_run_printed_cannot_break_the_markdown(results):
    text = text_of(results)
    row = next(line for line in text.splitlines() if line.startswith("| ERROR"))
    assert "&lt;script>" in row
    assert "\\|" in row
    assert f"````text\n{HOSTILE.replace(chr(27) + '[31m', '').replace(chr(27) + '[0m', '')}\n````" in text


def test_rebuilding_gives_the_same_bytes(results, tmp_path):
    first = {path.name: path.read_bytes() for path in write_report(results)}
    moved = tmp_path / "elsewhere" / results.folder.name
    shutil.copytree(results.folder, moved)
    for name in first:
        (moved / name).unlink()
    assert {path.name: path.read_bytes() for path in write_report(Results(moved))} == first


def test_planted_faults_and_dirty_trees_are_announced_and_never_acceptable(tmp_path):
    found = Results(tmp_path / "run")
    found.write_manifest(manifest(DDP))
    slow = factory.measurement(DDP, step_times_s=(0.2, 0.2, 0.2), env=factory.environment(dirty=True))
    runs = tuple(msgspec.structs.replace(run, fault=Fault.parse("slow_step=0.2@1")) for run in slow.runs)
    judged(found, msgspec.structs.replace(slow, runs=runs), factory.baseline(DDP))
    text = text_of(found)
    assert f"broken on purpose: slow_step=0.2@1 in {DDP.id}" in text
    assert "uncommitted changes: these numbers belong to no commit" in text
    assert "planted fault slow_step=0.2@1; REGRESSED |" in text
    assert "accept" not in text


def test_a_regression_says_how_to_accept_it(results):
    assert f"python -m tools.approve results/{results.folder.name} --accept-regression" in text_of(results)


def test_wrong_cells_are_no_reference_for_others(results):
    results.write_verdict(Verdict(cell_id=DDP.id, outcome=Outcome.WRONG, reasons=("the loss is not the model's",)))
    text = text_of(results)
    assert "Ratios within this test run" not in text
    assert "Fewer than two cells" in text


def test_an_empty_test_run_has_a_report(tmp_path):
    found = Results(tmp_path / "empty")
    found.write_manifest(manifest())
    assert [path.name for path in write_report(found)] == ["report.md", "report.html", "runs.csv"]
    text = (found.folder / "report.md").read_text(encoding="ascii")
    assert "**Nothing ran: this test run selected no cells.**" in text
    assert "No run has a value to draw." in text


def test_damaged_runs_do_not_stop_the_report(results):
    run = factory.run_record(DDP, index=3)
    results.write_run(factory.change_ranks(run, step_times_s=(), losses=(None,), start_gradient_norm=None))
    results.write_run(msgspec.structs.replace(factory.change_ranks(run, 1, step_times_s=(0.1,)), index=4))
    results.write_run(msgspec.structs.replace(run, index=5, ranks=(), environment=factory.environment(commit=None)))
    text = text_of(results)
    assert "| 100.0 ms [90.0, 110.0] |" in text
    assert "The commit of the measured source tree is unknown." in text
    assert "nan" not in text


def test_gpu_memory_is_shown_rank_by_rank_with_what_the_driver_counts(tmp_path):
    of = factory.cell(size="0.6b", link=LinkProfile.NATIVE)
    found = Results(tmp_path / "run")
    found.write_manifest(manifest(of))
    env = factory.environment(factory.H200X2)
    measured = factory.measurement(of, allocated_bytes=(69 * 2**30,) * 3, env=env)
    fuller = tuple(factory.gpu_use(uuid, used_bytes=used * 2**30) for uuid, used in (("GPU-a", 72), ("GPU-b", 75)))
    runs = tuple(msgspec.structs.replace(run, gpus=fuller) for run in measured.runs)
    judged(found, msgspec.structs.replace(measured, runs=runs), None)
    text = text_of(found)
    assert "| 69.00 69.00 GiB | 70.00 GiB [70.00, 70.00] | 75.00 GiB | 65.00 GiB | 0 |" in text
    assert "2x-nvidia-h200-140gib-700w: NVIDIA H200, 2 used, 140 GiB each, power limit 700 W" in text
    assert "Cells on gloo" not in text


def report_tool(*arguments, block_torch=False):
    block = "import sys; sys.modules['torch'] = None; import runpy; sys.argv[0] = 'report'; "
    start = (
        ["-c", block + "runpy.run_module('tools.report', run_name='__main__')"]
        if block_torch
        else ["-m", "tools.report"]
    )
    return subprocess.run(
        [sys.executable, *start, *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_the_tool_needs_no_torch(results):
    done = report_tool(results.folder, block_torch=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[0] == str(results.folder / "report.md")


def test_the_tool_refuses_what_is_no_test_run_and_damaged_records_in_one_line(results, tmp_path):
    (tmp_path / "other").mkdir()
    factory.write_text(results.folder / "runs" / DDP.id / "1.json", '{"schema_version": 1, "cell": ')
    for folder, part in ((tmp_path / "other", "is not a test run"), (results.folder, "1.json:1: broken JSON")):
        done = report_tool(folder)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith("error: ")
        assert part in done.stderr
        assert done.stderr.count("\n") == 1


def test_a_run_of_another_workload_is_refused(results):
    results.write_run(factory.run_record(factory.cell(micro_batch=4), index=1))
    with pytest.raises(ValueError, match="a record of another workload; restore the folder"):
        write_report(results)


def test_charts_and_table_have_both_builds_of_a_comparison(results):
    alone = [path.read_bytes() for path in write_report(results) if path.suffix == ".png"]
    for run in factory.measurement(DDP, step_times_s=(0.05,) * 3).runs:
        results.write_reference_run(msgspec.structs.replace(run, arm="reference"))
    both = [path.read_bytes() for path in write_report(results) if path.suffix == ".png"]
    assert len(both) == len(alone)
    assert all(now != then for now, then in zip(both, alone, strict=True))
    assert f"| {DDP.id} | reference |" in text_of(results)
