"""`python -m tools.history [-k CELL] [--metric NAME] [-o FOLDER]`: draws what cells measured over the test runs.

One picture for each cell and machine, with the baseline's band, change points and changes of the environment. Reads
results/ and changes nothing there.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from perf.facts.measurement import METRICS
from perf.judge.band import Band, band, rule_of
from perf.judge.baseline import Store
from perf.measure.connection import ROOT
from perf.settings import BASELINES, LOCAL_BASELINES
from perf.tell.change_points import GET_OTAVA
from perf.tell.history import History, Series, gather
from perf.tell.history_pages import BandOf, pages, told

NAMES = {metric.title.replace(" ", "-"): metric for metric, _ in METRICS.values()}
"""Metrics as --metric spells them."""
NOTHING = 8


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 0, or 8 when there is nothing to draw, or 2 when a folder cannot be read or written."""
    options = _parser().parse_args(arguments)
    metrics = [NAMES[name] for name in options.metric] if options.metric else None
    try:
        if not options.results.is_dir():
            print(f"{options.results} is no folder: no test run was kept there; `make perf` makes one", file=sys.stderr)
            return NOTHING
        history = gather(options.results, wanted=lambda cell: _matches(cell.id, options.cells))
        shown = pages(history, metrics, bands(Store(options.baselines, LOCAL_BASELINES)), commits=options.commits)
        if shown:
            from perf.tell.history_charts import draw  # matplotlib: only when there is something to draw

            for page in shown:
                path = draw(page, options.into / f"{page.cell_id}--{page.machine_key}.png")
                first, last, number = page.visits[0].run_id, page.visits[-1].run_id, len(page.visits)
                print(f"{path}: {number} test run{'s' * (number > 1)}, {first} to {last}")
                print(*(f"  {text}\n" for text in told(page)), sep="", end="")
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for text in history.unreadable:
        print(f"skipped: {text}", file=sys.stderr)
    if not all(page.searched for page in shown):
        print(GET_OTAVA)
    if not shown:
        print(_nothing(history, options), file=sys.stderr)
    return 0 if shown else NOTHING


def _matches(cell_id: str, parts: Sequence[str]) -> bool:
    return not parts or any(part in cell_id for part in parts)


def bands(store: Store) -> BandOf:
    """Looks a line's baseline up. One of another recipe is no bar for it; a damaged one is said and left out."""

    said: set[str] = set()

    def band_of(line: Series) -> Band | None:
        try:
            baseline = store.load(line.cell, line.machine)
        except ValueError as error:
            if str(error) not in said:
                print(f"no baseline shown: {error}", file=sys.stderr)
            said.add(str(error))
            return None
        if baseline is None or baseline.recipe.differences(line.recipe):
            return None
        return band(baseline, line.metric, rule_of(store, line.machine), line.points[-1].num_runs)

    return band_of


def _nothing(history: History, options: argparse.Namespace) -> str:
    """Why there is nothing to draw."""
    text = f"nothing to draw: no usable test run in {options.results}"
    if options.cells:
        text += f" of a cell with {' or '.join(map(repr, options.cells))} in its name"
    if options.metric:
        text += f" has {' or '.join(options.metric)}"
    if history.left_out:
        text += (
            f"; {len(history.left_out)} left out, such as {history.left_out[0].run_id}: {history.left_out[0].reason}"
        )
    return text


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tools.history", description="Draw what cells measured over the test runs in results/."
    )
    parser.add_argument(
        "-k",
        action="append",
        default=[],
        dest="cells",
        metavar="CELL",
        help="cells with this in their name; repeatable",
    )
    parser.add_argument(
        "--results", type=Path, default=ROOT / "results", metavar="DIR", help="where test runs are kept"
    )
    parser.add_argument(
        "--metric",
        action="append",
        choices=NAMES,
        help="what to draw; repeatable (default: step time, throughput, allocator's peaks; resident size on a CPU)",
    )
    parser.add_argument("--commits", action="store_true", help="mark changes of the commit too")
    parser.add_argument("--baselines", type=Path, default=BASELINES, metavar="DIR", help="the checked-in baselines")
    parser.add_argument(
        "-o",
        type=Path,
        default=ROOT / "history",
        dest="into",
        metavar="FOLDER",
        help="for the pictures (default: history)",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
