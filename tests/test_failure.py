"""Room perf/facts/failure.py: the failing rank's own error leads, whatever the victims said first."""

import itertools
import signal

import pytest

from perf.facts.failure import FailureKind, LaunchError, RankEnd, RankError, explain

VICTIM_MESSAGES = [
    "[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:45123",
    "[gloo/transport/tcp/pair.cc:525] Read error [127.0.0.1]:4512: Connection reset by peer",
    "Socket Timeout",
    "[gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation to complete",
    "NCCL error: remote process exited or there was a network error",
    "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.",
    "[Rank 0] Watchdog caught collective operation timeout",
    "write: Broken pipe",
]


def raised(rank, order, message, *, kind="RuntimeError", phase="steps", code=1):
    error = RankError(type=kind, message=message, traceback=f"Traceback of rank {rank}")
    return RankEnd(rank=rank, order=order, exit_code=code, error=error, last_phase=phase)


def ended(rank, order, code, *, phase="steps", log_tail=""):
    return RankEnd(rank=rank, order=order, exit_code=code, error=None, last_phase=phase, log_tail=log_tail)


def alive(rank, frame, *, phase="steps", order=2):
    stack = (
        f'Current thread 0x01 (most recent call first):\n  File "{frame}", line 7 in wait\n  File "/outer.py", line 1'
    )
    return RankEnd(rank=rank, order=order, exit_code=None, error=None, last_phase=phase, stack=stack if frame else "")


def told(*ends, deadline_s=60.0):
    error = explain(list(ends), deadline_s=deadline_s)
    assert isinstance(error, LaunchError)
    return error.kind, str(error)


@pytest.mark.parametrize("victim_first", [True, False])
@pytest.mark.parametrize("message", VICTIM_MESSAGES)
def test_own_error_leads_before_a_victims_in_either_order(victim_first, message):
    culprit = raised(1, int(victim_first), "grad mismatch layer 3", kind="AssertionError")
    victim = raised(0, int(not victim_first), message)
    for ends in ((culprit, victim), (victim, culprit)):
        kind, text = told(*ends)
        assert kind is FailureKind.CRASH
        assert text.startswith("CRASH: rank 1: AssertionError: grad mismatch layer 3\nTraceback of rank 1")
        assert text.endswith(f"(rank 0: RuntimeError: {message})")


def test_first_of_two_own_errors_leads():
    first, second = raised(1, 0, "the cause"), raised(0, 1, "a later one")
    for ends in itertools.permutations((first, second)):
        assert told(*ends)[1].startswith("CRASH: rank 1: RuntimeError: the cause")


@pytest.mark.parametrize("victim_first", [True, False])
@pytest.mark.parametrize(
    ("code", "kind", "text"),
    [
        (7, "CRASH", "rank 1 exited with code 7 at steps"),
        (0, "CRASH", "rank 1 exited with code 0 without a record"),
        (-signal.SIGKILL, "KILLED", "rank 1 was killed by SIGKILL, possibly out of memory"),
        (-signal.SIGTERM, "KILLED", "rank 1 was ended by SIGTERM"),
        (-signal.SIGSEGV, "CRASH", "rank 1 was ended by SIGSEGV"),
    ],
)
def test_end_without_an_exception_is_named(victim_first, code, kind, text):
    end = ended(1, int(victim_first), code, log_tail="last words")
    got, message = told(raised(0, int(not victim_first), VICTIM_MESSAGES[0]), end)
    assert got == kind
    assert message.startswith(f"{kind}: {text}")
    assert "last words" in message
    assert "(rank 0: RuntimeError: [gloo" in message


@pytest.mark.parametrize("num_in_torch", [0, 1, 3])
def test_hang_names_the_rank_outside_of_torch_with_its_stack(num_in_torch):
    waiting = [alive(rank, "/site-packages/torch/distributed/c10d.py") for rank in range(num_in_torch)]
    kind, text = told(*waiting, alive(num_in_torch, "/suite/perf/facts/fault.py"), deadline_s=5.0)
    headline = text.splitlines()[0]
    assert kind is FailureKind.HANG
    where = 'File "/suite/perf/facts/fault.py", line 7 in wait'
    assert headline == f"HANG: timeout after 5 s, rank {num_in_torch} in {where}"
    assert text.count("--- rank") == num_in_torch + 1
    assert "last seen at steps" in text


