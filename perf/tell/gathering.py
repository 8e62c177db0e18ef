"""Several test runs in one folder, for one report: copies, which are no night of their own."""

import shutil
from collections.abc import Sequence
from pathlib import Path

import msgspec

from perf.tell.results import Manifest, Results


def gather(parts: Sequence[Results], into: Path) -> Results:
    """Copies several test runs of one plan, such as a matrix measured piece by piece, into one new folder.

    All is read before anything is written. What holds of a part as a whole, a preflight or a shift, is of its own node
    and time: a single part keeps both, of several the shifts are told, each under its part's name.

    Raises:
        ValueError: they were made by different plans, a cell was measured in two of them, or `into` is in use.
    """
    if into.exists() and any(into.iterdir()):
        raise ValueError(f"{into} is not empty; name a new folder")
    manifests = [part.manifest() for part in parts]
    _check_plans(manifests)
    owners = _owners(parts, manifests)
    verdicts = [(part, verdict) for part in parts for verdict in part.verdicts()]
    shifts = {part.folder.name: shift for part in parts if (shift := part.shift()) is not None}
    preflights = [part.preflight() for part in parts]
    gathered = Results(into)
    for part in parts:
        for cell_id in (cell_id for cell_id, owner in owners.items() if owner is part):
            _copy(part, gathered, cell_id)
    for part, verdict in verdicts:
        if owners.get(verdict.cell_id, part) is part:
            gathered.write_verdict(verdict)
    told = [remark for manifest in manifests for remark in manifest.remarks]
    if len(parts) == 1:
        gathered.write_shift(parts[0].shift())
        if preflights[0] is not None:
            gathered.write_preflight(preflights[0])
    else:
        told += [f"{name}: {shift.text}" for name, shift in shifts.items()]
    whole = Manifest(
        run_id=into.resolve().name,
        started_at=min(manifest.started_at for manifest in manifests),
        matrix=", ".join({manifest.matrix: None for manifest in manifests}),
        plan=max((manifest.plan for manifest in manifests), key=lambda plan: plan.runs),
        cells=tuple({cell.id: cell for manifest in manifests for cell in manifest.cells}.values()),
        beside="; ".join({manifest.beside: None for manifest in manifests if manifest.beside}),
        side_by_side=any(manifest.side_by_side for manifest in manifests),
        gathered=tuple(name for manifest in manifests for name in manifest.gathered or (manifest.run_id,)),
        remarks=tuple(told),
    )
    gathered.write_manifest(whole)
    return gathered


def _check_plans(manifests: Sequence[Manifest]) -> None:
    """A screen of one run and its picks of three are of one plan: each record says how many its cell was to have."""
    first = manifests[0]
    for other in manifests[1:]:
        if msgspec.structs.replace(other.plan, runs=first.plan.runs) != first.plan:
            raise ValueError(f"{other.run_id} was measured with {other.plan}, {first.run_id} with {first.plan}")
        if other.side_by_side != first.side_by_side:
            raise ValueError(f"of {first.run_id} and {other.run_id} one compares builds side by side, one does not")


def _owners(parts: Sequence[Results], manifests: Sequence[Manifest]) -> dict[str, Results]:
    """The part that measured each cell. Raises ValueError when two did, or a record is damaged."""
    owners: dict[str, Results] = {}
    for part, manifest in zip(parts, manifests, strict=True):
        for cell in manifest.cells:
            part.reference_runs(cell.id)
            if not part.runs(cell.id):
                continue
            if cell.id in owners:
                raise ValueError(
                    f"{cell.id} was measured in {owners[cell.id].folder} and in {part.folder}; leave one out"
                )
            owners[cell.id] = part
    return owners


def _copy(part: Results, gathered: Results, cell_id: str) -> None:
    """The runs of a cell, those beside it, and what was asked of it."""
    for run in part.runs(cell_id):
        gathered.write_run(run)
    for run in part.reference_runs(cell_id):
        gathered.write_reference_run(run)
    if (evidence := part.evidence_folder(cell_id)).is_dir():
        shutil.copytree(evidence, gathered.evidence_folder(cell_id))
