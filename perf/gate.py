"""What the self-test of a cell works with: samples with faults planted in turn, and the curve that they give."""

from collections.abc import Sequence

import msgspec
import pytest

from perf.facts import jsonfile
from perf.facts.cell import Cell
from perf.facts.failure import LaunchError
from perf.facts.fault import FaultKind
from perf.facts.measurement import PEAK_ALLOCATED, measure
from perf.facts.outcome import Outcome
from perf.facts.record import RunRecord
from perf.judge.approval import provisional, unlike_each_other
from perf.judge.correctness import intrinsic_errors
from perf.judge.rule import MIB, Rule, prior_sd
from perf.judge.selftest import EXTRA_MIB, SelfTest, evaluate, planted, samples_of
from perf.judge.verdict import memory_comparisons
from perf.selftest_summary import CELL, FOUND
from perf.suite import Suite


class Gate:
    """The gate, asked about one cell.

    Args:
        slowdowns: fractions of the step time, each planted in `num_runs` runs; nothing is planted in twice as many.
    """

    def __init__(self, suite: Suite, item: pytest.Item, slowdowns: tuple[float, ...], num_runs: int) -> None:
        self._suite = suite
        self._item = item
        self._slowdowns = slowdowns
        self._num_runs = num_runs

    def refuse(self, cell: Cell) -> None:
        """Skips the test when this cell cannot run here."""
        self._item.user_properties.append((CELL, cell.id))
        if reason := self._suite.obstacle(cell):
            pytest.skip(reason)

    def measure(self, cell: Cell) -> SelfTest:
        """The operating curve of the gate on this cell, from fresh runs; fails the test when one gives no record."""
        try:
            faults = planted(self._slowdowns, self._num_runs, memory=cell.device_kind == "cuda")
            runs = self._suite.sample(cell, faults)
        except (LaunchError, ValueError) as error:
            reason = str(error)
        else:
            prior = prior_sd(self._suite.store, self._suite.machine(cell))
            return evaluate(cell.id, samples_of(runs), prior, memory_found(cell, runs), numbers_off(cell, runs))
        pytest.fail(reason, pytrace=False)  # outside of the except: pytest would show both, one inside the other

    def conclude(self, found: SelfTest) -> None:
        """Keeps the curve in the test run's folder, for the end of it, and makes it the test's outcome."""
        jsonfile.write(self._suite.results.selftest(found.cell_id), found)
        self._item.user_properties.append((FOUND, found.cell_id))
        self._item.user_properties += [(f"found at {point.planted:g}", repr(point.alone)) for point in found.points]
        if found.faults:
            pytest.fail("; ".join(found.faults), pytrace=False)
        if not found.is_gated:
            pytest.skip(f"{found.cell_id} is too noisy here to be gated on time")


def numbers_off(cell: Cell, runs: Sequence[RunRecord]) -> list[str]:
    """Why the first gate would be red: each run against what they all recorded. No planted fault changes a number."""
    together = measure(cell, msgspec.structs.replace(runs[0].plan, runs=1), list(runs))
    if errors := intrinsic_errors(together):
        return errors
    return unlike_each_other(together)


def memory_found(cell: Cell, runs: Sequence[RunRecord]) -> bool | None:
    """Whether runs with more memory are REGRESSED against those without; None: none planted, or too little."""
    plan = msgspec.structs.replace(runs[0].plan, runs=1)
    more = [run for run in runs if run.fault is not None and run.fault.kind is FaultKind.EXTRA_MEMORY]
    if not more:
        return None
    baseline, _ = provisional(measure(cell, plan, [run for run in runs if run.fault is None]), "selftest")
    rule, peak_bytes = Rule(), baseline.median(PEAK_ALLOCATED.name)
    if peak_bytes is not None and rule.memory_share * peak_bytes >= EXTRA_MIB * MIB:
        return None
    return Outcome.REGRESSED in {row.outcome for row in memory_comparisons(measure(cell, plan, more), baseline, rule)}
