"""Which cells exist: the smoke matrix for CPUs, the node matrix for GPUs, or the user's own file.

The cells of a matrix are the same on every machine; a machine that cannot run one skips it and says why.
"""

import itertools
import json
import math
import tomllib
from collections.abc import Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec

from perf.facts.cell import Cell
from perf.facts.hardware import Node
from strategies.layout import default_workload
from strategies.rules import refusal
from strategies.spec import AXES, ComputeDtype, LinkProfile, LossKind, Mode, Options, StrategyName, Workload

NAMED = ("auto", "smoke", "node")
SHIPPED = Path(__file__).parent.parent / "matrices"
"""Matrix files that come with the suite."""
MAX_NAME = 150
"""Characters of a cell's name: it becomes part of a file's name, for which a file system has 255."""
MAX_COUNT, MAX_SEED = 2**31 - 1, 2**32 - 1
"""A tensor's dimension; a seed, which is multiplied before torch's generator takes it."""


def cells_of(matrix: str) -> tuple[Cell, ...]:
    """The cells of a named matrix or of a TOML file.

    Raises:
        ValueError: no such matrix, or the file names an unknown strategy, size, mode, link or key.
    """
    match matrix:
        case "smoke":
            return smoke()
        case "node":
            return node()
        case "auto":
            return smoke() + node()
        case path:
            return from_file(Path(path))


def known_cells() -> dict[str, Cell]:
    """The cells of every matrix that comes with the suite, by name."""
    files = (cell for path in sorted(SHIPPED.glob("*.toml")) for cell in from_file(path))
    return {cell.id: cell for cell in (*files, *cells_of("auto"))}


def obstacle(cell: Cell, node: Node, matrix: str) -> str | None:
    """Why a cell of this matrix cannot run on this node, or None: refused by arithmetic, or by what the node lacks."""
    if reason := refusal(cell.layout):
        return reason
    if matrix == "auto" and cell.link is LinkProfile.GLOO and node.gpus:
        return f"gloo cells are for machines without GPUs, sees {len(node.gpus)}; the matrix smoke runs them"
    return node.lacks(cell)


def smoke() -> tuple[Cell, ...]:
    """Size `tiny` on gloo, `tiny_moe` where there must be experts: every strategy eager, fsdp2 also compiled."""
    points = [*((strategy, Mode.EAGER) for strategy in StrategyName), (StrategyName.FSDP2, Mode.COMPILE)]
    sizes = {StrategyName.EP: "tiny_moe"}
    return tuple(_cell(strategy, sizes.get(strategy, "tiny"), mode, 2, LinkProfile.GLOO) for strategy, mode in points)


def node() -> tuple[Cell, ...]:
    """One and two GPUs of a node, four for two axes: every strategy, 0.6b and 1.7b, in every mode that is right.

    And the size with experts, `a3b`: spread, beside the unsharded model and the same two GPUs fully sharded.
    """
    dense = itertools.product(StrategyName, ("0.6b", "1.7b"), Mode)
    experts = itertools.product((StrategyName.SINGLE, StrategyName.FSDP2, StrategyName.EP), ("a3b",), Mode)
    points = itertools.chain(dense, experts)
    cells = (_cell(strategy, size, mode, 2, LinkProfile.NATIVE) for strategy, size, mode in points)
    return tuple(cell for cell in cells if refusal(cell.layout) is None)


def from_file(path: Path) -> tuple[Cell, ...]:
    """The cells of a TOML file: each `[[cells]]` table is the product of its lists.

    [[cells]]
    strategy = ["ddp", "fsdp2", "fsdp.tp2"]
    size = "0.6b"
    mode = ["eager", "compile"]
    world_size = [2, 4]
    link = "native"
    micro_batch = 8                  # optional, as every field of a workload,
    activation_checkpointing = true  # of the options,
    degrees = [2, 2]                 # and degrees, variables and label of a cell
    """
    try:
        if not path.is_file():
            raise ValueError(f"no matrix {str(path)!r}; known: {', '.join(NAMED)}, or the path of a TOML file")
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"the matrix {str(path)!r} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: {error}") from None
    try:
        document = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: {error}") from None
    tables = document.pop("cells", None)
    if document or not isinstance(tables, list) or not tables:
        raise ValueError(f"{path}: holds [[cells]] tables and nothing else, found {sorted(document) or tables!r}")
    cells = [
        cell for number, table in enumerate(tables, start=1) for cell in _from_table(table, f"{path}: cells {number}")
    ]
    ids = [cell.id for cell in cells]
    if twice := sorted({name for name in ids if ids.count(name) > 1}):
        raise ValueError(f"{path}: two cells are called {twice[0]}; a cell's name must tell it from all others")
    return tuple(cells)


def as_toml(cells: Sequence[Cell]) -> str:
    """A matrix file of these cells, a table for each: what `from_file` reads back as the same."""
    return "\n".join(_table(cell) for cell in cells)


