"""The numbers of the decision: presets, and what overrides them for some cells, for a stated reason."""

import fnmatch
import itertools
import math
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from perf.facts import stats
from perf.facts.hardware import Machine
from perf.judge.baseline import Baseline, Store
from strategies.value import Value

MIB = 2**20
CPU_PRIOR_SD = 0.04
"""Between-run sd of tiny gloo cells on shared cores, as measured: until nights of a machine say otherwise, such a cell
is NOISY rather than red."""
RUNS_A_LOOK = 3
"""Fresh runs of one look, unless the user says otherwise."""
MAX_SD = 10.0
"""Between-run sd of a log step time: beyond it, an interval has no end that a float can hold."""
SENSITIVE_RUNS, SENSITIVE_NIGHTS = 9, 2
"""What a baseline needs before the sensitive preset may use it."""


class Rule(Value, frozen=True, kw_only=True):
    """The numbers of the decision. Tolerances are fractions of the step time."""

    floor: float = 0.025
    """Smallest tolerance."""
    cap: float = 0.08
    """A cell that would need more than this is NOISY."""
    tolerance_errors: float = 3.0
    """Tolerance in standard errors of the difference."""
    suspicious_share: float = 0.6
    least_difference_s: float = 1e-3
    """Absolute difference that a call needs too: the noise of a tiny cell is additive."""
    prior_sd: float = 0.008
    prior_df: float = 6.0
    pair_floor: float = 0.02
    """Smallest tolerance of a comparison in pairs, side by side."""
    pair_errors: float = 2.0
    """Tolerance of that comparison in its standard errors."""
    pairs: int = 4
    noisy_pairs: int = 6
    """Pairs of a cell whose between-run sd is above `noisy_sd`."""
    noisy_sd: float = 0.012
    most_looks: int = 3
    """Without a reference, a cell is looked at so often, each time with as many fresh runs."""
    memory_share: float = 1e-3
    memory_bytes: int = 32 * MIB
    reserved_share: float = 0.1
    reserved_bytes: int = 256 * MIB

    def needed(self, sd: float, num_runs: int, num_baseline_runs: int) -> float:
        """Tolerance that runs of this between-run sd ask for, whatever the smallest and the largest allowed one are."""
        return self.tolerance_errors * stats.standard_error(sd, num_runs, num_baseline_runs)

    def tolerance(self, sd: float, num_runs: int, num_baseline_runs: int) -> float:
        """What so many runs may be slower than so many recorded ones."""
        return min(max(self.needed(sd, num_runs, num_baseline_runs), self.floor), self.cap)

    def sd_of(self, levels: Sequence[float]) -> float:
        """Between-run sd of recorded levels, shrunk towards the machine's."""
        return stats.shrunk_sd(levels, prior_sd=self.prior_sd, prior_df=self.prior_df)

    def __post_init__(self) -> None:
        if not 0 <= self.floor <= self.cap < 1:
            raise ValueError(f"tolerances of step time need 0 <= floor {self.floor} <= cap {self.cap} < 1")
        if odd := [name for name in self.__struct_fields__ if not math.isfinite(getattr(self, name))]:
            raise ValueError(f"{odd[0]} {getattr(self, odd[0])} is no number that anything can be held to")
        if not 0 < self.suspicious_share <= 1:
            raise ValueError(
                f"suspicious_share {self.suspicious_share}: a share of the tolerance, above 0 and at most 1"
            )
        if negative := [name for name in self.__struct_fields__ if getattr(self, name) < 0]:
            raise ValueError(f"a tolerance cannot be negative: {negative[0]} {getattr(self, negative[0])}")
        if self.prior_sd > MAX_SD:
            raise ValueError(f"prior_sd {self.prior_sd}: a fraction of the step time, at most {MAX_SD:g}")
        if not self.prior_df > 0:
            raise ValueError(f"prior_df {self.prior_df}: one run alone has no noise, so the prior must count: above 0")
        if few := [name for name in ("pairs", "noisy_pairs", "most_looks") if getattr(self, name) < 1]:
            raise ValueError(f"no tolerance can be met by {few[0]} {getattr(self, few[0])}; at least 1")


OVERRIDES = "overrides.toml"
"""File of overrides, among the baselines."""
PRESETS: dict[str, dict[str, int | float]] = {
    "default": {},
    "sensitive": {"floor": 0.01, "pair_floor": 0.005, "pair_errors": 3.0, "pairs": 8, "noisy_pairs": 8},
    "lenient": {"floor": 0.04, "pair_floor": 0.035},
}
"""Name -> what it changes of the rule."""


def prior_sd(store: Store, machine: Machine) -> float:
    """Between-run sd that a cell of this machine is taken to have before its own runs say otherwise."""
    return store.prior_sd(machine, Rule().prior_sd if machine.is_gpu else CPU_PRIOR_SD)


