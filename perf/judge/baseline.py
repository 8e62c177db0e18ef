"""Baselines: measured values of a cell on a machine, its invariants on any machine, and the ceilings of a machine; one
JSON file each.

Files hold measurements, never thresholds. They are read here and written by `tools.approve` alone (local
provisional ones, outside of `baselines/`, by the plugin on request).
"""

import hashlib
import json
import statistics
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

import msgspec

from perf.facts import jsonfile, stats
from perf.facts.cell import Cell, Recipe
from perf.facts.hardware import Machine
from perf.facts.measurement import RankLedger
from perf.facts.rates import KINDS, Ceilings
from perf.facts.record import Software
from strategies.spec import LinkProfile, Mode, StrategyName
from strategies.value import Value

INVARIANTS, CEILINGS = "invariants", "ceilings"
LEAST_NIGHTS, LEAST_RUNS = 3, 9
"""Fewer than this is a provisional baseline."""
LEAST_CELLS_FOR_PRIOR = 3


class Sealed(Value, frozen=True, kw_only=True):
    """A stored record with a checksum over all its other fields, so that a merge that mixed two records is found."""

    checksum: str = ""

    def sealed(self) -> Self:
        return msgspec.structs.replace(self, checksum=digest(msgspec.to_builtins(self)))

    def is_whole(self) -> bool:
        return self.checksum == digest(msgspec.to_builtins(self))


class Origin(Value, frozen=True, kw_only=True):
    """Where recorded values come from."""

    run_id: str
    date: str
    commit: str | None
    dirty: bool | None
    host: str
    cpu: str
    software: Software
    variables: dict[str, str]
    reason: str | None = None

    def is_continued_by(self, other: "Origin") -> bool:
        """Whether two test runs are nights of one series.

        Those of one commit are, and those under one reason, whatever their commits. Uncommitted changes, and a tree
        without a commit, can be anything: of them, only the reason can say that they are the same.
        """
        if self.software != other.software:
            return False
        if other.reason is not None:
            return other.reason == self.reason
        return other.commit is not None and not other.dirty and (self.commit, self.dirty) == (other.commit, other.dirty)


class BaselineRun(Value, frozen=True, kw_only=True):
    """One run of a night."""

    step_times_s: tuple[float, ...]
    """Per timed step, the slowest rank's."""
    peak_allocated_bytes: int | None
    peak_reserved_bytes: int | None
    peak_resident_bytes: int


class Night(Value, frozen=True, kw_only=True):
    """One test run of one build."""

    origin: Origin
    runs: tuple[BaselineRun, ...]
    attention: tuple[str, ...] = ()
    """Attention kernels that the ranks' steps were dispatched to."""


class Baseline(Sealed, frozen=True, kw_only=True):
    """What a cell measured on one machine, over the nights of one recipe and of one build, or under one reason."""

    SCHEMA_VERSION: ClassVar[int] = 1
    schema_version: int = 1
    cell_id: str
    machine: Machine
    recipe: Recipe
    nights: tuple[Night, ...]

    @property
    def runs(self) -> tuple[BaselineRun, ...]:
        return tuple(run for night in self.nights for run in night.runs)

    @property
    def levels(self) -> tuple[float, ...]:
        """Log of the step time of each run."""
        return tuple(stats.run_level(run.step_times_s) for run in self.runs)

    @property
    def is_provisional(self) -> bool:
        return len(self.nights) < LEAST_NIGHTS or len(self.runs) < LEAST_RUNS

    def without(self, run_id: str) -> "Baseline | None":
        """As it is without the night of that test run; None: there is no other."""
        nights = tuple(night for night in self.nights if night.origin.run_id != run_id)
        return msgspec.structs.replace(self, nights=nights) if nights else None

    def values(self, field: str) -> list[int]:
        """A memory field of all runs; empty when it was not measured."""
        values = [getattr(run, field) for run in self.runs]
        return [] if None in values else values

    def median(self, field: str) -> float | None:
        """Median over all runs of a memory field, or None when it was not measured."""
        values = self.values(field)
        return statistics.median(values) if values else None


class Invariants(Sealed, frozen=True, kw_only=True):
    """What a cell computes and communicates, whatever the hardware."""

    SCHEMA_VERSION: ClassVar[int] = 1
    schema_version: int = 1
    cell_id: str
    recipe: Recipe
    origin: Origin
    num_parameters: int
    tokens_per_step: int
    start_gradient_norm: float
    end_gradient_norm: float
    losses: tuple[float, ...]
    """Global mean loss of every step, warm-up included."""
    ledger: tuple[RankLedger, ...]
    graph_breaks: int = 0
    """Of the rank that has most."""


class RecordedCeilings(Sealed, frozen=True, kw_only=True):
    """What a machine has reached, for later ones of its key to be held to."""

    SCHEMA_VERSION: ClassVar[int] = 1
    schema_version: int = 1
    machine: Machine
    origin: Origin
    driver: str | None
    ceilings: Ceilings


Stored = TypeVar("Stored", Baseline, Invariants, RecordedCeilings)


