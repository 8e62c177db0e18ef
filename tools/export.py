"""`python -m tools.export results/RUN FORMAT [-o FILE]`: a finished test run as CI systems and dashboards read it.

`--list` shows the formats. Without `-o` the text goes to standard output. `otava-csv` takes several test runs and
writes a folder: `python -m tools.export results/* otava-csv -o FOLDER`.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from perf.tell.dashboards import hud_json, of_other_recipes, otava_files
from perf.tell.exports import FinishedTestRun, action_json, bencher_json, benchmark_json, read_test_run
from perf.tell.results import Results


def markdown(test_run: FinishedTestRun) -> str:
    """As `step_summary`, which imports pandas: only where it is asked for."""
    from perf.tell.step_summary import step_summary

    return step_summary(test_run)


TEXTS: dict[str, tuple[str, Callable[[FinishedTestRun], str]]] = {
    "pytest-benchmark": ("JSON as of --benchmark-json, for pytest-benchmark compare", benchmark_json),
    "bencher": ("Bencher Metric Format: latency (ns), throughput (tokens/s), peak-allocated-bytes", bencher_json),
    "github-action-benchmark-smaller": (
        "entries for its customSmallerIsBetter: step time (ms), peak allocated (MiB)",
        lambda test_run: action_json(test_run, "lower"),
    ),
    "github-action-benchmark-bigger": (
        "entries for its customBiggerIsBetter: cluster throughput (tokens/s)",
        lambda test_run: action_json(test_run, "higher"),
    ),
    "pytorch-hud": ("records of PyTorch's benchmark database, version 3", hud_json),
    "markdown": ("the summary of a CI step, for >> $GITHUB_STEP_SUMMARY", markdown),
}
OTAVA = "otava-csv"
FORMATS = {name: title for name, (title, _) in TEXTS.items()} | {
    OTAVA: "for Apache Otava: the history of each cell over many test runs, a CSV each, and otava.yaml; needs -o FOLDER"
}


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 0, or 2 when nothing could be read or written, or no cell has a value to show."""
    options = _parser().parse_args(arguments)
    try:
        folders = [folder for folder in options.runs if len(options.runs) == 1 or _is_test_run(folder)]
        if not folders:
            raise ValueError(f"none of the {len(options.runs)} folders is a test run; name some of those in results/")
        test_runs = [read_test_run(Results.open(folder)) for folder in folders]
        for folder, test_run in zip(folders, test_runs, strict=True):
            _tell_left_out(folder, test_run, options.format)
        if options.format == OTAVA:
            for reason in of_other_recipes(test_runs):
                print(f"left out, measured otherwise: {reason}", file=sys.stderr)
            _write_folder(otava_files(_with_values(test_runs)), options.output)
        else:
            _write_text(_text(test_runs, options.format), options.output)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _is_test_run(folder: Path) -> bool:
    """Of several, such as results/*; what is none is named and passed over."""
    if not Results(folder).exists():
        print(f"passed over: {folder} is no test run", file=sys.stderr)
        return False
    return True


def _text(test_runs: Sequence[FinishedTestRun], name: str) -> str:
    if len(test_runs) > 1:
        raise ValueError(
            f"{name} is of one test run, not of {len(test_runs)}; name one, or gather them first: "
            "python -m tools.report RUN RUN ... --into FOLDER"
        )
    return TEXTS[name][1]((test_runs if name == "markdown" else _with_values(test_runs))[0])


def _with_values(test_runs: Sequence[FinishedTestRun]) -> Sequence[FinishedTestRun]:
    """The test runs. Raises ValueError when none has a value: an empty file would look like a success."""
    if not any(test_run.with_values for test_run in test_runs):
        raise ValueError("no cell has a value to show; `markdown` shows what became of them")
    return test_runs


def _tell_left_out(folder: Path, test_run: FinishedTestRun, name: str) -> None:
    if name != "markdown":
        for cell_id, reason in test_run.left_out.items():
            print(f"left out of {folder}: {cell_id}: {reason}", file=sys.stderr)


def _write_text(text: str, path: Path | None) -> None:
    if path is None:
        sys.stdout.write(_ascii(text))
    else:
        _write(path, text)


def _write_folder(files: dict[str, str], folder: Path | None) -> None:
    if folder is None:
        raise ValueError(f"{OTAVA} writes several files; name a folder for them: -o FOLDER")
    for name, text in files.items():
        _write(folder / name, text)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_ascii(text), encoding="ascii", newline="\n")
    print(path)


def _ascii(text: str) -> str:
    """Error messages may hold what no encoding of a terminal can show."""
    return text.encode("ascii", "backslashreplace").decode("ascii")


class _ListFormats(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        width = max(map(len, FORMATS))
        print(*(f"{name:<{width}}  {title}" for name, title in FORMATS.items()), sep="\n")
        parser.exit()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tools.export", description="Exports a finished test run for CI systems and dashboards."
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="results/RUN", help="folder of a test run")
    parser.add_argument("format", choices=FORMATS, metavar="FORMAT", help=f"one of: {', '.join(FORMATS)}")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help=f"write there; a folder for {OTAVA}")
    parser.add_argument("--list", nargs=0, action=_ListFormats, help="show the formats, and exit")
    return parser


if __name__ == "__main__":
    sys.exit(main())
