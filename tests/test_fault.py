"""Room perf/facts/fault.py: every kind of fault is read from text, does its one harm, and only on its rank."""

import os
import signal
from types import SimpleNamespace

import pytest
import torch

from perf.facts import fault as room
from perf.facts.fault import NEED_AMOUNT, WHOLE_AMOUNT, Fault, FaultKind, Planted

STEP_S = 0.5
PLANNED = 10
AMOUNT = 3.0
NO_AMOUNT = sorted(set(FaultKind) - NEED_AMOUNT - set(WHOLE_AMOUNT))

HARM = {
    FaultKind.SLOW_STEP: ["record: 1.5 s a step"],
    FaultKind.EXTRA_MEMORY: ["build: 3 MiB held"],
    FaultKind.DELAY: ["step 0: sleep 3.0", "step 1: sleep 3.0", "step 2: sleep 3.0"],
    FaultKind.NAN_LOSS: ["step 2: parameter nan"],
    FaultKind.GRADIENT_SCALE: ["build: gradients x 6.0"],
    FaultKind.MISSING_METRIC: ["record: no losses"],
    FaultKind.TRUNCATED: ["record: 3 timed steps"],
    FaultKind.RAISE: ["step 2: AssertionError planted: grad mismatch layer 3"],
    FaultKind.EXIT: ["step 2: exit 3"],
    FaultKind.KILL: [f"step 2: kill {os.getpid()} {signal.SIGKILL}"],
    FaultKind.OUT_OF_MEMORY: ["step 2: RuntimeError"],
    FaultKind.HANG: ["step 2: ignore SIGTERM", "step 2: fork", "step 2: sleep 3600"],
    FaultKind.TEARDOWN_HANG: ["recorded: sleep 3600"],
}
"""What an amount of 3 does to a model whose gradients are scaled by 2, in a life of three steps of half a second."""


class Life:
    """A rank's life, in which harm is noted instead of suffered."""

    def __init__(self, monkeypatch):
        self.harm = []
        self._when = ""
        self._parameter = torch.nn.Parameter(torch.ones(2))
        self._sharded = SimpleNamespace(
            gradient_scale=2.0, named_parameters=lambda: iter([("weight", self._parameter)])
        )
        monkeypatch.setattr(room, "time", SimpleNamespace(sleep=lambda seconds: self.note(f"sleep {seconds}")))
        monkeypatch.setattr(
            room,
            "os",
            SimpleNamespace(
                _exit=lambda code: self.note(f"exit {code}"),
                kill=lambda pid, number: self.note(f"kill {pid} {number}"),
                fork=lambda: self.note("fork"),
                getpid=os.getpid,
            ),
        )
        monkeypatch.setattr(signal, "signal", lambda number, _: self.note(f"ignore {number.name}"))

    def note(self, what):
        self.harm.append(f"{self._when}: {what}")

    def live(self, planted):
        self._when = "build"
        planted.before_first_step(self._sharded)
        if self._sharded.gradient_scale != 2.0:
            self.note(f"gradients x {self._sharded.gradient_scale}")
        if (held := getattr(planted, "_held", None)) is not None:
            self.note(f"{held.numel() * held.element_size() >> 20} MiB held")
        for step in range(3):
            self._step(planted, step)
        self._when = "record"
        if planted.losses_lost():
            self.note("no losses")
        if planted.extra_s(STEP_S):
            self.note(f"{planted.extra_s(STEP_S)} s a step")
        if planted.timed_steps(PLANNED) != PLANNED:
            self.note(f"{planted.timed_steps(PLANNED)} timed steps")
        self._when = "recorded"
        planted.after_record()
        return self.harm

    def _step(self, planted, step):
        self._when = f"step {step}"
        try:
            planted.in_step(step, self._sharded)
        except (AssertionError, RuntimeError) as error:
            words = f" {error}" if isinstance(error, AssertionError) else ""
            self.note(f"{type(error).__name__}{words}")
        if self._parameter.isnan().any():
            self.note("parameter nan")


def test_every_kind_is_tested():
    assert set(HARM) == set(FaultKind)


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("kind", FaultKind)
def test_fault_does_its_harm_on_its_rank_and_none_elsewhere(monkeypatch, kind, rank):
    planted = Planted(Fault(kind=kind, amount=AMOUNT, rank=1), rank)
    assert Life(monkeypatch).live(planted) == (HARM[kind] if rank == 1 else [])


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("kind", FaultKind)
def test_fault_without_a_rank_does_its_harm_on_every_rank(monkeypatch, kind, rank):
    assert Life(monkeypatch).live(Planted(Fault(kind=kind, amount=AMOUNT), rank)) == HARM[kind]


def test_no_fault_no_harm(monkeypatch):
    assert Life(monkeypatch).live(Planted(None, 0)) == []


@pytest.mark.parametrize("kind", FaultKind)
def test_fault_is_read_with_and_without_amount_and_rank(kind):
    if kind in NEED_AMOUNT:
        assert Fault.parse(f"{kind}=0.05") == Fault(kind=kind, amount=0.05)
        assert Fault.parse(f"{kind}=2e-1@12") == Fault(kind=kind, amount=0.2, rank=12)
    if kind in WHOLE_AMOUNT:
        assert Fault.parse(f"{kind}=5") == Fault(kind=kind, amount=5.0)
        assert Fault.parse(f"{kind}=2e1@12") == Fault(kind=kind, amount=20.0, rank=12)
    if kind not in NEED_AMOUNT:
        assert Fault.parse(kind.value) == Fault(kind=kind, amount=0.0, rank=None)
        assert Fault.parse(f"{kind}@1") == Fault(kind=kind, rank=1)


@pytest.mark.parametrize(
    "text", ["slow_step", "delay@1", "gradient_scale=0", "delay=nan", "delay=inf", "delay=-1", "hang@-1"]
)
def test_fault_that_would_do_no_harm_or_make_no_sense_is_refused(text):
    with pytest.raises(ValueError, match=r"cannot plant .*; its amount must be a positive number, its rank at least 0"):
        Fault.parse(text)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        *((f"{kind}=1", f"{kind} takes no amount; a rank follows an @, as in {kind}@1") for kind in NO_AMOUNT),
        ("hang=0", "hang takes no amount"),
        ("truncated=0.5", "its amount 0.5 must be a whole number"),
        ("exit=7.5@1", "its amount 7.5 must be a whole number"),
        ("exit=256", "its amount 256 must be 0 to 255"),
        ("delay=1e300", r"its amount 1e\+300 must be 0 to 1e\+09"),
        ("gradient_scale=1", "gradients 1 times as large are as they were"),
    ],
)
def test_amount_that_harms_nothing_or_not_as_it_says_is_refused(text, says):
    with pytest.raises(ValueError, match=f"cannot plant '{text}'; {says}"):
        Fault.parse(text)


@pytest.mark.parametrize(
    "text",
    ["", "sloth", "SLOW_STEP", "slow_step=", "slow_step=much", "hang@", "hang@one", "hang@1.5", "@1", "=1", "hang@1@2"],
)
def test_text_that_names_no_fault_is_refused_with_the_known_kinds(text):
    with pytest.raises(ValueError, match="cannot plant") as caught:
        Fault.parse(text)
    assert repr(text) in str(caught.value)
    assert all(kind.value in str(caught.value) for kind in FaultKind)
    assert "kind[=amount][@rank]" in str(caught.value)
