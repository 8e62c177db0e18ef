"""Whether an interrupted test run can go on: all is read before anything is measured, so that nothing is spoilt."""

from typing import NamedTuple, Self

import msgspec

from perf.facts.cell import Cell
from perf.facts.environment import Source, variables_of_ranks
from perf.facts.failure import NotResumable
from perf.facts.hardware import Node, link_variables
from perf.facts.record import RunRecord, Software
from perf.measure.connection import ROOT
from perf.measure.reference import Reference
from perf.settings import Settings
from perf.tell.results import REFERENCE, RUNS, SELFTEST, Manifest, Results


def check(results: Results, settings: Settings, node: Node) -> None:
    """Raises ValueError when a record is damaged, or was made with other code, on another machine or by another plan.

    Versions are not known before a server has imported them: `check_software`, before its first run.
    """
    manifest = results.manifest()
    _check_plan(results, manifest, settings)
    for read in (results.verdicts, results.shift, results.preflight):
        read()
    cells = {cell.id: cell for cell in manifest.cells}
    for kind in (RUNS, REFERENCE):
        of_reference = kind == REFERENCE
        side = _Side.of(settings, is_reference=of_reference) if results.first(kind) is not None else None
        for name in results.cells(kind):
            if name not in cells:
                raise ValueError(f"{results.folder}: has {kind} of {name}, which its manifest lacks; move them away")
            runs = results.reference_runs(name) if of_reference else results.runs(name)
            for run in runs:
                if run.cell != cells[name]:
                    raise ValueError(f"{results.folder}: {kind}/{name}/{run.index}.json is a record of another cell")
                assert side is not None
                _check_run(results, run, side, node)
                if not of_reference:
                    _check_fault(results, run, settings)
    for name in cells:
        for arm in ("candidate", "reference"):
            results.evidence(name, arm)


class _Side(NamedTuple):
    """What a build's runs have in common."""

    source: Source
    variables: tuple[tuple[str, str], ...]
    without: tuple[str, ...]

    @classmethod
    def of(cls, settings: Settings, *, is_reference: bool) -> Self:
        if is_reference:
            names = tuple(name for name, _ in settings.variables)
            return cls(_source(settings.reference, settings.commit), (), names)
        return cls(_source(settings.candidate, settings.commit), settings.variables, ())

    def variables_of(self, cell: Cell) -> dict[str, str]:
        """Those that would be recorded of a run now."""
        return variables_of_ranks(link_variables(cell.link) | dict(cell.variables) | dict(self.variables), self.without)


def check_selftest(results: Results, settings: Settings, node: Node) -> None:
    """The same of a self-test, whose planted faults are asked of with each cell."""
    candidate = _Side.of(settings, is_reference=False)
    for cell_id in results.cells(SELFTEST):
        for run in results.samples(cell_id):
            _check_run(results, run, candidate, node)


def check_software(results: Results, kind: str, software: Software) -> None:
    """Raises NotResumable when the test run has records, of whatever cell, that were made with other versions.

    Args:
        kind: `RUNS`, `REFERENCE` or `SELFTEST` of `perf.tell.results`.
    """
    if (run := results.first(kind)) is None:
        return
    now, then = msgspec.to_builtins(software), msgspec.to_builtins(run.environment.software)
    other = [f"{name} {then[name]} when measured, {now[name]} now" for name in now if then[name] != now[name]]
    if other:
        raise NotResumable(f"{results.folder}: {run.cell.id}: {', '.join(other)}; start a new test run")


def _check_plan(results: Results, manifest: Manifest, settings: Settings) -> None:
    plan = settings.plan
    if manifest.gathered:
        parts = ", ".join(manifest.gathered)
        raise NotResumable(f"{results.folder} is a copy of {parts}, for one report; resume one of these")
    if manifest.beside != settings.beside:
        then, now = (text or "with nothing beside" for text in (manifest.beside, settings.beside))
        raise NotResumable(f"{results.folder} was measured {then}, not {now}; start a new test run")
    if msgspec.structs.replace(manifest.plan, runs=plan.runs) != plan:
        raise NotResumable(f"{results.folder} was measured with {manifest.plan}, not with {plan}; start a new test run")


def _source(build: Reference | None, commit: str | None) -> Source:
    """The tree that a build is made from, which need not be made yet."""
    if build is not None and build.commit is not None:
        return Source(ROOT, revision=build.commit)
    if build is not None and build.folder is not None and build.folder != str(ROOT):
        return Source(build.folder)
    return Source(ROOT, commit)


def _check_run(results: Results, run: RunRecord, side: _Side, node: Node) -> None:
    source, environment, here = side.source, run.environment, node.lacks(run.cell) or node.machine_for(run.cell).key
    pairs: list[tuple[str, object, object]] = [
        ("commit", environment.commit, source.commit),
        ("uncommitted changes", environment.dirty, source.dirty),
        ("machine", environment.machine.key, here),
    ]
    if None not in (environment.digest, source.digest):
        pairs.append(("sources", environment.digest, source.digest))
    then_set, now_set = environment.variables, side.variables_of(run.cell)
    pairs += [
        (f"variable {name}", then_set.get(name, "unset"), now_set.get(name, "unset"))
        for name in sorted(then_set.keys() | now_set.keys())
    ]
    for name, then, now in pairs:
        if then != now:
            where = f"{results.folder}: {run.cell.id}"
            raise NotResumable(f"{where}: {name} {then} when measured, {now} now; start a new test run")


def _check_fault(results: Results, run: RunRecord, settings: Settings) -> None:
    if run.fault != settings.fault:
        then, now = (fault.text if fault else "no fault" for fault in (run.fault, settings.fault))
        raise NotResumable(f"{results.folder}: measured with {then} planted, now {now}; start a new test run")
