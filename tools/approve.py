"""`python -m tools.approve results/RUN... [--reason TEXT]`: makes measured runs the baselines.

The only writer of baselines/.

Writes exactly the cells that ran and were valid, prints old -> new for each, and leaves all others as they are.
"""

import argparse
import math
import sys
from pathlib import Path

import numpy as np
from filelock import FileLock

from perf import baseline as baselines
from perf.approval import Consent, Proposal, propose
from perf.baseline import Baseline, Invariants, Store
from perf.measurement import PEAK_ALLOCATED, STEP_TIME, Measurement
from perf.render import percent, quantity
from perf.results import Results
from perf.rule import Rule
from perf.suite import BASELINES, LOCAL_BASELINES


def main(arguments: list[str] | None = None) -> int:
    """Exit code 0: every cell that ran is stored; 1: some were refused; 2: nothing could be read or written."""
    options = _parser().parse_args(arguments)
    root = options.baselines or (LOCAL_BASELINES if options.local else BASELINES)
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
            refused = [_approve(results, root, consent, options.invariants_only) for results in folders]
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 1 if any(refused) else 0


def _approve(results: Results, root: Path, consent: Consent, invariants_only: bool) -> bool:
    """Stores one test run; True when a cell was refused."""
    manifest, store, refused = results.manifest(), Store(root), False
    measurements = {measurement.cell.id: measurement for measurement in results.measurements()}
    print(f"{manifest.run_id}:")
    for cell in manifest.cells:
        measurement = measurements.get(cell.id)
        if measurement is None:
            print(f"  not run    {cell.id}")
            continue
        old = None if invariants_only else store.load(cell, measurement.runs[-1].environment.machine)
        old_invariants = store.load_invariants(cell)
        proposal = propose(
            measurement, manifest.run_id, baseline=old, invariants=old_invariants, consent=consent, rule=Rule()
        )
        if proposal.refusal:
            refused = True
            print(f"  refused    {cell.id}: {proposal.refusal}")
            continue
        changed = _store(root, proposal, old, old_invariants, invariants_only)
        what = "invariants" if invariants_only else f"{proposal.summary}{_values(measurement, old)}"
        print(f"  {'stored' if changed else 'unchanged':<10} {cell.id}: {what}")
    return refused


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
    parser.add_argument("runs", nargs="+", type=Path, metavar="results/RUN", help="folders of test runs")
    parser.add_argument("--reason", help="why the values changed; starts a new series and is kept in it")
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