class Override(Value, frozen=True, kw_only=True):
    """Numbers of the rule that hold for some cells only."""

    cells: str
    """Pattern of cell ids, with * and ?."""
    reason: str
    changes: dict[str, int | float]


def overrides(path: Path) -> tuple[Override, ...]:
    """Those of a TOML file, in order; none where there is no file.

    [[override]]
    cells = "pp_*-0.6b-eager-*"
    floor = 0.04
    reason = "the host issues these steps: its clock moved them by 3 % between nights"

    Raises:
        ValueError: an override without cells, without a reason, or with an unknown or impossible number.
    """
    if not path.is_file():
        return ()
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: {error}") from None
    tables = document.pop("override", None)
    if document or not isinstance(tables, list):
        raise ValueError(f"{path}: holds [[override]] tables and nothing else, found {sorted(document) or tables!r}")
    return tuple(_override(table, f"{path}: override {number}") for number, table in enumerate(tables, start=1))


def _override(table: Any, source: str) -> Override:
    if not isinstance(table, dict):
        raise ValueError(f"{source}: {table!r} is not an [[override]] table")
    changes = {name: value for name, value in table.items() if name not in ("cells", "reason")}
    if not str(table.get("reason", "")).strip():
        raise ValueError(f"{source}: needs a reason, which every verdict that it touches will show")
    if not table.get("cells") or not changes:
        raise ValueError(f"{source}: needs cells, a pattern of their names, and at least one number of the rule")
    known = ", ".join(Rule.__struct_fields__)
    try:
        _rule(changes)
        return msgspec.convert({**{key: table[key] for key in ("cells", "reason")}, "changes": changes}, Override)
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{source}: {error}; numbers of the rule: {known}") from None


def _rule(changes: dict[str, int | float]) -> Rule:
    return msgspec.convert(msgspec.to_builtins(Rule()) | changes, Rule)


def rule_for(
    cell_id: str, preset: str, baseline: Baseline | None, chosen: tuple[Override, ...], prior_sd: float
) -> tuple[Rule, tuple[str, ...]]:
    """The rule of one cell, and what the reader of its verdict has to know of it.

    The sensitive preset needs a baseline that carries it: enough runs, from starts on different nights, and so little
    noise that the tolerance of one look is the preset's floor. Where it does not, the default decides, and says why.

    Raises:
        ValueError: the overrides that hold for this cell contradict each other.
    """
    notes = []
    if preset == "sensitive" and baseline is not None and (lacks := _too_coarse(baseline, prior_sd)):
        notes.append(f"judged by the default preset: {lacks}")
        preset = "default"
    numbers: dict[str, int | float] = {"prior_sd": prior_sd} | PRESETS[preset]
    for override in chosen:
        if fnmatch.fnmatchcase(cell_id, override.cells):
            numbers |= override.changes
            said = ", ".join(f"{name} {value:g}" for name, value in override.changes.items())
            notes.append(f"override {said}: {override.reason}")
    try:
        return _rule(numbers), tuple(notes)
    except ValueError as error:
        said = "; ".join(notes)
        raise ValueError(f"{cell_id}: its overrides together cannot be met: {error} ({said})") from None


def check_together(chosen: tuple[Override, ...], cell_ids: Sequence[str], preset: str, source: str) -> None:
    """Raises ValueError where the overrides that hold for one of these cells contradict each other."""
    # Also by the default preset, which judges a cell where the sensitive one cannot.
    for cell_id, by in itertools.product(cell_ids, (preset, "default")):
        try:
            rule_for(cell_id, by, None, chosen, Rule().prior_sd)
        except ValueError as error:
            raise ValueError(f"{source}: {error}") from None


def _too_coarse(baseline: Baseline, prior_sd: float) -> str | None:
    """Why a baseline cannot carry the sensitive preset, or None."""
    num_runs, num_nights = len(baseline.runs), len(baseline.nights)
    if num_runs < SENSITIVE_RUNS or num_nights < SENSITIVE_NIGHTS:
        needs = f"needs {SENSITIVE_RUNS} runs from {SENSITIVE_NIGHTS} nights"
        return f"the sensitive one {needs}, the baseline has {num_runs} from {num_nights}"
    rule, floor = Rule(prior_sd=prior_sd), PRESETS["sensitive"]["floor"]
    sd = rule.sd_of(baseline.levels)
    needed = rule.needed(sd, RUNS_A_LOOK, num_runs)
    if needed <= floor:
        return None
    return (
        f"runs are {sd * 100:.2f} % apart, which asks for a tolerance of {needed * 100:.1f} %, above {floor * 100:g} %"
    )
