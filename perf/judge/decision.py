"""How a cell's runs are judged against its baseline, and when more runs are needed before that can be said.

A sequential rule, as a pure function of what was measured so far: a first look at a few runs passes nearly every cell
that did not change; a suspicious one is looked at again, with fresh runs, and then beside a reference build, where
there is one, or with more fresh runs. All levels are logs of step times, so that differences are changes.
"""

import math
from collections.abc import Sequence
from statistics import median

import msgspec

from perf.facts import stats
from perf.facts.outcome import Outcome
from perf.judge.rule import RUNS_A_LOOK, Rule
from strategies.value import Value

NINE_IN_TEN = 1.28
"""Normal quantile of 90 %."""
ROUNDING = 1e-9
"""Share of a limit by which a value may be off and still meet it: the log of a ratio and back is not exact."""


class Look(Value, frozen=True, kw_only=True):
    """What was seen after so many runs."""

    num_runs: int
    change: float
    tolerance: float


class Decision(Value, frozen=True, kw_only=True):
    """What can be said of a step time, or what has to be measured before anything can."""

    outcome: Outcome | None
    """None: undecided; `more_runs` or `pairs` says what is missing."""
    old_level: float
    new_level: float
    standard_error: float
    tolerance: float
    needed: float
    """Tolerance that the noise asks for; above what the rule allows, the cell is NOISY."""
    sensitivity: float
    """Smallest slowdown that is found nine times out of ten."""
    suspicious: bool = False
    """At the first look."""
    looks: tuple[Look, ...] = ()
    more_runs: int = 0
    """Missing: so many fresh runs."""
    pairs: int = 0
    """Missing: so many pairs with a run of the reference each."""

    @property
    def change(self) -> float:
        return math.expm1(self.new_level - self.old_level)


Pair = tuple[float, float]
"""Levels of a run of the reference and of its neighbour in time, a run of the candidate."""


class Judge:
    """The rule, applied to the runs of one cell.

    Args:
        levels: of the candidate's runs that are not part of a pair, in order.
        baseline: levels of the recorded runs.
        runs_a_look: how many fresh runs each look has.
        shift: of the whole suite's levels, which is the machine's and not this cell's.
    """

    def __init__(
        self,
        levels: Sequence[float],
        baseline: Sequence[float],
        rule: Rule,
        *,
        runs_a_look: int = RUNS_A_LOOK,
        shift: float = 0.0,
    ) -> None:
        self._levels = list(levels)
        self._num_baseline = len(baseline)
        self._old = median(baseline) + shift
        self._rule = rule
        self._runs = runs_a_look
        self._sd = rule.sd_of(baseline)
        self._looks: list[Look] = []
        self._suspicious = False
        self._finds: float | None = None

    def once(self) -> Decision:
        """By one look at all the runs there are: no more will come."""
        num_runs = len(self._levels)
        if self._needed(num_runs) > self._rule.cap:
            return self._say(Outcome.NOISY, num_runs)
        self._suspicious = self._look(num_runs)
        is_slower = self._exceeds(self._change(num_runs), self._tolerance(num_runs))
        return self._say(Outcome.REGRESSED if is_slower else self._green(num_runs), num_runs)

    def in_stages(self, pairs: Sequence[Pair] | None = None) -> Decision:
        """By as many looks as it needs. Undecided where the runs of the next one are not there yet.

        `pairs` None: there is no reference build to measure beside.
        """
        first, second = self._runs, 2 * self._runs
        most = self._rule.most_looks * self._runs
        in_pairs = compare_pairs([(self._old, self._old)] * num_pairs(self._sd, self._rule), self._sd, self._rule)
        self._finds = self._found_by(most) if pairs is None else in_pairs.sensitivity
        if self._needed(first) > self._rule.cap:
            return self._say(Outcome.NOISY, first)
        self._suspicious = self._look(first)
        if not self._suspicious:
            return self._say(self._green(first), first)
        if len(self._levels) < second:
            return self._say(None, first, more_runs=second - len(self._levels))
        if not self._look(second):
            return self._say(Outcome.PASS, second)
        return self._with_more_runs(second) if pairs is None else self._side_by_side(pairs, second)

    def _with_more_runs(self, num_runs: int) -> Decision:
        """Slower in all runs, and in the freshest ones too or after the last look."""
        most = self._rule.most_looks * self._runs
        while True:
            fresh = median(self._levels[num_runs - self._runs : num_runs]) - self._old
            share = self._rule.suspicious_share * self._tolerance(self._runs)
            still = num_runs >= most or self._exceeds(fresh, share, least_s=0.0)
            if still and self._exceeds(self._change(num_runs), self._tolerance(num_runs)):
                return self._say(Outcome.REGRESSED, num_runs)
            if num_runs >= most or (num_runs > 2 * self._runs and not self._look(num_runs)):
                return self._say(Outcome.PASS, num_runs)
            wanted = num_runs + self._runs
            if len(self._levels) < wanted:
                return self._say(None, num_runs, more_runs=wanted - len(self._levels))
            num_runs = wanted
            self._look(num_runs)

    def _side_by_side(self, pairs: Sequence[Pair], num_runs: int) -> Decision:
        """Runs of both builds, neighbours in time, tell the code from the machine."""
        wanted = num_pairs(self._sd, self._rule)
        if len(pairs) < wanted:
            return self._say(None, num_runs, pairs=wanted)
        compared = compare_pairs(pairs, self._sd, self._rule)
        self._levels += [new for _, new in pairs]
        num_runs = len(self._levels)
        self._look(num_runs)
        outcome = Outcome.REGRESSED
        if compared.outcome is not Outcome.REGRESSED:
            is_over = self._exceeds(self._change(num_runs), self._tolerance(num_runs))
            outcome = Outcome.ENVIRONMENT if is_over else Outcome.PASS
        looks = tuple(self._looks)
        return msgspec.structs.replace(compared, outcome=outcome, suspicious=True, looks=looks)

    def _green(self, num_runs: int) -> Outcome:
        change, tolerance = self._change(num_runs), self._tolerance(num_runs)
        return Outcome.IMPROVED if self._exceeds(change, tolerance, sign=-1) else Outcome.PASS

    def _look(self, num_runs: int) -> bool:
        """Notes what so many runs show; whether that is suspicious."""
        change, tolerance = self._change(num_runs), self._tolerance(num_runs)
        look = Look(num_runs=num_runs, change=math.expm1(change), tolerance=tolerance)
        if look not in self._looks:
            self._looks.append(look)
        share = self._rule.suspicious_share
        return self._exceeds(change, share * tolerance, least_s=share * self._rule.least_difference_s)

    def _exceeds(self, change: float, limit: float, *, sign: int = 1, least_s: float | None = None) -> bool:
        least_s = self._rule.least_difference_s if least_s is None else least_s
        return exceeds(self._old, change, limit, least_s=least_s, sign=sign)

    def _change(self, num_runs: int) -> float:
        return median(self._levels[:num_runs]) - self._old

    def _error(self, num_runs: int) -> float:
        return stats.standard_error(self._sd, num_runs, self._num_baseline)

    def _needed(self, num_runs: int) -> float:
        return self._rule.needed(self._sd, num_runs, self._num_baseline)

    def _found_by(self, num_runs: int) -> float:
        return at_least(self._tolerance(num_runs), self._old, self._rule) + NINE_IN_TEN * self._error(num_runs)

    def _tolerance(self, num_runs: int) -> float:
        return self._rule.tolerance(self._sd, num_runs, self._num_baseline)

    def _say(self, outcome: Outcome | None, num_runs: int, *, more_runs: int = 0, pairs: int = 0) -> Decision:
        return Decision(
            outcome=outcome,
            old_level=self._old,
            new_level=self._old + self._change(num_runs),
            standard_error=self._error(num_runs),
            tolerance=at_least(self._tolerance(num_runs), self._old, self._rule),
            needed=self._needed(num_runs),
            sensitivity=self._found_by(num_runs) if self._finds is None else self._finds,
            suspicious=self._suspicious,
            looks=tuple(self._looks),
            more_runs=more_runs,
            pairs=pairs,
        )


