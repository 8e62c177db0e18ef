"""Room perf/lease.py: one owner at a time, named with its age; a dead owner holds nothing."""

import multiprocessing
import os
import signal
import time

import pytest

from perf import lease as room
from perf.lease import Lease

CONTEXT = multiprocessing.get_context("spawn")


def hold(path, ready, seconds):
    """A process that takes the lease and says so."""
    with Lease("ddp-tiny", lambda _: None, path=path):
        ready.set()
        time.sleep(seconds)


@pytest.fixture
def other(tmp_path):
    """Another process that holds the lease for an hour."""
    ready = CONTEXT.Event()
    process = CONTEXT.Process(target=hold, args=(tmp_path / "node.lock", ready, 3600))
    process.start()
    assert ready.wait(30)
    yield process
    process.kill()
    process.join()


def test_second_comer_waits_and_is_told_for_whom(tmp_path, other, monkeypatch):
    monkeypatch.setattr(room, "ASK_EVERY_S", 0.1)
    told = []

    def tell(text):
        told.append(text)
        if len(told) == 3:
            os.kill(other.pid, signal.SIGKILL)

    with Lease("fsdp2-tiny", tell, path=tmp_path / "node.lock"):
        assert len(told) >= 3
        assert told[0].startswith(f"waiting for process {other.pid}, which has held the node for ")
        assert told[0].endswith("s: ddp-tiny")
    assert not (tmp_path / "node.owner").exists()


def test_dead_owner_holds_nothing(tmp_path, other):
    os.kill(other.pid, signal.SIGKILL)
    other.join()
    assert (tmp_path / "node.owner").exists()
    told = []
    begun = time.monotonic()
    with Lease("fsdp2-tiny", told.append, path=tmp_path / "node.lock"):
        assert time.monotonic() - begun < 1.0
    assert told == []


def test_lease_is_free_after_an_error(tmp_path):
    with pytest.raises(KeyError), Lease("a", lambda _: None, path=tmp_path / "node.lock"):
        raise KeyError
    with Lease("b", pytest.fail, path=tmp_path / "node.lock"):
        pass
