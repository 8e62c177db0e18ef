"""The folder of one test run: its manifest, every run's raw record, the verdicts. Reports are made from it alone.

results/<run id>/manifest.json
runs/<cell id>/<index>.json
reference/<cell id>/<index>.json, of the build beside it in a comparison of builds
shift.json, where the whole suite moved
verdicts/<cell id>.json
evidence/<cell id>/candidate.json, reference.json, <arm>-rank<rank>.json.gz, evidence.txt   of cells that regressed
selftest/<cell id>/<index>.json and <cell id>.json, of a self-test
preflight.json, of the node before the first cell
"""

import contextlib
import itertools
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import ClassVar

import msgspec

from perf.facts import jsonfile
from perf.facts.cell import Cell, SamplingPlan
from perf.facts.measurement import Measurement, measure
from perf.facts.record import Environment, RunRecord
from perf.judge.breaker import Shift
from perf.judge.preflight import Preflight
from perf.judge.verdict import Verdict
from perf.measure.evidence import Evidence
from strategies.value import Value

MANIFEST, SHIFT = "manifest.json", "shift.json"
RUNS, REFERENCE, SELFTEST = "runs", "reference", "selftest"
"""Folders of records."""
EXPLANATION = "evidence.txt"
PREFLIGHT = "preflight.json"


class Manifest(Value, frozen=True, kw_only=True):
    """What a test run set out to do, and where."""

    SCHEMA_VERSION: ClassVar[int] = 1
    schema_version: int = 1
    run_id: str
    started_at: str
    """UTC, ISO 8601."""
    matrix: str
    """`auto`, `smoke`, `node`, or the name of a matrix file."""
    plan: SamplingPlan
    cells: tuple[Cell, ...]
    """All selected cells, also those that cannot run here."""
    beside: str = ""
    """Which cells of which build were compared with which, in words; empty: none were."""
    side_by_side: bool = False
    """Whether every cell was, and none with its baseline."""
    gathered: tuple[str, ...] = ()
    """Names of the test runs that this one is a copy of, for one report; (): it was measured as it is."""
    remarks: tuple[str, ...] = ()
    """What was said of these as a whole, such as that a suite had moved."""


def new_run_id(now: datetime | None = None) -> str:
    """`2026-11-29T14-03-22`: sorts by time, and is a file name everywhere."""
    return (now or datetime.now(UTC)).strftime("%Y-%m-%dT%H-%M-%S")


def shown(folder: Path) -> str:
    """The folder as a user would type it."""
    return str(folder.relative_to(Path.cwd())) if folder.is_relative_to(Path.cwd()) else str(folder)


def _seconds(runs: Sequence[RunRecord], num_runs: int) -> float:
    """Of so many runs like these, compiling and imports included."""
    once_s = sum(run.priming_s + run.server_start_up_s for run in runs)
    return once_s + num_runs * sum(run.wall_s for run in runs) / len(runs)


