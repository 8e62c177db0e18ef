"""`python -m tools.approve results/RUN... [--reason TEXT]`: makes measured runs the baselines.

The only writer of baselines/.

Writes exactly the cells that ran and were valid, prints old -> new for each, and leaves all others as they are. So it
does with the ceilings of the node, where a test run has a preflight or `--ceilings` names one of `tools.doctor`.
"""

import argparse
import math
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
from filelock import FileLock

from perf.facts import jsonfile
from perf.facts.measurement import PEAK_ALLOCATED, STEP_TIME, Measurement, is_host_bound
from perf.facts.outcome import Outcome
from perf.facts.rates import KINDS
from perf.judge import baseline as baselines
from perf.judge.approval import Consent, Proposal, is_screened, propose, propose_ceilings
from perf.judge.baseline import CEILINGS, INVARIANTS, Baseline, Invariants, RecordedCeilings, Store
from perf.judge.correctness import unlike_unsharded
from perf.judge.preflight import Doubts, Preflight, doubts
from perf.judge.rule import OVERRIDES, overrides, prior_sd, rule_for
from perf.settings import BASELINES, LOCAL_BASELINES
from perf.tell.render import percent, quantity
from perf.tell.results import Manifest, Results


def main(arguments: list[str] | None = None) -> int:
    """Exit code 0: every cell that ran is stored; 1: some were refused; 2: nothing could be read or written."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if not options.runs and not options.ceilings:
        parser.error("name a test run, results/RUN, or a preflight, --ceilings PREFLIGHT.json")
    root = options.baselines or (LOCAL_BASELINES if options.local else BASELINES)
    place = Place(root, BASELINES if options.local else None)
    try:
        consent = Consent(
            reason=options.reason,
            accept_regression=options.accept_regression,
            accept_invariants=options.accept_invariants,
        )
        folders = sorted(
            (Results.open(folder) for folder in options.runs), key=lambda results: results.manifest().run_id
        )
        root.mkdir(parents=True, exist_ok=True)
        with FileLock(root / ".approve.lock"):
            refused = [_approve(results, place, consent, options.invariants_only) for results in folders]
            for path in options.ceilings:
                print(f"{path}:")
                preflight = jsonfile.read(path, Preflight)
                refused.append(_approve_ceilings(preflight, preflight.measured_at, place, consent))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 1 if any(refused) else 0


class Place(NamedTuple):
    """Where baselines are stored."""

    root: Path
    wins: Path | None
    """Folder whose files win over those of `root`; None: it is the first to be looked in."""

    @property
    def store(self) -> Store:
        return Store(*filter(None, (self.wins, self.root)))

    def shadow(self, folder: str, name: str) -> str | None:
        """Why nothing that is stored under this name would ever be read, or None."""
        if self.wins is None or not (path := self.wins / folder / f"{name}.json").exists():
            return None
        return f"{path} wins over a local one, which nobody would read; approve without --local"


def _approve(results: Results, place: Place, consent: Consent, invariants_only: bool) -> bool:
    """Stores one test run; True when a cell was refused."""
    manifest, store, refused = results.manifest(), place.store, False
    measurements = {measurement.cell.id: measurement for measurement in results.measurements()}
    print(f"{manifest.run_id}:")
    if reason := _refusal_of_all(manifest):
        print(f"  refused    all: {reason}")
        return True
    preflight = None if invariants_only else results.preflight()
    in_doubt = Doubts() if preflight is None else doubts(preflight, store.load_ceilings(preflight.machine))
    said = {verdict.cell_id: verdict.outcome for verdict in results.verdicts()}
    for cell in manifest.cells:
        measurement = measurements.get(cell.id)
        if measurement is None:
            refused = refused or said.get(cell.id) is Outcome.ERROR
            print(f"  {'failed' if said.get(cell.id) is Outcome.ERROR else 'not run':<10} {cell.id}")
            continue
        if is_screened(measurement, manifest.plan):
            few = f"{len(measurement.runs)} of {manifest.plan.runs} runs, as a screen has them; no baseline"
            print(f"  {'left out':<10} {cell.id}: {few}")
            continue
        old = None if invariants_only else store.load(cell, measurement.runs[-1].environment.machine)
        old_invariants = store.load_invariants(cell)
        proposal = _proposal(measurement, manifest.run_id, place, (old, old_invariants), consent, said.get(cell.id))
        doubted = in_doubt.of_cell(is_host_bound=is_host_bound(measurement)) if cell.device_kind == "cuda" else ()
        if doubted and not consent.accept_regression:
            refusal = f"the node is not comparable: {doubted[0]}; if meant: --accept-regression --reason ..."
            proposal = Proposal(cell_id=cell.id, refusal=refusal)
        if proposal.refusal:
            refused = True
            print(f"  refused    {cell.id}: {proposal.refusal}{_values(measurement, old)}")
            continue
        changed = _store(place.root, proposal, old, old_invariants, invariants_only)
        what = "invariants" if invariants_only else f"{proposal.summary}{_values(measurement, old)}"
        print(f"  {'stored' if changed else 'unchanged':<10} {cell.id}: {what}")
    if preflight is not None and _approve_ceilings(preflight, manifest.run_id, place, consent):
        refused = True
    return refused


def _refusal_of_all(manifest: Manifest) -> str | None:
    """Why nothing of a test run can be a baseline, or None."""
    if manifest.side_by_side:
        return f"measured {manifest.beside}; a baseline is of this checkout alone"
    if manifest.gathered:
        return f"a copy of {', '.join(manifest.gathered)}, for one report; approve these, each a night of its own node"
    return None


def _proposal(
    measurement: Measurement,
    run_id: str,
    place: Place,
    stored: tuple[Baseline | None, Invariants | None],
    consent: Consent,
    said: Outcome | None,
) -> Proposal:
    """What to store of a cell, or why not."""
    cell, machine, store = measurement.cell, measurement.runs[-1].environment.machine, place.store
    old, invariants = stored
    if reason := place.shadow(machine.key, cell.id):
        return Proposal(cell_id=cell.id, refusal=reason)
    rule, _ = rule_for(cell.id, "default", old, overrides(place.root / OVERRIDES), prior_sd(store, machine))
    proposal = propose(measurement, run_id, baseline=old, invariants=invariants, consent=consent, rule=rule, said=said)
    if (missing := measurement.plan.runs - len(measurement.runs)) > 0:
        more = f"pytest perf --perf-resume results/{run_id} --perf-runs {measurement.plan.runs}"
        return Proposal(cell_id=cell.id, refusal=f"{proposal.refusal}; {more} makes the {missing} that it lacks")
    if proposal.invariants not in (None, invariants) and (reason := place.shadow(INVARIANTS, cell.id)):
        return Proposal(cell_id=cell.id, refusal=reason)
    unsharded = store.load_unsharded(cell) if invariants is None else None
    if unsharded is not None and (errors := unlike_unsharded(measurement, unsharded)):
        return Proposal(cell_id=cell.id, refusal=errors[0])
    return proposal


def _approve_ceilings(preflight: Preflight, run_id: str, place: Place, consent: Consent) -> bool:
    """Stores the ceilings of a node; True when they were refused."""
    name, old = f"ceilings of {preflight.machine.key}", place.store.load_ceilings(preflight.machine)
    proposal = propose_ceilings(preflight, run_id, recorded=old, consent=consent)
    shadow = place.shadow(CEILINGS, preflight.machine.key) if proposal.record is not None else None
    if refusal := proposal.refusal or shadow:
        print(f"  refused    {name}: {refusal}")
        return True
    if proposal.record is not None:
        baselines.write(place.root, proposal.record)
    what = proposal.summary + ("" if proposal.record is None else f": {_rates(proposal.record, old)}")
    print(f"  {'unchanged' if proposal.record is None else 'stored':<10} {name}: {what}")
    return False


def _rates(new: RecordedCeilings, old: RecordedCeilings | None) -> str:
    """`GEMM 793 TFLOP/s -> 640 TFLOP/s, ...`."""
    parts = []
    for kind in KINDS:
        rate, before = new.ceilings.rate(kind.name), old.ceilings.rate(kind.name) if old else None
        if rate is not None and rate.median is not None:
            was = f"{kind.text(before.median)} -> " if before is not None and before.median is not None else ""
            parts.append(f"{kind.titled(new.ceilings.protocol)} {was}{kind.text(rate.median)}")
    return ", ".join(parts)


def _store(
    root: Path, proposal: Proposal, old: Baseline | None, old_invariants: Invariants | None, invariants_only: bool
) -> bool:
    """Writes what differs from the stored records; whether anything did."""
    changed = False
    if proposal.invariants is not None and proposal.invariants != old_invariants:
        baselines.write(root, proposal.invariants)
        changed = True
    if proposal.baseline is not None and proposal.baseline != old and not invariants_only:
        baselines.write(root, proposal.baseline)
        changed = True
    return changed


def _values(measurement: Measurement, old: Baseline | None) -> str:
    """`: step time 51.2 ms -> 58.9 ms (+15.0 %)`, and the peak where it is measured."""
    step_time_s = measurement.median(STEP_TIME)
    if step_time_s is None:
        return ""
    if old is None:
        return f": step time {quantity(step_time_s, STEP_TIME)}"
    old_s = math.exp(float(np.median(old.levels)))
    text = f": step time {quantity(old_s, STEP_TIME)} -> {quantity(step_time_s, STEP_TIME)}"
    text += f" ({percent(step_time_s / old_s - 1)})"
    peak, old_peak = measurement.median(PEAK_ALLOCATED), old.median(PEAK_ALLOCATED.name)
    if peak is not None and old_peak is not None:
        text += f", peak {quantity(old_peak, PEAK_ALLOCATED)} -> {quantity(peak, PEAK_ALLOCATED)}"
    return text


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.approve", description="Make measured runs the baselines.")
    parser.add_argument("runs", nargs="*", type=Path, metavar="results/RUN", help="folders of test runs")
    parser.add_argument(
        "--ceilings",
        action="append",
        default=[],
        type=Path,
        metavar="PREFLIGHT.json",
        help="store the ceilings that tools.doctor measured",
    )
    parser.add_argument(
        "--reason", help="why the values changed; starts a new series, or continues that of the same reason"
    )
    parser.add_argument("--accept-regression", action="store_true", help="store worse values too (needs --reason)")
    parser.add_argument(
        "--accept-invariants",
        action="store_true",
        help="store changed collectives, losses or gradient norms too (needs --reason)",
    )
    parser.add_argument(
        "--invariants-only", action="store_true", help="store no timing: for a machine that is nobody's"
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--local", action="store_true", help="store for this checkout only, not in baselines/")
    where.add_argument("--baselines", type=Path, help="store below this folder")
    return parser


if __name__ == "__main__":
    sys.exit(main())
