"""`git bisect run ... -m tools.bisect CELL --threshold 3%`: is the commit that is checked out slower than the good one?

Measures the tree beside the good commit, in pairs. For git, every exit code from 1 to 127 but 125 says *bad*: so a
mistake, or a failure of this tool, must end with more than 127, which ends the bisection instead of misleading it.
"""

import argparse
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

GOOD, BAD, UNKNOWN, MISUSED, INTERRUPTED = 0, 1, 125, 129, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0: good; 1: bad; 125: cannot judge, git skips the commit; 129: a mistake of usage or a failure here.

    130: Ctrl-C; 128 + its number: another signal, for which SystemExit is raised.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        return _answer(given)
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception:  # of any kind: Python would end with 1, and git blame the commit
        traceback.print_exc()
        return MISUSED


def _answer(arguments: Sequence[str]) -> int:
    # Here, not above: an interpreter without our dependencies would end with 1 before `main` begins.
    from perf.bisection import Judgement, Question, ask, threshold

    own, passed_on = _split(arguments)
    options = _parser().parse_args(own)
    matrix, into = Path(options.matrix), options.into
    try:
        answer = ask(
            Question(
                cell_id=options.cell,
                threshold=threshold(options.threshold),
                tree=str(options.tree.absolute()),
                good=options.good,
                matrix=str(matrix.absolute()) if matrix.is_file() else options.matrix,
                pairs=options.pairs,
                most_pairs=options.most_pairs,
                passed_on=passed_on,
                **({} if into is None else {"into": str(into.absolute())}),
            )
        )
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return MISUSED
    print(answer.text, flush=True)
    return {Judgement.GOOD: GOOD, Judgement.BAD: BAD, Judgement.UNKNOWN: UNKNOWN}[answer.judgement]


def _split(arguments: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    """Ours, and what follows `--`."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    return list(arguments[:end]), tuple(arguments[end + 1 :])


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(MISUSED, f"error: {message}; --help shows all options\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m tools.bisect",
        description="For `git bisect run`: is the checked-out commit slower than the good one?",
        epilog="What follows -- is passed on to pytest.",
    )
    parser.add_argument("cell", metavar="CELL", help="id of the cell, such as fsdp2-0.6b-compile-w2-native")
    parser.add_argument("--threshold", required=True, metavar="SHARE", help="largest good slowdown: 3%% or 0.03")
    parser.add_argument("--good", metavar="REF", help="compare with this (default: the oldest refs/bisect/good-*)")
    parser.add_argument(
        "--tree",
        type=Path,
        default=Path(__file__).parent.parent,
        metavar="DIR",
        help="measure it (default: this checkout)",
    )
    parser.add_argument("--pairs", type=int, default=4, metavar="N", help="at first (default: %(default)s)")
    parser.add_argument(
        "--most-pairs", type=int, default=16, metavar="N", help="doubled up to these, until sure (default: %(default)s)"
    )
    parser.add_argument("--matrix", default="auto", metavar="NAME", help="that holds the cell (default: %(default)s)")
    parser.add_argument("--into", type=Path, metavar="DIR", help="for the results (default: .shardmark/bisect)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