class Store:
    """The folders in which baselines are looked for, the first that has one wins."""

    def __init__(self, *roots: Path) -> None:
        self._roots = roots

    def load(self, cell: Cell, machine: Machine) -> Baseline | None:
        """The cell's baseline on exactly this machine, or None. Raises ValueError when the file is damaged."""
        found = self._find(machine.key, cell.id, Baseline)
        if found is not None and found.machine.key != machine.key:
            raise ValueError(f"{found.cell_id}: recorded on {found.machine.key}, stored under {machine.key}")
        return found

    def load_invariants(self, cell: Cell) -> Invariants | None:
        """The cell's invariants, or None. Raises ValueError when the file is damaged."""
        return self._find(INVARIANTS, cell.id, Invariants)

    def load_unsharded(self, cell: Cell) -> Invariants | None:
        """Those of the unsharded model of a cell's size on its kind of device, or None.

        Raises ValueError when the file is damaged.
        """
        link = LinkProfile.GLOO if cell.device_kind == "cpu" else LinkProfile.NATIVE
        names = (
            f"{StrategyName.SINGLE}-{cell.size}-{mode}-w1-{link}" for mode in (cell.mode, Mode.COMPILE, Mode.EAGER)
        )
        found = (self._find(INVARIANTS, name, Invariants) for name in names if name != cell.id)
        return next(filter(None, found), None)

    def load_ceilings(self, machine: Machine) -> RecordedCeilings | None:
        """What machines of exactly this key have reached, or None. Raises ValueError when the file is damaged."""
        return self._find(CEILINGS, machine.key, RecordedCeilings)

    def ids(self, machine: Machine) -> set[str]:
        """Cells that have a baseline on this machine."""
        return {path.stem for root in self._roots for path in (root / machine.key).glob("*.json")}

    def prior_sd(self, machine: Machine, default: float) -> float:
        """The machine's typical between-run sd: the median over its cells; `default` for fewer than three.

        Provisional baselines do not count: runs of one night do not know how far apart nights are.
        """
        spreads = []
        for cell_id in sorted(self.ids(machine)):
            try:
                baseline = self._find(machine.key, cell_id, Baseline)
            except ValueError:
                continue  # said where the cell itself is judged
            if baseline is not None and not baseline.is_provisional:
                spreads.append(stats.robust_sd(baseline.levels))
        return statistics.median(spreads) if len(spreads) >= LEAST_CELLS_FOR_PRIOR else default

    def _find(self, folder: str, name: str, kind: type[Stored]) -> Stored | None:
        for root in self._roots:
            path = root / folder / f"{name}.json"
            if path.exists():
                return read(path, kind)
        return None


_CURE = "restore the file from git, or remove it and record it again with tools.approve"


def read(path: Path, kind: type[Stored]) -> Stored:
    """A stored record, checked. Raises ValueError that names the file and what is wrong with it."""
    data = jsonfile.load(path)
    record = jsonfile.convert(data, kind, source=str(path))
    if record.checksum != digest(data):
        raise ValueError(
            f"{path}: checksum {record.checksum!r} does not fit the content; merged or edited by hand? {_CURE}"
        )
    name = _place(record)[1]
    if name != path.stem:
        raise ValueError(f"{path}: holds the record of {name}")
    if isinstance(record, Baseline):
        _check_values(record, path)
    elif isinstance(record, RecordedCeilings):
        _check_ceilings(record, path)
    return record


def digest(data: dict[str, Any]) -> str:
    """Over a record as it stands in its file, so that a later version which knows more fields still finds it whole."""
    bare = {name: value for name, value in data.items() if name != "checksum"}
    return hashlib.sha256(json.dumps(bare, sort_keys=True).encode()).hexdigest()[:16]


def write(root: Path, record: Baseline | Invariants | RecordedCeilings) -> Path:
    """Stores a record under `root`, sealed, replacing the file as a whole."""
    folder, name = _place(record)
    path = root / folder / f"{name}.json"
    jsonfile.write(path, record.sealed())
    return path


def _place(record: Baseline | Invariants | RecordedCeilings) -> tuple[str, str]:
    """Folder, and name of the file without its suffix."""
    match record:
        case Invariants():
            return INVARIANTS, record.cell_id
        case RecordedCeilings():
            return CEILINGS, record.machine.key
        case Baseline():
            return record.machine.key, record.cell_id


def _check_values(baseline: Baseline, path: Path) -> None:
    if not baseline.runs:
        raise ValueError(f"{path}: holds no runs")
    if baseline.machine.is_gpu and None in [run.peak_allocated_bytes for run in baseline.runs]:
        raise ValueError(f"{path}: lacks the allocator's peaks, which every GPU has; {_CURE}")
    for run in baseline.runs:
        numbers = [*run.step_times_s, run.peak_allocated_bytes, run.peak_reserved_bytes, run.peak_resident_bytes]
        bad = [number for number in numbers if number is not None and number <= 0]
        if bad or not run.step_times_s:
            raise ValueError(f"{path}: {bad[0] if bad else 'no step times'} cannot be a measured value; {_CURE}")


def _check_ceilings(recorded: RecordedCeilings, path: Path) -> None:
    for kind in KINDS:
        rate = recorded.ceilings.rate(kind.name)
        if rate is not None and not rate.is_measured:
            raise ValueError(f"{path}: {kind.name} of {rate.median} cannot be a measured value; {_CURE}")
