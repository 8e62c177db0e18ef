"""`python -m tools.report results/<run id> [...]`: builds the report and charts of test runs from their records.

One report for each test run, or with `--into FOLDER` one over all of them, in a new folder with copies of the records.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from perf.tell.gathering import gather
from perf.tell.report import write_report
from perf.tell.results import Results


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 0, or 2 when a folder is no test run or one of its files is damaged."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.report",
        description="Builds the report and the charts of test runs.",
    )
    parser.add_argument("folders", nargs="+", type=Path, metavar="results/RUN", help="folder of a test run")
    parser.add_argument("--into", type=Path, metavar="FOLDER", help="gather the test runs there, for one report")
    options = parser.parse_args(arguments)
    try:
        found = [Results.open(folder) for folder in options.folders]
        for results in [gather(found, options.into)] if options.into else found:
            print(*write_report(results), sep="\n")
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
