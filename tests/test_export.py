"""tools.export: the door to every format, from a results folder on disk."""

import csv
import json
import subprocess
import sys

import pytest

from perf.facts.outcome import Outcome
from perf.judge.verdict import Verdict
from perf.measure.connection import ROOT
from perf.tell.results import Results
from tests import factory
from tests.finished_runs import ON_GPUS, PASSES, WITH_RUNS, WITHOUT_RUNS, manifest, write_test_run
from tools.export import FORMATS, OTAVA, TEXTS, main


@pytest.fixture
def folder(tmp_path):
    return write_test_run(tmp_path / "results")


@pytest.fixture
def second(tmp_path):
    """A later test run of one of the cells."""
    results = Results(tmp_path / "results" / "2026-11-30T14-00-00")
    results.write_manifest(manifest(PASSES, run_id=results.folder.name, started_at="2026-11-30T14:00:00+00:00"))
    results.write_run(factory.run_record(PASSES, step_time_s=0.2))
    results.write_verdict(Verdict(cell_id=PASSES.id, outcome=Outcome.NOISY))
    return results.folder


def export(*arguments):
    return main([*map(str, arguments)])


@pytest.mark.parametrize("name", sorted(TEXTS))
def test_a_format_is_the_same_on_standard_output_and_in_a_file(name, folder, tmp_path, capsys):
    path = tmp_path / "new" / "file"
    assert export(folder, name, "-o", path) == 0
    assert capsys.readouterr().out == f"{path}\n"
    assert export(folder, name) == 0
    assert capsys.readouterr().out.encode("ascii") == path.read_bytes()
    if name != "markdown":
        assert json.loads(path.read_text())


def test_cells_without_values_are_named_on_standard_error(folder, capsys):
    assert export(folder, "bencher") == 0
    told = capsys.readouterr().err.splitlines()
    assert len(told) == len(WITHOUT_RUNS | WITH_RUNS)
    assert all(f"{of.id}: {outcome}: " in "\n".join(told) for of, outcome in (WITHOUT_RUNS | WITH_RUNS).items())
    assert export(folder, "markdown") == 0
    assert not capsys.readouterr().err


def test_the_history_of_each_cell_over_many_test_runs_is_a_file(folder, second, tmp_path):
    assert export(second, folder, OTAVA, "-o", tmp_path / "history") == 0
    paths = sorted((tmp_path / "history").rglob("*.csv"))
    assert [path.stem for path in paths] == [ON_GPUS.id, PASSES.id]
    with paths[1].open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["time"][:10], row["step_time_s"]) for row in rows] == [("2026-11-29", "0.1"), ("2026-11-30", "0.2")]


def test_list_shows_each_format_with_a_line(folder, capsys):
    for arguments in ([folder, "--list"], ["--list"]):
        with pytest.raises(SystemExit) as ended:
            export(*arguments)
        assert ended.value.code == 0
        lines = capsys.readouterr().out.splitlines()
        assert [line.split()[0] for line in lines] == list(FORMATS)
        assert all(len(line.split()) > 3 for line in lines)


def refusal(capsys, *arguments):
    assert export(*arguments) == 2
    captured = capsys.readouterr()
    assert not captured.out
    return captured.err.splitlines()[-1]


def test_several_test_runs_in_a_format_of_one_are_refused_with_the_cure(folder, second, capsys):
    assert "name one, or gather them first: python -m tools.report" in refusal(capsys, folder, second, "bencher")


def test_a_history_without_a_folder_is_refused(folder, capsys):
    assert "name a folder for them: -o FOLDER" in refusal(capsys, folder, OTAVA)


def test_a_folder_that_is_no_test_run_is_refused(tmp_path, capsys):
    assert "is not a test run" in refusal(capsys, tmp_path, "bencher")


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_several_folders_of_which_none_is_a_test_run_are_refused(name, tmp_path, capsys):
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
    said = refusal(capsys, tmp_path / "one", tmp_path / "two", name, "-o", tmp_path / "out")
    assert said == "error: none of the 2 folders is a test run; name some of those in results/"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", sorted(set(FORMATS) - {"markdown"}))
def test_nothing_to_show_is_an_error_and_writes_nothing(name, tmp_path, capsys):
    results = Results(tmp_path / "empty")
    results.write_manifest(manifest(PASSES))
    assert "no cell has a value to show" in refusal(capsys, results.folder, name, "-o", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_door_works_where_torch_does_not_import(folder):
    code = (
        "import sys; sys.modules['torch'] = None; from tools.export import main; "
        f"sys.exit(max(main([{str(folder)!r}, name]) for name in {sorted(TEXTS)}))"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert PASSES.id in result.stdout
