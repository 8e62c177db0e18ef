"""Reading JSON files strictly and writing them whole: a damaged file is named with the place, never half read."""

import json
import math
import os
import tempfile
from pathlib import Path
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")


def dumps(value: object) -> str:
    """Text of a value: key order as declared, two spaces, a final newline, so equal values give equal bytes."""
    return json.dumps(msgspec.to_builtins(value), indent=2, ensure_ascii=True, allow_nan=False) + "\n"


def read(path: Path, kind: type[T]) -> T:
    """The file's value as `kind`.

    Raises:
        ValueError: not readable as `kind`; names the file, the line or the key, and what was expected there.
    """
    return convert(load(path), kind, source=str(path))


def load(path: Path) -> Any:
    """The file's content as builtins, with the checks that need no kind. Raises ValueError as `read`."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not text at byte {error.start}; restore the file from git") from None
    return loads(text, source=str(path))


def parse(text: str, kind: type[T], *, source: str) -> T:
    """As `read`, from text; `source` names it in errors."""
    return convert(loads(text, source=source), kind, source=source)


def loads(text: str, *, source: str) -> Any:
    """As `load`, from text."""
    for number, line in enumerate(text.splitlines(), start=1):
        if line.startswith(("<<<<<<<", ">>>>>>>")):
            raise ValueError(f"{source}:{number}: git merge conflict marker; resolve the merge")
    try:
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse_constant, parse_float=_finite)
    except json.JSONDecodeError as error:
        size = len(text)
        where = "the file is empty" if not text.strip() else f"column {error.colno}, byte {error.pos} of {size}"
        raise ValueError(f"{source}:{error.lineno}: broken JSON ({where}): {error.msg}") from None
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None


def convert(data: object, kind: type[T], *, source: str) -> T:
    """Builtins as `kind`. Raises ValueError that names the key and, for another schema_version, both versions."""
    _check_schema_version(data, kind, source)
    try:
        return msgspec.convert(data, kind, strict=True)
    except msgspec.ValidationError as error:
        raise ValueError(f"{source}: {error}") from None


def write(path: Path, value: object) -> None:
    """Replaces the file as a whole: a reader, or a kill at any moment, finds the old content or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(dumps(value))
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"duplicate key {key!r}; a bad merge? keep one of the two")
        result[key] = value
    return result


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a number that can be compared")


def _finite(digits: str) -> float:
    """What is too large for a float would be read as infinity."""
    value = float(digits)
    return value if math.isfinite(value) else _refuse_constant(digits)


def _check_schema_version(data: object, kind: type, source: str) -> None:
    known = getattr(kind, "SCHEMA_VERSION", None)
    if known is None:
        return
    found = data.get("schema_version") if isinstance(data, dict) else None
    if found != known:
        raise ValueError(
            f"{source}: schema_version {found!r}, this version of the suite reads {known}; "
            "record the file again or use the version that wrote it"
        )
