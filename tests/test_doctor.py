"""tools.doctor: what it prints of this machine for real, its exit codes, and the page of an ill node."""

import io
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from msgspec.structs import replace
from rich.console import Console

from perf.facts import jsonfile
from perf.facts.hardware import Node, this_node
from perf.facts.matrix import smoke
from perf.facts.rates import KINDS
from perf.judge import baseline as baselines
from perf.judge.preflight import Preflight, compare
from perf.measure.connection import ROOT
from perf.measure.lease import Lease
from perf.tell.sections import show
from tests import nodes
from tests.factory import gpu_use
from tools import doctor
from tools.doctor import conclusion, exit_code, main, page

AS_CPU = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
COMMAND = [sys.executable, "-m", "tools.doctor"]


@dataclass(frozen=True, kw_only=True)
class Visit:
    """One run of the door."""

    exit_code: int
    out: str
    err: str
    folder: Path


@pytest.fixture(scope="module")
def visit(tmp_path_factory) -> Visit:
    """A real one, which first has to wait until this process gives the node back."""
    folder = tmp_path_factory.mktemp("doctor")
    options = ["--matrix", "auto", "--json", str(folder / "a" / "node.json"), "--results", str(folder / "run")]
    with (folder / "err").open("w") as err, (folder / "out").open("w") as out:
        with Lease("a test", lambda _: None):
            process = subprocess.Popen([*COMMAND, *options], cwd=ROOT, env=AS_CPU, stdout=out, stderr=err)
            deadline = time.monotonic() + 60
            while not (folder / "err").read_text() and time.monotonic() < deadline:
                time.sleep(0.1)
        process.wait(timeout=240)
    out, err = ((folder / name).read_text() for name in ("out", "err"))
    return Visit(exit_code=process.returncode, out=out, err=err, folder=folder)


def test_healthy_cpu_is_fit_and_told_in_full(visit):
    assert visit.exit_code == 0, visit.err
    node = replace(this_node(), gpus=())
    for says in (node.machine.key, node.cpu, "GEMM", "launch rate", "all-reduce of 4 MiB", "p2p of 4 MiB", "/dev/shm"):
        assert says in visit.out
    assert "FIT to measure; ceilings of a CPU are shown, not compared" in visit.out
    assert "s for the server of ranks" in visit.out
    assert "\x1b" not in visit.out, "no colours where nobody watches"


def test_door_waits_for_the_lease_and_says_once_for_whom(visit):
    (line,) = visit.err.splitlines()
    assert line.startswith(f"waiting for process {os.getpid()}, which has held the node for ")


def test_every_cell_of_the_matrix_is_listed_as_it_would_run_here(visit):
    lines = [line.split() for line in visit.out.splitlines()]
    runs = {line[1] for line in lines if line[:1] == ["runs"]}
    skipped = {line[1]: " ".join(line[2:]) for line in lines if line[:1] == ["skipped"]}
    eager = {cell.id for cell in smoke() if not cell.layout.compiled}
    assert eager <= runs
    assert skipped["ddp-0.6b-eager-w2-native"] == "needs 2 GPUs, sees 0"
    assert f"cells of auto: {len(runs)} can run here, {len(skipped)} cannot" in visit.out


def test_record_is_written_where_it_was_asked_for(visit):
    written = jsonfile.read(visit.folder / "a" / "node.json", Preflight)
    assert written.ceilings.gemm_flop_per_s.is_measured
    assert jsonfile.read(visit.folder / "run" / "preflight.json", Preflight) == written
    assert sorted(path.name for path in visit.folder.rglob("*.json")) == ["node.json", "preflight.json"]


def test_nothing_measured_is_exit_code_8_with_the_reason(tmp_path):
    """A torch that cannot be imported; the door itself needs none."""
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        COMMAND, cwd=ROOT, env=AS_CPU | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 8, done.stderr
    assert "NOTHING MEASURED: REFUSED" in done.stdout
    assert "no torch here" in done.stdout


@pytest.fixture
def examined(monkeypatch):
    """Has the door find a made-up node instead of measuring this one."""

    def find(preflight):
        monkeypatch.setattr(doctor, "this_node", lambda: Node(cpu="Test CPU", cpu_cores=64, gpus=nodes.VISIBLE))
        monkeypatch.setattr(doctor, "examine", lambda *_, **__: preflight)

    return find


