"""`python -m tools.compare A B [-k EXPR]`: is B slower than A? Both measured side by side, in pairs.

A and B: a git ref, a folder with strategies/, or a Python interpreter or its environment. Without B: this checkout.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from perf.facts.matrix import cells_of
from perf.judge.rule import PRESETS
from perf.measure.connection import ROOT
from perf.measure.reference import parse
from perf.session import run_pytest

MISUSED = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code of pytest: 0: nothing slower; 1: something slower or wrong; 8: no verdict; 2: a mistake here."""
    try:
        found = pytest_arguments(sys.argv[1:] if arguments is None else arguments)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return MISUSED
    code = run_pytest(found)
    return code if code >= 0 else 128 - code


def pytest_arguments(arguments: Sequence[str]) -> list[str]:
    """The options of the suite that ask this question. Raises ValueError for those that no test run could have."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    options = _parser().parse_args(arguments[:end])
    if options.a is None and not options.env:
        raise ValueError(
            "nothing to compare: name A, and B unless it is this checkout; or --env NAME=VALUE, on against off"
        )
    if options.pairs is not None and options.pairs < 1:
        raise ValueError(f"--pairs {options.pairs}: must be at least 1")
    if options.preset not in (None, *PRESETS):
        raise ValueError(f"--preset {options.preset}: unknown; known: {', '.join(PRESETS)}")
    if options.matrix is not None:
        cells_of(options.matrix)
    if wrong := [text for text in options.env if not all(text.partition("=")[:2])]:
        raise ValueError(f"--env {wrong[0]}: write NAME=VALUE")
    a, b = _build(options.a), _build(options.b)
    if a is not None and not options.env and a == (b or str(ROOT)):
        raise ValueError(f"{options.a}: is this very build; name another B, or --env NAME=VALUE of B alone")
    given = {
        "-k": options.k,
        "--perf-ab": a,
        "--perf-candidate": b,
        "--perf-pairs": options.pairs,
        "--perf-matrix": options.matrix and _absolute(options.matrix),
        "--perf-preset": options.preset,
        "--perf-results": options.into and str(options.into.absolute()),
    }
    named = [f"{name}={value}" if name.startswith("--") else f"{name}{value}" for name, value in given.items() if value]
    return ["perf", *named, *(f"--perf-ab-env={text}" for text in options.env), *arguments[end + 1 :]]


def _build(said: str | None) -> str | None:
    """As pytest, which runs in the root of this checkout, understands it."""
    if said is None:
        return None
    reference = parse(said)
    return reference.folder or reference.python or said


def _absolute(matrix: str) -> str:
    return str(Path(matrix).absolute()) if Path(matrix).is_file() else matrix


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        raise ValueError(f"{message}; --help shows all options")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m tools.compare",
        description="Is B slower than A? Exit code 0: nothing is; 1: something is, or is wrong; 8: no verdict.",
        epilog="What follows -- is passed on to pytest.",
    )
    builds = "a git ref, a folder with strategies/, or a Python interpreter or its environment"
    parser.add_argument("a", nargs="?", metavar="A", help=builds)
    parser.add_argument("b", nargs="?", metavar="B", help="the same (default: this checkout)")
    parser.add_argument("-k", metavar="EXPR", help="only these cells, as pytest -k")
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", help="of B alone; several allowed")
    parser.add_argument("--pairs", type=int, metavar="N", help="of runs (default: by the cell's noise)")
    parser.add_argument("--matrix", metavar="NAME", help="as --perf-matrix (default: auto)")
    parser.add_argument("--preset", metavar="NAME", help=f"tolerances: {', '.join(PRESETS)}")
    parser.add_argument("--into", type=Path, metavar="DIR", help="where the test run is kept (default: results)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
