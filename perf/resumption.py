"""Whether an interrupted test run can go on: all is read before anything is measured, so that nothing is spoilt."""

import msgspec

from perf.facts.environment import Source
from perf.facts.failure import NotResumable
from perf.facts.hardware import Node
from perf.facts.record import RunRecord, Software
from perf.measure.connection import ROOT
from perf.measure.reference import Reference
from perf.settings import Settings
from perf.tell.results import Manifest, Results


def check(results: Results, settings: Settings, node: Node) -> None:
    """Raises ValueError when a record is damaged, or was made with other code, on another machine or by another plan.

    Versions are not known before a server has imported them: `check_software`, before its first run.
    """
    manifest = results.manifest()
    _check_plan(results, manifest, settings)
    results.verdicts()
    candidate = _source(settings.candidate, settings.commit)
    for cell in manifest.cells:
        for run in results.runs(cell.id):
            _check_run(results, run, candidate, node)
            _check_fault(results, run, settings)
        if runs := results.reference_runs(cell.id):
            reference = _source(settings.reference, settings.commit)
            for run in runs:
                _check_run(results, run, reference, node)


def check_selftest(results: Results, settings: Settings, node: Node) -> None:
    """The same of a self-test, whose planted faults are asked of with each cell."""
    candidate = _source(settings.candidate, settings.commit)
    for cell_id in results.sampled():
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


def _check_run(results: Results, run: RunRecord, source: Source, node: Node) -> None:
    environment, here = run.environment, node.lacks(run.cell) or node.machine_for(run.cell).key
    pairs = [
        ("commit", environment.commit, source.commit),
        ("uncommitted changes", environment.dirty, source.dirty),
        ("machine", environment.machine.key, here),
    ]
    if None not in (environment.digest, source.digest):
        pairs.append(("sources of strategies/", environment.digest, source.digest))
    for name, then, now in pairs:
        if then != now:
            where = f"{results.folder}: {run.cell.id}"
            raise NotResumable(f"{where}: {name} {then} when measured, {now} now; start a new test run")


def _check_fault(results: Results, run: RunRecord, settings: Settings) -> None:
    if run.fault != settings.fault:
        then, now = (fault.text if fault else "no fault" for fault in (run.fault, settings.fault))
        raise NotResumable(f"{results.folder}: measured with {then} planted, now {now}; start a new test run")