def test_hang_of_all_ranks_in_torch_names_all():
    text = told(*(alive(rank, "/x/torch/y.py") for rank in range(2)))[1]
    assert text.splitlines()[0].count("in File") == 2
    assert "rank 0 in" in text
    assert "rank 1 in" in text


def test_hang_without_a_stack_says_so():
    assert "rank 0 in no stack: it did not answer" in told(alive(0, ""))[1]


def test_only_the_thread_that_took_the_signal_counts():
    stack = 'Thread 0x02:\n  File "/torch/reader.py", line 1\n\nCurrent thread 0x01:\n  File "/mine.py", line 9 in f\n'
    end = RankEnd(rank=0, order=0, exit_code=None, error=None, last_phase="steps", stack=stack)
    assert 'rank 0 in File "/mine.py", line 9 in f' in told(end)[1].splitlines()[0]


def test_hang_leads_before_a_victim_that_timed_out():
    kind, text = told(raised(0, 0, VICTIM_MESSAGES[3]), alive(1, "/suite/perf/facts/fault.py"))
    assert kind is FailureKind.HANG
    assert "rank 1 in" in text.splitlines()[0]


def test_own_error_leads_before_ranks_that_still_wait_for_it():
    kind, text = told(alive(0, "/torch/x.py"), raised(1, 0, "boom"))
    assert kind is FailureKind.CRASH
    assert text.startswith("CRASH: rank 1: RuntimeError: boom")
    assert text.endswith("(rank 0 was still running at steps)")


@pytest.mark.parametrize(
    ("error_type", "message"),
    [
        ("RuntimeError", "[enforce fail at alloc_cpu.cpp:117] . DefaultCPUAllocator: can't allocate memory"),
        ("OutOfMemoryError", "CUDA out of memory. Tried to allocate 20.00 GiB"),
        ("torch.OutOfMemoryError", "tried to allocate more than there is"),
        ("MemoryError", ""),
        ("OSError", "[Errno 12] Cannot allocate memory"),
        ("RuntimeError", "DefaultCPUAllocator: not enough memory: you tried to allocate 4 bytes"),
    ],
)
def test_out_of_memory_is_told_from_a_crash(error_type, message):
    kind, text = told(raised(0, 1, VICTIM_MESSAGES[0]), raised(1, 0, message, kind=error_type))
    assert kind is FailureKind.OOM
    assert text.startswith(f"OOM: rank 1: {error_type}: {message}")


@pytest.mark.parametrize("orders", [(0, 1), (1, 0)])
def test_victims_without_a_culprit_are_a_communication_error(orders):
    ends = [raised(rank, order, VICTIM_MESSAGES[rank]) for rank, order in enumerate(orders)]
    kind, text = told(*ends)
    first, second = sorted(ends, key=lambda end: end.order)
    assert kind is FailureKind.COMM
    assert text.startswith(f"COMM: rank {first.rank}: RuntimeError: {VICTIM_MESSAGES[first.rank]}")
    assert text.endswith(f"(rank {second.rank}: RuntimeError: {VICTIM_MESSAGES[second.rank]})")


@pytest.mark.parametrize(
    ("kind", "phase", "expected"),
    [
        ("ValueError", "start", "REFUSED"),
        ("ValueError", "group", "REFUSED"),
        ("ValueError", "steps", "CRASH"),
        ("RuntimeError", "start", "CRASH"),
        ("KeyError", "group", "CRASH"),
    ],
)
def test_value_error_before_the_model_stands_is_a_refusal(kind, phase, expected):
    got, text = told(raised(0, 0, "8 sequences do not divide", kind=kind, phase=phase))
    assert got == expected
    assert text.startswith(f"{expected}: rank 0: {kind}: 8 sequences do not divide")


def test_others_are_told_in_one_line_each():
    long = raised(0, 1, "first line\nsecond line", kind="RuntimeError")
    silent = raised(2, 2, "", kind="KeyboardInterrupt")
    lines = told(raised(1, 0, "boom"), long, silent, ended(3, 3, 7))[1].splitlines()
    assert lines[-3:] == [
        "(rank 0: RuntimeError: first line)",
        "(rank 2: KeyboardInterrupt: )",
        "(rank 3 exited with code 7 at steps)",
    ]
