"""`python -m tools.report results/<run id> [...]`: builds the report and charts of test runs from their records."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from perf.report import write_report
from perf.results import Results


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 0, or 2 when a folder is no test run or one of its files is damaged."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.report",
        description="Builds the report and the charts of test runs.",
    )
    parser.add_argument("folders", nargs="+", type=Path, metavar="results/RUN", help="folder of a test run")
    for folder in parser.parse_args(arguments).folders:
        try:
            paths = write_report(Results.open(folder))
        except (ValueError, OSError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        for path in paths:
            print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