def _table(cell: Cell) -> str:
    default = default_workload(cell.size, cell.strategy, cell.world_size)
    whole = msgspec.to_builtins(cell)
    said = {name: whole[name] for name in _AXES}
    said |= {name: value for name, value in whole["workload"].items() if value != msgspec.to_builtins(default)[name]}
    said |= {name: value for name, value in whole["options"].items() if value != msgspec.to_builtins(Options())[name]}
    said |= {name: whole[name] for name in _OWN if whole[name]}
    return "\n".join(["[[cells]]", *(f"{name} = {_value(value)}" for name, value in said.items()), ""])


def _value(value: object) -> str:
    """What JSON writes of strings, numbers, truth values and lists is TOML too, all but surrogates and DEL."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


_AXES = ("strategy", "size", "mode", "world_size", "link")
_OWN = ("degrees", "variables", "label")
_KINDS: dict[str, type[StrEnum]] = {
    "mode": Mode,
    "link": LinkProfile,
    "compute_dtype": ComputeDtype,
    "optimizer_state": ComputeDtype,
    "loss": LossKind,
}


def _from_table(table: Any, source: str) -> list[Cell]:
    if not isinstance(table, dict):
        raise ValueError(f"{source}: {table!r} is not a [[cells]] table")
    if empty := [name for name in _AXES if table.get(name) == []]:
        raise ValueError(f"{source}: the list of {', '.join(empty)} is empty and would make no cell")
    missing = [name for name in _AXES if name not in table]
    if missing:
        raise ValueError(f"{source}: lacks {', '.join(missing)}; a cell has {', '.join(_AXES)}")
    options = {name: table[name] for name in Options.__struct_fields__ if name in table}
    own = {name: table[name] for name in _OWN if name in table}
    if isinstance(variables := own.get("variables"), dict):
        own["variables"] = sorted(variables.items())
    changes = {name: value for name, value in table.items() if name not in {*_AXES, *_OWN, *options}}
    fields = (*_AXES, *_OWN, *Workload.__struct_fields__, *Options.__struct_fields__)
    if unknown := [name for name in changes if name not in fields]:
        raise ValueError(f"{source}: unknown {', '.join(unknown)}; known: {', '.join(fields)}")
    axes = [value if isinstance(value, list) else [value] for value in (table[name] for name in _AXES)]
    cells = []
    for point in itertools.product(*axes):
        named = dict(zip(_AXES, point, strict=True))
        try:
            if type(ranks := named["world_size"]) is not int:
                raise ValueError(f"world_size {ranks!r}: a whole number of ranks, such as 2")
            if odd := [name for name in _AXES if name != "world_size" and not isinstance(named[name], str)]:
                raise ValueError(f"{odd[0]} {named[odd[0]]!r}: a name in quotes")
            default = default_workload(named["size"], named["strategy"], ranks)
            workload = msgspec.to_builtins(default) | changes
            cell = msgspec.convert(named | own | {"workload": workload, "options": options}, Cell)
        except ValueError as error:
            raise ValueError(f"{source}: {named}: {error}{_known(table | named)}") from None
        if reason := next(_nonsense(cell), None):
            raise ValueError(f"{source}: {named}: {reason}")
        cells.append(cell)
    return cells


def _nonsense(cell: Cell) -> Iterator[str]:
    """Values that no strategy could run with, each with the cure; what cannot be cut is refused later."""
    workload, norm = cell.workload, cell.options.clip_norm
    for name in ("sequences", "sequence_length", "micro_batch"):
        if not 1 <= (count := getattr(workload, name)) <= MAX_COUNT:
            yield f"{name} {count}: must be at least 1 and at most {MAX_COUNT}"
    if not 0 <= workload.learning_rate < math.inf:
        yield f"learning_rate {workload.learning_rate}: must be a finite number, 0 or more, such as 1e-4"
    if not 0 <= workload.seed <= MAX_SEED:
        yield f"seed {workload.seed}: must be a whole number from 0 to {MAX_SEED}"
    if norm is not None and not 0 < norm < math.inf:
        yield f"clip_norm {norm}: must be a finite number above 0, such as 1.0; leave it out to clip nothing"
    names = [name for name, _ in cell.variables]
    for name, value in cell.variables:
        if not name or "=" in name or "\0" in name + value:
            yield f"variables: {name!r} = {value!r}: a variable has a name without =, and no zero byte"
        if names.count(name) > 1:
            yield f"variables: {name} is set {names.count(name)} times; keep one"
    if len(cell.id) > MAX_NAME:
        yield f"its name has {len(cell.id)} characters and may have {MAX_NAME}; shorten the label {cell.label!r}"


def _known(said: dict[str, Any]) -> str:
    """The known names where one is unknown."""
    texts = [
        f"; known {field}: {', '.join(kind)}"
        for field, kind in _KINDS.items()
        if field in said and said[field] not in tuple(kind)
    ]
    return "".join(texts)


def _cell(strategy: StrategyName, size: str, mode: Mode, num_ranks: int, link: LinkProfile) -> Cell:
    """A cell on `num_ranks` ranks, on one where the strategy has no more, on four where it cuts along two axes."""
    world_size = 1 if strategy is StrategyName.SINGLE else max(num_ranks, 2 ** len(AXES[strategy]))
    return Cell(
        strategy=strategy,
        size=size,
        mode=mode,
        world_size=world_size,
        link=link,
        workload=default_workload(size, strategy, world_size),
    )
