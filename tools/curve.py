"""`python -m tools.curve [--noise BETWEEN,STEP]`: the operating curve of the verdict, simulated with its own rule.

How often a cell is REGRESSED in one night, by how much slower it became, under several noise profiles. Takes about a
minute for 4,000 nights a point.
"""

import argparse
import math
import sys
from collections.abc import Sequence

from perf.judge.rule import Rule
from perf.judge.simulation import PROFILES, Noise, rates

SLOWDOWNS = (0.0, 0.02, 0.03, 0.05, 0.10)
ROWS = (
    ("quiet", True, "quiet, between runs 0.3 %, step 0.5 %"),
    ("typical", True, "typical, 0.7 %, 1 %"),
    ("noisy", True, "noisy, 1.5 %, 2 %"),
    ("drifting", True, "typical, nights 0.94 % apart"),
    ("typical", False, "typical, no reference build"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table. Exit code 0; 2 for an option that cannot be meant."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        rows = [_own_row(text) for text in options.noise]
    except ValueError as error:
        parser.error(str(error))
    rows = rows or [(PROFILES[name], has_reference, title) for name, has_reference, title in ROWS]
    # The simulated step has no length, so that no least difference in seconds makes sense.
    rule = Rule(least_difference_s=0.0)
    header = ["noise", *(f"{slowdown * 100:g} %" for slowdown in SLOWDOWNS), "runs when nothing changed"]
    print(f"| {' | '.join(header)} |\n|{'---|' * len(header)}")
    for noise, has_reference, title in rows:
        points = [
            rates(noise, slowdown, rule, has_reference=has_reference, num_trials=options.trials)
            for slowdown in SLOWDOWNS
        ]
        shares = [f"{point.regressed * 100:.2f}" for point in points]
        print(f"| {' | '.join([title, *shares, f'{points[0].runs:.2f}'])} |", flush=True)
    worst = 100 * 0.5 / math.sqrt(options.trials)
    print(f"\nREGRESSED in % of nights, {options.trials} nights a point: standard error at most {worst:.2f}")
    return 0


def _own_row(text: str) -> tuple[Noise, bool, str]:
    """Of noise as the self-test prints it, on one night, with a reference."""
    try:
        between, step = (float(part) for part in text.split(","))
    except ValueError:
        between = step = math.nan
    if not (0 <= between < 1 and 0 < step < 1):
        raise ValueError(f"--noise {text}: write two standard deviations as fractions, such as 0.002,0.005")
    return Noise(between_runs=between, step=step), True, f"between runs {between * 100:g} %, step {step * 100:g} %"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tools.curve", description="Simulate the verdict's operating curve."
    )
    parser.add_argument("--trials", type=int, default=4000, metavar="N", help="nights a point (default: %(default)s)")
    parser.add_argument(
        "--noise",
        action="append",
        default=[],
        metavar="BETWEEN,STEP",
        help="your own, as fractions: 0.20 %% of the self-test is 0.002; several allowed",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