def test_node_below_its_record_is_not_comparable(examined, tmp_path, capsys):
    baselines.write(tmp_path, nodes.recorded())
    examined(nodes.preflight())
    assert main(["--baselines", str(tmp_path)]) == 0
    assert "FIT to measure: reaches the ceilings recorded on 2026-11-28" in capsys.readouterr().out
    examined(nodes.preflight(ceilings=nodes.ceilings(gemm_flop_per_s=nodes.rate(640e12, 1))))
    assert main(["--baselines", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert f"NOT COMPARABLE with the ceilings of {nodes.H200S.key}\n  GEMM 640 TFLOP/s is 80.7 % of" in out
    (row,) = (line for line in out.splitlines() if line.startswith("  GEMM  "))
    assert row.split() == ["GEMM", "640", "TFLOP/s", "1.0", "%", "20", "793", "TFLOP/s", "80.7", "%", "5", "%"]


def test_node_without_a_record_is_told_how_to_record_one(examined, tmp_path, capsys):
    examined(nodes.preflight())
    assert main(["--baselines", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert f"no ceilings of {nodes.H200S.key} are recorded" in out
    assert "python -m tools.approve --ceilings preflight.json" in out


def test_damaged_record_and_unknown_matrix_are_one_line_and_exit_code_2(examined, tmp_path, capsys):
    examined(nodes.preflight())
    path = baselines.write(tmp_path, nodes.recorded())
    assert main(["--baselines", str(tmp_path), "--matrix", "nonsense"]) == 2
    assert "error: no matrix 'nonsense'; known: auto, smoke, node" in capsys.readouterr().err
    path.write_text(path.read_text().replace("793", "794", 1))
    assert main(["--baselines", str(tmp_path)]) == 2
    assert f"error: {path}: checksum" in capsys.readouterr().err


HOT = replace(gpu_use("GPU-1", used_bytes=2**30), throttled=("hardware thermal slowdown",))


@pytest.mark.parametrize(
    ("changes", "code", "says"),
    [
        ({}, 0, "FIT to measure"),
        ({"shared_memory_free_bytes": 2**26}, 0, "FIT to measure"),
        ({"gpus": (nodes.gpu_health(power_limit_w=500),)}, 0, "FIT to measure"),
        ({"gpus": (nodes.gpu_health(foreign_pids=(4711,)),)}, 1, "used by process 4711"),
        ({"gpus": (nodes.gpu_health(uncorrected_ecc_errors=1),)}, 1, "1 uncorrected ECC errors"),
        ({"gpus": (nodes.gpu_health(remap_pending=True),)}, 1, "reset the GPU"),
        ({"gpus": (nodes.gpu_health(1),), "uses": (HOT,)}, 1, "throttled: hardware thermal slowdown"),
        ({"ceilings": nodes.ceilings(p2p_bytes_per_s=nodes.rate(None))}, 1, "p2p of 256 MiB: not measured"),
        ({"ceilings": nodes.ceilings(launches_per_s=nodes.rate(200e3))}, 1, "launch rate 200 k/s is 79.7 %"),
        ({"ceilings": None, "failure": "OOM: rank 0"}, 8, "NOTHING MEASURED: OOM: rank 0"),
        (
            {"ceilings": None, "failure": "OOM: rank 0", "gpus": (nodes.gpu_health(foreign_pids=(4711,)),)},
            1,
            "used by process 4711",
        ),
    ],
)
def test_exit_code_and_conclusion_follow_from_the_worst_there_is(changes, code, says):
    found = nodes.preflight(**changes)
    reasons = compare(found, nodes.recorded()) if found.ceilings else []
    assert exit_code(found, reasons) == code
    text = conclusion(found, nodes.recorded(), reasons)
    assert says in text
    assert text.startswith("FIT") == (code == 0)


def test_missing_rate_is_wrong_also_without_a_record():
    found = nodes.preflight(ceilings=nodes.ceilings(gemm_flop_per_s=nodes.rate(0.0)))
    assert exit_code(found, []) == 1
    assert "GEMM: 0 is no measured value" in conclusion(found, None, [])


def test_page_tells_unknown_where_the_driver_was_silent():
    silent = replace(nodes.gpu_health(), **dict.fromkeys(nodes.DRIVERS_WORDS))
    sections = {section.title.split()[0]: section for section in page(nodes.preflight(gpus=(silent,), uses=()), None)}
    (row,) = sections["GPUs"].rows
    assert all("unknown" in text for text in row[1:])
    assert {severity for severity, _ in sections["findings"].rows} == {"unknown"}


def test_same_page_is_a_table_on_a_terminal_and_columns_elsewhere(capsys):
    sections = page(nodes.preflight(shared_memory_free_bytes=0), nodes.recorded())
    file = io.StringIO()
    show(sections, Console(file=file, force_terminal=True, width=200))
    show(sections, None)
    plain, table = capsys.readouterr().out, file.getvalue()
    assert "\x1b" in table
    assert "\x1b" not in plain
    for says in ("node1", "GEMM", "793 TFLOP/s", "GPU-1", "1980 of 1980 MHz", "0 MiB free"):
        assert says in plain
        assert says in table
    assert len([line for line in plain.splitlines() if "100.0 %" in line]) == len(KINDS)
