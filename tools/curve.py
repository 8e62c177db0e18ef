"""`python -m tools.curve [--trials N]`: the operating curve of the verdict, simulated with the rule that judges cells.

How often a cell is REGRESSED in one night, by how much slower it became, under several noise profiles. Takes about a
minute for 4,000 nights a point.
"""

import argparse
import math
import sys
from collections.abc import Sequence

from perf.judge.rule import Rule
from perf.judge.simulation import PROFILES, rates

SLOWDOWNS = (0.0, 0.02, 0.03, 0.05, 0.10)
ROWS = (
    ("quiet", True, "quiet, between runs 0.3 %, step 0.5 %"),
    ("typical", True, "typical, 0.7 %, 1 %"),
    ("noisy", True, "noisy, 1.5 %, 2 %"),
    ("drifting", True, "typical, nights 0.94 % apart"),
    ("typical", False, "typical, no reference build"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table. Exit code 0."""
    options = _parser().parse_args(arguments)
    # The simulated step has no length, so that no least difference in seconds makes sense.
    rule = Rule(least_difference_s=0.0)
    header = ["noise", *(f"{slowdown * 100:g} %" for slowdown in SLOWDOWNS), "runs when nothing changed"]
    print(f"| {' | '.join(header)} |\n|{'---|' * len(header)}")
    for name, has_reference, title in ROWS:
        points = [
            rates(PROFILES[name], slowdown, rule, has_reference=has_reference, num_trials=options.trials)
            for slowdown in SLOWDOWNS
        ]
        shares = [f"{point.regressed * 100:.2f}" for point in points]
        print(f"| {' | '.join([title, *shares, f'{points[0].runs:.2f}'])} |", flush=True)
    worst = 100 * 0.5 / math.sqrt(options.trials)
    print(f"\nREGRESSED in % of nights, {options.trials} nights a point: standard error at most {worst:.2f}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tools.curve", description="Simulate the verdict's operating curve."
    )
    parser.add_argument("--trials", type=int, default=4000, metavar="N", help="nights a point (default: %(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
