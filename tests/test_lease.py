"""Room perf/measure/lease.py: one owner at a time, named with its age; a dead owner holds nothing."""

import multiprocessing
import os
import signal
import tempfile
import time
from pathlib import Path

import pytest

from perf.measure import lease as room
from perf.measure.lease import Lease

CONTEXT = multiprocessing.get_context("spawn")
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="becomes other users, which only root can")


def hold(path, ready, seconds):
    """A process that takes the lease and says so."""
    with Lease("ddp-tiny", lambda _: None, path=path):
        ready.set()
        time.sleep(seconds)


def become(user, umask, folder):
    """Another user, who may not be able to read this interpreter's files: a lease before it has imported all."""
    with Lease("ddp-tiny", pytest.fail, path=folder / "imports" / "node.lock"):
        os.umask(umask)
    os.setuid(user)


def hold_as(user, umask, folder):
    become(user, umask, folder)
    with Lease("ddp-tiny", pytest.fail, path=folder / "shardmark" / "node.lock"):
        assert (folder / "shardmark" / "node.owner").exists()


def be_refused_as(user, folder):
    become(user, 0o022, folder)
    with pytest.raises(ValueError, match=r"node\.lock and its folder must be writable for all"):
        Lease("ddp-tiny", pytest.fail, path=folder / "node.lock").__enter__()


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


@pytest.fixture
def everybodys():
    """A folder as the temporary one is: pytest's own are closed to other users."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o1777)
        yield Path(folder)


def ends_well(target, *arguments):
    process = CONTEXT.Process(target=target, args=arguments)
    process.start()
    process.join(60)
    return process.exitcode == 0


@AS_ROOT
@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_second_user_takes_the_lease_that_a_first_one_made(everybodys, umask):
    assert ends_well(hold_as, 4321, umask, everybodys)
    assert ends_well(hold_as, 4322, umask, everybodys)


@AS_ROOT
def test_lock_that_another_user_closed_is_refused_with_the_cure(everybodys):
    (everybodys / "node.lock").touch(mode=0o600)
    assert ends_well(be_refused_as, 4321, everybodys)
