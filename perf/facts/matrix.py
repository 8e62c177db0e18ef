"""Which cells exist: the smoke matrix for CPUs, the node matrix for GPUs, or the user's own file.

The cells of a matrix are the same on every machine; a machine that cannot run one skips it and says why.
"""

import itertools
import json
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from perf.facts.cell import Cell
from perf.facts.hardware import Node
from strategies.layout import default_workload
from strategies.rules import refusal
from strategies.spec import AXES, LinkProfile, Mode, Options, StrategyName, Workload

NAMED = ("auto", "smoke", "node")
SHIPPED = Path(__file__).parent.parent / "matrices"
"""Matrix files that come with the suite."""


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


def known_ids() -> set[str]:
    """Names of the cells of every matrix that comes with the suite."""
    files = (cell for path in sorted(SHIPPED.glob("*.toml")) for cell in from_file(path))
    return {cell.id for cell in (*cells_of("auto"), *files)}


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
    if not path.is_file():
        raise ValueError(f"no matrix {str(path)!r}; known: {', '.join(NAMED)}, or the path of a TOML file")
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
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
    # What JSON writes of strings, numbers, truth values and lists is TOML too.
    return "\n".join(["[[cells]]", *(f"{name} = {json.dumps(value)}" for name, value in said.items()), ""])


_AXES = ("strategy", "size", "mode", "world_size", "link")
_OWN = ("degrees", "variables", "label")


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
            default = default_workload(named["size"], named["strategy"], ranks)
            workload = msgspec.to_builtins(default) | changes
            cells.append(msgspec.convert(named | own | {"workload": workload, "options": options}, Cell))
        except (msgspec.ValidationError, ValueError, TypeError) as error:
            raise ValueError(f"{source}: {named}: {error}{_known(named)}") from None
    return cells


def _known(named: dict[str, Any]) -> str:
    """The known names where one is unknown."""
    kinds = {"mode": Mode, "link": LinkProfile}
    texts = [f"; known {field}: {', '.join(kind)}" for field, kind in kinds.items() if named[field] not in tuple(kind)]
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
