"""Planted faults: the suite's own proof that a broken run turns red. A run with one can never become a baseline."""

import math
import os
import signal
import time
from enum import StrEnum
from typing import TYPE_CHECKING

from strategies.value import Value

if TYPE_CHECKING:
    from strategies.sharded import Sharded


class FaultKind(StrEnum):
    """What is broken on purpose."""

    SLOW_STEP = "slow_step"
    """Every timed step takes `amount` x an ordinary one's time longer, and so do those that settle before them."""
    DELAY = "delay"
    """The rank sleeps `amount` seconds before every step."""
    EXTRA_MEMORY = "extra_memory"
    """`amount` MiB are held from the first step on."""
    NAN_LOSS = "nan_loss"
    """A parameter becomes NaN before the third step."""
    GRADIENT_SCALE = "gradient_scale"
    """Gradients are `amount` times too large."""
    MISSING_METRIC = "missing_metric"
    """The record lacks its losses."""
    TRUNCATED = "truncated"
    """Only `amount` timed steps are made."""
    RAISE = "raise"
    EXIT = "exit"
    """os._exit(amount) at the third step."""
    KILL = "kill"
    """SIGKILL to itself, as the kernel's out-of-memory killer does."""
    OUT_OF_MEMORY = "out_of_memory"
    """Asks for 2^60 bytes."""
    HANG = "hang"
    """Sleeps at the third step, ignores SIGTERM, has a child that does the same."""
    TEARDOWN_HANG = "teardown_hang"
    """Sleeps after the record is written."""


NEED_AMOUNT = frozenset({FaultKind.SLOW_STEP, FaultKind.DELAY, FaultKind.EXTRA_MEMORY, FaultKind.GRADIENT_SCALE})
"""Without an amount these would harm nothing, or everything."""
WHOLE_AMOUNT = {FaultKind.TRUNCATED: (0, 10**9), FaultKind.EXIT: (0, 255)}
"""Smallest and largest."""
MAX_AMOUNT = 1e9
"""No clock takes as many seconds, and no memory as many MiB."""


class Fault(Value, frozen=True, kw_only=True):
    """A fault to plant in a run."""

    kind: FaultKind
    amount: float = 0.0
    rank: int | None = None
    """None: on every rank."""

    @classmethod
    def parse(cls, text: str) -> "Fault":
        """From `kind[=amount][@rank]`, such as `slow_step=0.05` or `hang@1`. Raises ValueError with the known kinds."""
        body, at, rank = text.partition("@")
        name, equals, amount = body.partition("=")
        try:
            fault = cls(kind=FaultKind(name), amount=float(amount) if equals else 0.0, rank=int(rank) if at else None)
        except ValueError:
            kinds = ", ".join(kind.value for kind in FaultKind)
            raise ValueError(f"cannot plant {text!r}; write kind[=amount][@rank] with a kind of: {kinds}") from None
        if (
            not 0 <= fault.amount < math.inf
            or (fault.kind in NEED_AMOUNT and not fault.amount)
            or (fault.rank or 0) < 0
        ):
            raise ValueError(f"cannot plant {text!r}; its amount must be a positive number, its rank at least 0")
        if reason := fault._nonsense(has_amount=bool(equals)):
            raise ValueError(f"cannot plant {text!r}; {reason}")
        return fault

    def _nonsense(self, *, has_amount: bool) -> str | None:
        """Why this amount harms nothing, or not as it says."""
        least, most = WHOLE_AMOUNT.get(self.kind, (0, MAX_AMOUNT))
        if has_amount and self.kind not in NEED_AMOUNT | WHOLE_AMOUNT.keys():
            return f"{self.kind} takes no amount; a rank follows an @, as in {self.kind}@1"
        if self.kind in WHOLE_AMOUNT and not self.amount.is_integer():
            return f"its amount {self.amount:g} must be a whole number"
        if self.amount > most:
            return f"its amount {self.amount:g} must be {least} to {most:g}"
        if self.kind is FaultKind.GRADIENT_SCALE and self.amount == 1:
            return "gradients 1 times as large are as they were; name another amount"
        return None

    @property
    def text(self) -> str:
        """As `parse` reads it."""
        amount = f"={self.amount:g}" if self.amount else ""
        return f"{self.kind}{amount}" + (f"@{self.rank}" if self.rank is not None else "")


class Planted:
    """A fault at work in one rank; without a fault, nothing happens."""

    def __init__(self, fault: Fault | None, rank: int) -> None:
        self._fault = fault if fault is not None and fault.rank in (None, rank) else None

    def _is(self, kind: FaultKind) -> bool:
        return self._fault is not None and self._fault.kind is kind

    def timed_steps(self, planned: int) -> int:
        return int(self._fault.amount) if self._fault and self._is(FaultKind.TRUNCATED) else planned

    def losses_lost(self) -> bool:
        return self._is(FaultKind.MISSING_METRIC)

    def before_first_step(self, sharded: "Sharded") -> None:
        if self._fault and self._is(FaultKind.GRADIENT_SCALE):
            sharded.gradient_scale *= self._fault.amount
        if self._fault and self._is(FaultKind.EXTRA_MEMORY):
            parameter = next(iter(sharded.named_parameters()))[1]
            self._held = parameter.data.new_ones(int(self._fault.amount * 2**20) // parameter.element_size())

    def in_step(self, step: int, sharded: "Sharded") -> None:
        """Called inside every step's timed interval, before its forward."""
        if self._fault is None:
            return
        if self._fault.kind is FaultKind.DELAY:
            time.sleep(self._fault.amount)
        if step == 2:
            self._break(sharded)

    def extra_s(self, step_time_s: float) -> float:
        """Seconds by which to lengthen each timed step, given the time of an ordinary one."""
        return self._fault.amount * step_time_s if self._fault and self._is(FaultKind.SLOW_STEP) else 0.0

    def after_record(self) -> None:
        if self._is(FaultKind.TEARDOWN_HANG):
            time.sleep(3600)

    def _break(self, sharded: "Sharded") -> None:
        assert self._fault is not None
        match self._fault.kind:
            case FaultKind.NAN_LOSS:
                next(iter(sharded.named_parameters()))[1].data.fill_(float("nan"))
            case FaultKind.RAISE:
                raise AssertionError("planted: grad mismatch layer 3")
            case FaultKind.EXIT:
                os._exit(int(self._fault.amount))
            case FaultKind.KILL:
                os.kill(os.getpid(), signal.SIGKILL)
            case FaultKind.OUT_OF_MEMORY:
                parameter = next(iter(sharded.named_parameters()))[1]
                parameter.data.new_empty(2**60)
            case FaultKind.HANG:
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                os.fork()
                time.sleep(3600)