class Results:
    """Reads and writes one test run's folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._is_claimed = True

    @classmethod
    def new(cls, root: Path) -> "Results":
        """Of a test run that begins; nothing is written before `claim`."""
        results = cls(root / new_run_id())
        results._is_claimed = False
        return results

    def claim(self) -> None:
        """Makes the folder of a new test run. Of two that began in the same second, one takes the next name."""
        run_id = self.folder.name
        numbers = itertools.count(2)
        while not self._is_claimed:
            try:
                self.folder.mkdir(parents=True)
                self._is_claimed = True
            except FileExistsError:
                self.folder = self.folder.parent / f"{run_id}-{next(numbers)}"

    def leave_if_empty(self) -> None:
        """Removes the folder of a test run that was not to be; one that is another's was never claimed."""
        if self._is_claimed:
            with contextlib.suppress(OSError):
                self.folder.rmdir()

    @classmethod
    def open(cls, folder: Path) -> "Results":
        """The results of an existing test run. Raises ValueError when the folder is not one."""
        if not (folder / MANIFEST).is_file():
            raise ValueError(f"{folder} is not a test run: it has no {MANIFEST}; pass a folder below results/")
        return cls(folder)

    @classmethod
    def open_selftest(cls, folder: Path) -> "Results":
        """Those of an interrupted self-test. Raises ValueError when the folder is none."""
        if not (folder / SELFTEST).is_dir():
            raise ValueError(f"{folder} is no self-test: it has no {SELFTEST}/; pass a folder below results/")
        return cls(folder)

    def exists(self) -> bool:
        return (self.folder / MANIFEST).is_file()

    def check_cells(self, cells: tuple[Cell, ...]) -> None:
        """Raises ValueError when the test run has another cell of the name of one of these."""
        known = {cell.id: cell for cell in cells}
        other = [cell.id for cell in self.manifest().cells if known.get(cell.id, cell) != cell]
        if other:
            raise ValueError(
                f"{self.folder} has another cell of the name {other[0]}; resume it with its own --perf-matrix"
            )

    def manifest(self) -> Manifest:
        return jsonfile.read(self.folder / MANIFEST, Manifest)

    def write_manifest(self, manifest: Manifest) -> None:
        jsonfile.write(self.folder / MANIFEST, manifest)

    def go_on(self, cells: Iterable[Cell], plan: SamplingPlan, matrix: str) -> None:
        """Of a test run that is resumed: with more cells perhaps, more runs of each, or those of another matrix."""
        old = self.manifest()
        whole = msgspec.structs.replace(
            old,
            cells=tuple({cell.id: cell for cell in (*old.cells, *cells)}.values()),
            plan=msgspec.structs.replace(plan, runs=max(plan.runs, old.plan.runs)),
            matrix=old.matrix if matrix in old.matrix.split(", ") else f"{old.matrix}, {matrix}",
        )
        if whole != old:
            self.write_manifest(whole)

    def write_preflight(self, preflight: Preflight) -> Path:
        jsonfile.write(self.folder / PREFLIGHT, preflight)
        return self.folder / PREFLIGHT

    def preflight(self) -> Preflight | None:
        """Of the node, or None where none was made. Raises ValueError when it is damaged."""
        path = self.folder / PREFLIGHT
        return jsonfile.read(path, Preflight) if path.exists() else None

    def write_run(self, run: RunRecord) -> None:
        jsonfile.write(self.folder / RUNS / run.cell.id / f"{run.index}.json", run)

    def runs(self, cell_id: str) -> list[RunRecord]:
        """The cell's runs in order. Raises ValueError when one is damaged."""
        return self._read_runs(self.folder / RUNS / cell_id)

    def num_runs(self, cell_id: str) -> int:
        return len(list((self.folder / RUNS / cell_id).glob("*.json")))

    def cells(self, kind: str) -> list[str]:
        """Cells that have records in the folder `RUNS`, `REFERENCE` or `SELFTEST`."""
        return sorted(path.name for path in (self.folder / kind).glob("*") if path.is_dir())

    def first(self, kind: str) -> RunRecord | None:
        """A record of `RUNS`, `REFERENCE` or `SELFTEST`, of whatever cell; None: there is none yet."""
        path = min((self.folder / kind).glob("*/*.json"), default=None)
        return None if path is None else jsonfile.read(path, RunRecord)

    def _read_runs(self, folder: Path) -> list[RunRecord]:
        paths = {path.stem: path for path in folder.glob("*.json")}
        if stray := sorted(stem for stem in paths if not (stem.isdecimal() and stem.isascii())):
            raise ValueError(
                f"{paths[stray[0]]}: is no run, whose file is named by its number alone; move it elsewhere"
            )
        return [jsonfile.read(paths[stem], RunRecord) for stem in sorted(paths, key=int)]

    def write_sample(self, run: RunRecord) -> None:
        """A run of the self-test, with a fault planted or not."""
        jsonfile.write(self.folder / SELFTEST / run.cell.id / f"{run.index}.json", run)

    def selftest(self, cell_id: str) -> Path:
        """File of what the self-test of a cell has found."""
        return self.folder / SELFTEST / f"{cell_id}.json"

    def samples(self, cell_id: str) -> list[RunRecord]:
        """The runs of the self-test of a cell, in order."""
        return self._read_runs(self.folder / SELFTEST / cell_id)

    def write_reference_run(self, run: RunRecord) -> None:
        jsonfile.write(self.folder / REFERENCE / run.cell.id / f"{run.index}.json", run)

    def reference_runs(self, cell_id: str) -> list[RunRecord]:
        """Of the reference build, in order; each beside the cell's own run of the same index."""
        return self._read_runs(self.folder / REFERENCE / cell_id)

    def expected_s(self, cell_id: str, num_runs: int, arms: Sequence[str] = (RUNS,)) -> float | None:
        """Seconds of wall time that so many runs of the cell will take, of each arm; None: not known.

        As in this test run, or else in the newest one beside it that has such a cell. An arm that it lacks is taken to
        be as slow as the first one.
        """
        others = sorted((path.parent.parent for path in self.folder.parent.glob(f"*/runs/{cell_id}")), reverse=True)
        for place in (self.folder, *others):
            with contextlib.suppress(ValueError):
                of_arms = [self._read_runs(place / arm / cell_id) for arm in arms]
                if of_arms[0]:
                    return sum(_seconds(runs or of_arms[0], num_runs) for runs in of_arms)
        return None

    def write_shift(self, shift: Shift | None) -> None:
        """None: nothing moved, whatever was said before the test run went on."""
        if shift is None:
            (self.folder / SHIFT).unlink(missing_ok=True)
        else:
            jsonfile.write(self.folder / SHIFT, shift)

    def shift(self) -> Shift | None:
        """The move of the whole suite, if it moved."""
        path = self.folder / SHIFT
        return jsonfile.read(path, Shift) if path.is_file() else None

    def write_verdict(self, verdict: Verdict) -> None:
        jsonfile.write(self.folder / "verdicts" / f"{verdict.cell_id}.json", verdict)

    def verdicts(self) -> list[Verdict]:
        return [jsonfile.read(path, Verdict) for path in sorted((self.folder / "verdicts").glob("*.json"))]

    def evidence_folder(self, cell_id: str) -> Path:
        """Of a cell's profiled runs: their records, their traces, and what they say."""
        return self.folder / "evidence" / cell_id

    def write_evidence(self, name: str, evidence: Evidence) -> None:
        """Keeps the record of one arm, `candidate` or `reference`."""
        jsonfile.write(self.evidence_folder(evidence.cell.id) / f"{name}.json", evidence)

    def evidence(self, cell_id: str, name: str) -> Evidence | None:
        """The record of one arm; None when there is none. Raises ValueError when it is damaged."""
        path = self.evidence_folder(cell_id) / f"{name}.json"
        return jsonfile.read(path, Evidence) if path.is_file() else None

    def write_explanation(self, cell_id: str, lines: Sequence[str]) -> None:
        path = self.evidence_folder(cell_id) / EXPLANATION
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")

    def explanation(self, cell_id: str) -> tuple[str, ...]:
        """Why the cell is slow, in lines; empty when nothing was profiled."""
        path = self.evidence_folder(cell_id) / EXPLANATION
        return tuple(path.read_text(encoding="utf-8").splitlines()) if path.is_file() else ()

    def traces(self, cell_id: str) -> list[Path]:
        """The cell's traces, one for each arm and rank."""
        return sorted(self.evidence_folder(cell_id).glob("*.json.gz"))

    def measurements(self) -> list[Measurement]:
        """Of every cell with at least one run, in the manifest's order."""
        manifest = self.manifest()
        found = (self.measurement(cell, manifest.plan) for cell in manifest.cells)
        return [measurement for measurement in found if measurement is not None]

    def measurement(self, cell: Cell, plan: SamplingPlan) -> Measurement | None:
        """Of one cell, by as many runs as it was to have: a test run may go on with more of some. None without a run.

        Raises ValueError when a record is damaged.
        """
        runs = self.runs(cell.id)
        if not runs:
            return None
        return measure(cell, msgspec.structs.replace(plan, runs=max(run.plan.runs for run in runs)), runs)

    def environment(self) -> Environment | None:
        """Of the newest run; None while there is none."""
        runs = [run for measurement in self.measurements() for run in measurement.runs]
        return max(runs, key=lambda run: run.started_at).environment if runs else None
