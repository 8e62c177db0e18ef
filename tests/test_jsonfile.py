"""Room perf/facts/jsonfile.py: a damaged file is refused with path and place; a file is written whole or not at all."""

import json
import os
import shutil
import tempfile
import threading
from pathlib import Path
from typing import ClassVar

import pytest

from perf.facts import jsonfile
from strategies.value import Value
from tests.factory import run_record, write_text


class Part(Value, kw_only=True):
    name: str
    seconds: float


class Whole(Value, kw_only=True):
    SCHEMA_VERSION: ClassVar[int] = 3
    schema_version: int = 3
    count: int
    parts: tuple[Part, ...] = ()


VALUE = Whole(count=2, parts=tuple(Part(name=f"part {number}", seconds=0.1 * number) for number in range(20)))
TEXT = jsonfile.dumps(VALUE)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def with_text(old: str, new: str) -> str:
    assert TEXT.count(old) == 1
    return TEXT.replace(old, new)


DAMAGED = {
    "empty": ("", ":1: broken JSON (the file is empty)"),
    "blank": ("\n \n", "the file is empty"),
    "empty object": ("{}", "schema_version None, this version of the suite reads 3"),
    "a list": ("[]", "schema_version None, this version of the suite reads 3"),
    "truncated at 400 bytes": (TEXT[:400], ":27: broken JSON (column 7, byte 394 of 400)"),
    "merge markers": (TEXT.replace("{\n", "{\n<<<<<<< HEAD\n", 1), ":2: git merge conflict marker; resolve the merge"),
    "end of a merge": (TEXT + ">>>>>>> other\n", "git merge conflict marker"),
    "duplicate key": (with_text('"count": 2,', '"count": 2,\n  "count": 3,'), "duplicate key 'count'"),
    "duplicate key inside": (with_text('"part 3",', '"part 3", "name": "part 4",'), "duplicate key 'name'"),
    "unknown key": (with_text('"count": 2,', '"count": 2,\n  "cuont": 2,'), "unknown field `cuont`"),
    "unknown key inside": (
        with_text('"part 3",', '"part 3", "unit": "s",'),
        "unknown field `unit` - at `$.parts[3]`",
    ),
    "missing key": (with_text('  "count": 2,\n', ""), "missing required field `count`"),
    "wrong type": (with_text('"count": 2', '"count": "2"'), "Expected `int`, got `str` - at `$.count`"),
    "truth for a number": (with_text('"count": 2', '"count": true'), "Expected `int`, got `bool` - at `$.count`"),
    "not a number": (with_text('"seconds": 0.1\n', '"seconds": NaN\n'), "NaN is not a number that can be compared"),
    "infinity": (with_text('"seconds": 0.1\n', '"seconds": Infinity\n'), "Infinity is not a number"),
    "minus infinity": (with_text('"seconds": 0.1\n', '"seconds": -Infinity\n'), "-Infinity is not a number"),
    "too large": (with_text('"seconds": 0.1\n', '"seconds": 1e999\n'), "1e999 is not a number"),
    "other version": (
        with_text('"schema_version": 3', '"schema_version": 4'),
        "schema_version 4, this version of the suite reads 3",
    ),
    "version as text": (with_text('"schema_version": 3', '"schema_version": "3"'), "schema_version '3'"),
    "two documents": (TEXT + TEXT, "Extra data"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_file_is_refused_with_path_and_place(tmp_path, case):
    text, place = DAMAGED[case]
    path = write_text(tmp_path / "damaged.json", text)
    with pytest.raises(ValueError, match=r"damaged\.json:") as caught:
        jsonfile.read(path, Whole)
    assert str(caught.value).startswith(str(path))
    assert place in str(caught.value)


def test_line_of_broken_json_is_named(tmp_path):
    path = write_text(tmp_path / "damaged.json", '{\n  "schema_version": 3,\n  "count": ,\n}\n')
    with pytest.raises(ValueError, match=r"damaged\.json:3: broken JSON \(column 12"):
        jsonfile.read(path, Whole)


def test_other_version_says_the_cure(tmp_path):
    path = write_text(tmp_path / "old.json", with_text('"schema_version": 3', '"schema_version": 2'))
    with pytest.raises(ValueError, match="record the file again or use the version that wrote it"):
        jsonfile.read(path, Whole)


def test_what_is_not_text_is_refused_with_path_and_place(tmp_path):
    path = tmp_path / "binary.json"
    path.write_bytes(b'{"count": "\xff"}')
    with pytest.raises(ValueError, match=r"binary\.json: not text at byte 11; restore the file from git"):
        jsonfile.read(path, Whole)


def test_every_cut_of_a_file_is_refused():
    for size in range(len(TEXT.rstrip())):
        with pytest.raises(ValueError, match=r"^cut:"):
            jsonfile.parse(TEXT[:size], Whole, source="cut")


def test_written_value_is_read_back_equal(tmp_path):
    path = tmp_path / "a" / "b" / "value.json"
    jsonfile.write(path, VALUE)
    assert jsonfile.read(path, Whole) == VALUE
    record = run_record(step_time_s=0.1 + 1e-16)
    jsonfile.write(path, record)
    assert jsonfile.read(path, type(record)) == record


def test_equal_values_give_equal_bytes_in_declared_order(tmp_path):
    again = jsonfile.parse(TEXT, Whole, source="text")
    shuffled = json.dumps(dict(reversed(json.loads(TEXT).items())))
    for number, value in enumerate((VALUE, again, jsonfile.parse(shuffled, Whole, source="text"))):
        jsonfile.write(tmp_path / f"{number}.json", value)
        assert (tmp_path / f"{number}.json").read_text(encoding="utf-8") == TEXT
    assert list(json.loads(TEXT)) == ["schema_version", "count", "parts"]
    assert TEXT.endswith("}\n")


@pytest.mark.parametrize("step", ["fsync", "chmod", "replace"])
@pytest.mark.parametrize(
    "error", [OSError("no space left on device"), KeyboardInterrupt()], ids=["disk full", "ctrl-C"]
)
def test_failing_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, step, error):
    path = tmp_path / "value.json"
    jsonfile.write(path, VALUE)

    def fail(*_: object, **__: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(os, step, fail)
        with pytest.raises(type(error)):
            jsonfile.write(path, Whole(count=3))
    assert names(tmp_path) == ["value.json"]
    assert path.read_text(encoding="utf-8") == TEXT


@pytest.mark.parametrize("seconds", [float("nan"), float("inf")])
def test_value_that_cannot_be_compared_is_not_written(tmp_path, seconds):
    with pytest.raises(ValueError, match="not JSON compliant"):
        jsonfile.write(tmp_path / "value.json", Part(name="x", seconds=seconds))
    assert names(tmp_path) == []


def test_no_temporary_file_is_left_and_everyone_may_read(tmp_path):
    for count in range(5):
        jsonfile.write(tmp_path / "value.json", Whole(count=count))
    assert names(tmp_path) == ["value.json"]
    assert (tmp_path / "value.json").stat().st_mode & 0o777 == 0o644


def test_concurrent_readers_and_writers_never_see_half_a_file(tmp_path):
    path = tmp_path / "value.json"
    values = [Whole(count=number, parts=VALUE.parts * 200) for number in range(2)]
    jsonfile.write(path, values[0])
    stop = threading.Event()
    failed: list[BaseException] = []

    def write_on(value: Whole) -> None:
        try:
            while not stop.is_set():
                jsonfile.write(path, value)
        except BaseException as error:
            failed.append(error)

    writers = [threading.Thread(target=write_on, args=(value,)) for value in values]
    for writer in writers:
        writer.start()
    try:
        seen = [jsonfile.read(path, Whole) for _ in range(60)]
    finally:
        stop.set()
        for writer in writers:
            writer.join()
    assert failed == []
    assert all(value in values for value in seen)
    assert names(tmp_path) == ["value.json"]


@pytest.fixture
def read_only_folder():
    """A folder that this process may not write to, also when the tests run as root."""
    folder = Path(tempfile.mkdtemp())
    jsonfile.write(folder / "value.json", VALUE)
    folder.chmod(0o555)
    was_root = os.geteuid() == 0
    try:
        if was_root:
            os.seteuid(65534)
        yield folder
    finally:
        if was_root:
            os.seteuid(0)
        folder.chmod(0o755)
        shutil.rmtree(folder)


def test_read_only_folder_is_an_error_and_keeps_its_file(read_only_folder):
    for name in ("value.json", "new.json"):
        with pytest.raises(PermissionError):
            jsonfile.write(read_only_folder / name, Whole(count=3))
    assert names(read_only_folder) == ["value.json"]
    assert jsonfile.read(read_only_folder / "value.json", Whole) == VALUE


def test_folder_in_the_way_is_an_error_and_stays(tmp_path):
    (tmp_path / "value.json" / "inner").mkdir(parents=True)
    with pytest.raises(OSError, match=r"value\.json"):
        jsonfile.write(tmp_path / "value.json", VALUE)
    assert names(tmp_path) == ["value.json"]
