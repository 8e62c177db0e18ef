"""`python -m tools.curve`: the operating curve of the verdict, simulated with its own rule.

How often a cell is REGRESSED in one night, by how much slower it became, under several noise profiles. Takes some ten
seconds for 4,000 nights a point.
"""

import argparse
import math
import sys
from collections.abc import Sequence

from msgspec.structs import replace

from perf.judge.rule import PRESETS, Rule
from perf.judge.simulation import NUM_STEPS, PROFILES, Noise, rates

SLOWDOWNS = (0.0, 0.01, 0.02, 0.03, 0.05, 0.10)
MAX_TRIALS = 10**5
"""All nights of a point are in memory at once, some 10 kB each."""
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
        if not 1 <= options.trials <= MAX_TRIALS:
            raise ValueError(f"--trials {options.trials}: at least one night a point, at most {MAX_TRIALS}")
        rows = [_own_row(text) for text in options.noise]
    except ValueError as error:
        parser.error(str(error))
    rows = rows or [(PROFILES[name], has_reference, title) for name, has_reference, title in ROWS]
    header = ["noise", *(f"{slowdown * 100:g} %" for slowdown in SLOWDOWNS), "runs when nothing changed"]
    print(f"| {' | '.join(header)} |\n|{'---|' * len(header)}")
    for noise, has_reference, title in rows:
        rule = _rule(options.preset, noise)
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
    """Of noise as the self-test prints it, and of nights where it is said, with a reference."""
    try:
        between, step, *nights = (float(part) for part in text.split(","))
        (night,) = nights or (0.0,)
    except ValueError:
        between = step = night = math.nan
    if not (0 <= between < 1 and 0 < step < 1 and 0 <= night < 1):
        raise ValueError(
            f"--noise {text}: write two standard deviations as fractions, such as 0.002,0.005, or three, "
            "of which the last is that of nights"
        )
    title = f"between runs {between * 100:g} %, step {step * 100:g} %{f', nights {night * 100:g} %' if night else ''}"
    return Noise(between_runs=between, step=step, cell_night=night), True, title


def _rule(preset: str, noise: Noise) -> Rule:
    """The sensitive preset is meant for machines whose noise is known, so it knows it here too."""
    # The simulated step has no length, so that no least difference in seconds makes sense.
    rule = replace(Rule(least_difference_s=0.0), **PRESETS[preset])
    if preset != "sensitive":
        return rule
    return replace(rule, prior_sd=math.hypot(noise.between_runs, noise.cell_night, noise.step / math.sqrt(NUM_STEPS)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tools.curve", description="Simulate the verdict's operating curve."
    )
    parser.add_argument("--trials", type=int, default=4000, metavar="N", help="nights a point (default: %(default)s)")
    parser.add_argument(
        "--noise",
        action="append",
        default=[],
        metavar="BETWEEN,STEP[,NIGHTS]",
        help="your own, as fractions: 0.20 %% of the self-test is 0.002; several allowed",
    )
    parser.add_argument("--preset", choices=sorted(PRESETS), default="default", help="(default: %(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
