"""`python -m tools.screen results/RUN... [--into FILE]`: which candidate of each axis is the fastest.

Of test runs that measured each candidate at least once; the fastest become a matrix file, to be measured in full.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from perf.facts.cell import Cell
from perf.facts.matrix import as_toml
from perf.facts.measurement import PEAK_ALLOCATED, THROUGHPUT
from perf.tell.exports import FinishedTestRun, read_test_run
from perf.tell.progress import terminal_console
from perf.tell.render import quantity
from perf.tell.results import Results
from perf.tell.screen import MARGIN, Candidate, Group, fastest, groups_of
from perf.tell.sections import Section, show
from strategies.spec import LinkProfile

HEADER = ("", "axis", "candidate", "mode", "throughput", "of the fastest", "peak allocated", "runs")


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0: each group has a fastest candidate; 1: nothing was measured; 2: a folder or option is no good."""
    options = _parser().parse_args(arguments)
    try:
        if not 0 <= options.margin < 1:
            raise ValueError(f"--margin {options.margin:g}: a share of the fastest throughput, such as {MARGIN}")
        if options.into and options.into.exists():
            raise ValueError(f"{options.into} exists; name a new file, or remove it")
        test_runs = [read_test_run(Results.open(folder)) for folder in options.folders]
        groups = groups_of(test_runs)
        picks = [pick for candidates in groups.values() for pick in fastest(candidates, options.margin)]
        if options.every_link:
            names = {_without_link(pick.cell) for pick in picks}
            measured = [candidate for candidates in groups.values() for candidate in candidates]
            picks = [candidate for candidate in measured if _without_link(candidate.cell) in names]
        if options.into and picks:
            options.into.write_text(as_toml([pick.cell for pick in picks]), encoding="utf-8")
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    show(_page(groups, {pick.cell.id for pick in picks}), terminal_console())
    print(*_left_out(test_runs), sep="", end="")
    if not picks:
        print("nothing was measured: no cell has a right run")
        return 1
    if options.into:
        print(f"picked (*): {len(picks)} of {sum(map(len, groups.values()))}; pytest perf --perf-matrix {options.into}")
    return 0


def _without_link(cell: Cell) -> Cell:
    """The same for cells that differ in their link alone."""
    return msgspec.structs.replace(cell, link=LinkProfile.NATIVE)


def _page(groups: Mapping[Group, Sequence[Candidate]], picked: set[str]) -> list[Section]:
    """A table for each size, link, number of ranks and, where there are several, workload."""
    several = len({group.workload for group in groups}) > 1
    tables: dict[str, list[tuple[str, ...]]] = {}
    for group, candidates in groups.items():
        title = f"{group.size}, {group.world_size} ranks, {group.link}" + f", {group.workload}" * several
        rows = tables.setdefault(title, [])
        best = candidates[0].tokens_per_s
        rows += [_row(group, candidate, best, is_picked=candidate.cell.id in picked) for candidate in candidates]
    return [Section(title=title, header=HEADER, rows=tuple(rows)) for title, rows in tables.items()]


def _row(group: Group, candidate: Candidate, best: float, *, is_picked: bool) -> tuple[str, ...]:
    return (
        "*" if is_picked else "",
        group.axis,
        candidate.cell.variant,
        candidate.cell.mode.value,
        quantity(candidate.tokens_per_s, THROUGHPUT),
        f"{candidate.tokens_per_s / best * 100:.1f} %",
        "-" if candidate.peak_bytes is None else quantity(candidate.peak_bytes, PEAK_ALLOCATED),
        str(candidate.num_runs),
    )


def _left_out(test_runs: Sequence[FinishedTestRun]) -> list[str]:
    """A line for each cell without a value in any of the test runs, and why."""
    measured = {measurement.cell.id for test_run in test_runs for measurement, _ in test_run.with_values}
    reasons = {name: reason for test_run in test_runs for name, reason in test_run.left_out.items()}
    return [f"left out: {name}: {reason}\n" for name, reason in sorted(reasons.items()) if name not in measured]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tools.screen", description="Which candidate of each axis, size and link is the fastest?"
    )
    parser.add_argument("folders", nargs="+", type=Path, metavar="results/RUN", help="folder of a test run")
    parser.add_argument("--into", type=Path, metavar="FILE", help="write the fastest as a matrix file")
    as_fast = f"take also what is slower by this share at most: one run cannot tell (default: {MARGIN})"
    parser.add_argument("--margin", type=float, default=MARGIN, metavar="SHARE", help=as_fast)
    links = "take each also over the other links that were measured, so that links can be compared cell by cell"
    parser.add_argument("--every-link", action="store_true", help=links)
    return parser


if __name__ == "__main__":
    sys.exit(main())
