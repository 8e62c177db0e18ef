"""perf.measure.launch and perf.measure.server: runs of real ranks, and every way in which they end badly."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from perf.facts.cell import SamplingPlan
from perf.facts.failure import FailureKind, LaunchError
from perf.facts.fault import Fault
from perf.facts.job import ENTRY, Job
from perf.facts.record import RankRecord
from perf.measure.connection import ROOT
from perf.measure.launch import Launcher
from tests.factory import cell

PLAN_STEPS = 2


def job(fault: str | None = None, *, deadline_s: float = 60.0) -> Job:
    of = cell()
    plan = SamplingPlan(warmup_steps=3, timed_steps=PLAN_STEPS)
    planted = Fault.parse(fault) if fault else None
    return Job(cell=of, plan=plan, requested_at_s=time.monotonic(), deadline_s=deadline_s, fault=planted)


def run(launcher: Launcher, fault: str | None = None, *, deadline_s: float = 60.0) -> tuple[list[RankRecord], bool]:
    return launcher.run(
        ENTRY, job(fault, deadline_s=deadline_s), world_size=2, record=RankRecord, deadline_s=deadline_s
    )


def offspring(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True) if psutil.pid_exists(pid) else []


def gone(processes: list[psutil.Process], within_s: float) -> bool:
    return not psutil.wait_procs(processes, timeout=within_s)[1]


def test_healthy_run_gives_every_ranks_record(launcher):
    records, teardown_hang = run(launcher)
    assert [record.rank for record in records] == [0, 1]
    assert all(len(record.step_times_s) == PLAN_STEPS for record in records)
    assert not teardown_hang


def test_warm_run_reaches_its_first_step_within_a_second(launcher):
    run(launcher)
    records, _ = run(launcher)
    assert max(record.marks.built_s for record in records) < 1.0


@pytest.mark.parametrize(
    ("fault", "kind", "first_words"),
    [
        ("raise@1", FailureKind.CRASH, "rank 1: AssertionError: planted: grad mismatch layer 3"),
        ("exit=7@1", FailureKind.CRASH, "rank 1 exited with code 7"),
        ("kill@1", FailureKind.KILLED, "rank 1 was killed by SIGKILL, possibly out of memory"),
        ("out_of_memory@1", FailureKind.OOM, "rank 1: RuntimeError"),
    ],
)
def test_failure_is_named_and_leads_with_the_failing_ranks_own_error(launcher, fault, kind, first_words):
    launcher.start()
    begun = time.monotonic()
    with pytest.raises(LaunchError) as caught:
        run(launcher, fault)
    assert caught.value.kind is kind
    assert str(caught.value).startswith(f"{kind}: {first_words}")
    assert time.monotonic() - begun < 15
    run(launcher)


def test_hang_ends_at_the_deadline_with_stacks_and_without_orphans(launcher):
    server = launcher.start().pid
    begun = time.monotonic()
    with pytest.raises(LaunchError) as caught:
        run(launcher, "hang@1", deadline_s=4.0)
    assert time.monotonic() - begun < 4.0 + 8.0
    message = str(caught.value)
    assert message.startswith("HANG: timeout after 4 s, rank 1 in File")
    assert "fault.py" in message.splitlines()[0]
    assert "--- rank 0" in message
    assert not offspring(server)
    records, _ = run(launcher)
    assert len(records) == 2


def test_teardown_hang_keeps_the_measurement_and_says_so(launcher, monkeypatch):
    monkeypatch.setattr("perf.measure.launch.TEARDOWN_S", 1.0)
    records, teardown_hang = run(launcher, "teardown_hang@1")
    assert len(records) == 2
    assert teardown_hang


def test_scratch_is_empty_after_runs_and_gone_after_close():
    with Launcher() as own:
        run(own)
        with pytest.raises(LaunchError):
            run(own, "raise@0")
        scratch = own.start().scratch
        assert list(scratch.iterdir()) == []
    assert not scratch.exists()


def test_python_without_torch_is_refused_with_the_reason(tmp_path):
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    with Launcher(python=str(python)) as broken, pytest.raises(LaunchError) as caught:
        broken.start()
    assert caught.value.kind is FailureKind.REFUSED
    assert "Error" in str(caught.value)


def test_server_killed_in_a_run_is_an_error_and_the_next_run_gets_a_new_one():
    with Launcher() as own:
        server = own.start().pid
        killer = threading.Timer(1.5, os.kill, (server, signal.SIGKILL))
        killer.start()
        with pytest.raises(LaunchError, match="KILLED: the server process is gone"):
            run(own, "hang@1")
        assert not psutil.pid_exists(server)
        records, _ = run(own)
        assert len(records) == 2


def test_runs_at_once_never_meet_though_a_port_is_taken_and_inherited(monkeypatch):
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", 29500))
        listener.listen()
        with Launcher() as one, Launcher() as two, ThreadPoolExecutor() as pool:
            for _ in range(3):
                both = [future.result() for future in [pool.submit(run, one), pool.submit(run, two)]]
                assert [len(records) for records, _ in both] == [2, 2]


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_nothing_outlives_a_parent_that_is_ended(sent, tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from tests.test_launch import Launcher, run\n"
        "with Launcher() as launcher:\n"
        "    server = launcher.start(); print(server.pid, server.scratch, flush=True)\n"
        "    run(launcher, 'hang@1', deadline_s=600)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, script, ROOT], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert parent.stdout is not None
    server, scratch = parent.stdout.readline().split()
    deadline = time.monotonic() + 30
    while len(offspring(int(server))) < 3 and time.monotonic() < deadline:
        time.sleep(0.1)  # two ranks and the grandchild
    family = [psutil.Process(int(server)), *offspring(int(server))]
    assert len(family) >= 4
    parent.send_signal(sent)
    parent.wait(timeout=30)
    assert gone(family, within_s=10)
    assert not Path(scratch).exists()
    parent.stdout.close()