def noise_reasons(decision: Decision, outcome: Outcome, rule: Rule) -> list[str]:
    """Why a time is not gated, where it is not."""
    if outcome is not Outcome.NOISY:
        return []
    apart = f"runs are so far apart that the tolerance would be {decision.needed * 100:.1f} %"
    return [f"not gated on time: {apart}, above {rule.cap * 100:g} %"]


def num_pairs(sd: float, rule: Rule) -> int:
    """How many pairs a cell of this between-run sd needs."""
    return rule.noisy_pairs if sd > rule.noisy_sd else rule.pairs


def compare_pairs(pairs: Sequence[Pair], sd: float, rule: Rule) -> Decision:
    """Reference against candidate, by the median of the pairs' ratios: what moved the machine moved both of a pair.

    Between-run sd `sd` is that of one build; the difference of two runs has sqrt(2) of it.
    """
    error = stats.MEDIAN_EFFICIENCY * sd * math.sqrt(2 / len(pairs))
    needed = rule.pair_errors * error
    tolerance = min(max(needed, rule.pair_floor), rule.cap)
    old, change = median(old for old, _ in pairs), median(new - old for old, new in pairs)
    outcome = Outcome.PASS
    if needed > rule.cap:
        outcome = Outcome.NOISY
    elif exceeds(old, change, tolerance, least_s=rule.least_difference_s):
        outcome = Outcome.REGRESSED
    elif exceeds(old, change, tolerance, least_s=rule.least_difference_s, sign=-1):
        outcome = Outcome.IMPROVED
    return Decision(
        outcome=outcome,
        old_level=old,
        new_level=old + change,
        standard_error=error,
        tolerance=at_least(tolerance, old, rule),
        needed=needed,
        sensitivity=at_least(tolerance, old, rule) + NINE_IN_TEN * error,
    )


def at_least(tolerance: float, old_level: float, rule: Rule) -> float:
    """The tolerance that is in force, as a fraction: of a short step, the least absolute difference is more."""
    return max(tolerance, rule.least_difference_s / math.exp(old_level))


def exceeds(old_level: float, change: float, limit: float, *, least_s: float, sign: int = 1) -> bool:
    """Whether a log change is above a limit, a fraction, and above a least difference in seconds; `sign` -1: below.

    A limit that is met is not exceeded, whatever the log of a ratio and back loses.
    """
    difference_s = math.exp(old_level + change) - math.exp(old_level)
    is_relative = sign * math.expm1(change) > limit * (1 + ROUNDING)
    return is_relative and sign * difference_s > least_s * (1 + ROUNDING)
