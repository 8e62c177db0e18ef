"""Room perf/facts/matrix.py: the same cells everywhere, and a matrix file that says what is wrong with it."""

import os
import re
import subprocess
import sys

import pytest
from msgspec.structs import replace

from perf.facts import matrix
from perf.facts.cell import Cell
from perf.facts.gpus import Gpu
from perf.facts.hardware import Node
from perf.measure.connection import ROOT, python_path
from strategies.rules import refusal
from strategies.spec import ZERO_BUBBLE, LinkProfile, Mode, Options, StrategyName
from tests.factory import cell

WHOLE = {"strategy": '"ddp"', "size": '"tiny"', "mode": '"eager"', "world_size": "2", "link": '"gloo"'}


def table(**changes: str | None) -> str:
    """A [[cells]] table, whole unless changed; None leaves a key out."""
    entries = {name: value for name, value in (WHOLE | changes).items() if value is not None}
    return "[[cells]]\n" + "".join(f"{name} = {value}\n" for name, value in entries.items())


@pytest.fixture
def load(tmp_path):
    def load(text: str | bytes) -> tuple[Cell, ...]:
        path = tmp_path / "mine.toml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return matrix.cells_of(str(path))

    return load


@pytest.mark.parametrize("name", matrix.NAMED)
def test_ids_do_not_depend_on_the_hash_seed_or_the_devices(name):
    code = f"from perf.facts.matrix import cells_of; print([cell.id for cell in cells_of({name!r})])"
    texts = {
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env=os.environ | {"PYTHONHASHSEED": seed, "CUDA_VISIBLE_DEVICES": visible, "PYTHONPATH": python_path(ROOT)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed, visible in (("0", ""), ("1", "0,1"))
    }
    assert texts == {f"{[cell.id for cell in matrix.cells_of(name)]}\n"}


@pytest.mark.parametrize("name", matrix.NAMED)
def test_ids_are_unique_and_every_cell_can_be_cut(name):
    cells = matrix.cells_of(name)
    assert len({cell.id for cell in cells}) == len(cells) > 0
    assert [cell.id for cell in cells if refusal(cell.layout)] == []


def test_auto_is_smoke_and_node():
    assert matrix.cells_of("auto") == matrix.cells_of("smoke") + matrix.cells_of("node")


def test_smoke_runs_on_any_cpu_with_every_strategy_and_mode():
    cells = matrix.cells_of("smoke")
    assert {cell.strategy for cell in cells} == set(StrategyName)
    assert {cell.mode for cell in cells} == {Mode.EAGER, Mode.COMPILE}
    assert {(cell.size, cell.device_kind) for cell in cells} == {("tiny", "cpu"), ("tiny_moe", "cpu")}


def test_node_is_every_strategy_on_as_few_gpus_as_it_can():
    cells = matrix.cells_of("node")
    dense = [strategy for strategy in StrategyName if strategy is not StrategyName.EP]
    of_dense = 2 * (len(dense) + (len(Mode) - 1) * (len(dense) - len(ZERO_BUBBLE)))
    of_experts = 3 * len(Mode) - 1  # a step of `ep` cannot be captured
    assert len(cells) == of_dense + of_experts
    assert {cell.device_kind for cell in cells} == {"cuda"}
    num_gpus = {cell.strategy: cell.world_size for cell in cells}
    fours = {StrategyName.HSDP, StrategyName.CP_USP}
    assert num_gpus == dict.fromkeys(StrategyName, 2) | dict.fromkeys(fours, 4) | {StrategyName.SINGLE: 1}


def test_file_may_set_options_degrees_variables_and_a_label(load):
    (cell,) = load(
        table(
            strategy='"hsdp"',
            world_size="4",
            degrees="[2, 2]",
            activation_checkpointing="true",
            variables='{NCCL_ALGO = "Tree"}',
            label='"tree"',
        )
    )
    assert cell.id == "hsdp-tiny-eager-w2x2-gloo-ac-tree"
    assert (cell.variables, cell.options.activation_checkpointing) == ((("NCCL_ALGO", "Tree"),), True)


def test_file_gives_the_product_of_its_lists_in_the_order_written(load):
    cells = load(table(strategy='["fsdp2", "ddp"]', mode='["eager", "compile"]', world_size="[2, 4]"))
    assert [cell.id for cell in cells] == [
        f"{strategy}-tiny-{mode}-w{ranks}-gloo"
        for strategy in ("fsdp2", "ddp")
        for mode in ("eager", "compile")
        for ranks in (2, 4)
    ]


def test_file_with_several_tables_keeps_their_order(load):
    cells = load(table(strategy='"fsdp2"') + table(size='"0.6b"', link='"native"'))
    assert [cell.id for cell in cells] == ["fsdp2-tiny-eager-w2-gloo", "ddp-0.6b-eager-w2-native"]


def test_file_may_change_the_workload_and_leaves_the_rest(load):
    (cell,) = load(table(micro_batch="4", compute_dtype='"bfloat16"'))
    assert (cell.workload.micro_batch, cell.workload.compute_dtype) == (4, "bfloat16")
    assert (cell.workload.sequences, cell.workload.sequence_length) == (8, 64)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"strategy": '"hsdp"', "world_size": "4", "degrees": "[4]"}, "the world size 4, not 4"),
        ({"strategy": '"hsdp"', "world_size": "4", "degrees": "[2, 3]"}, "the world size 4, not 2 x 3"),
        *(
            ({"strategy": f'"{strategy}"', "world_size": number}, f"at least 1: world size {number}")
            for strategy in ("ddp", "hsdp", "pp_1f1b", "cp_ring", "cp_usp")
            for number in ("0", "-4")
        ),
    ],
)
def test_cell_that_cannot_be_cut_is_collected_and_refused_with_its_numbers(load, changes, message):
    (cell,) = load(table(**changes))
    assert cell.id.startswith(f"{cell.strategy}-tiny-eager-w")
    assert message in (refusal(cell.layout) or "")


REFUSED = {
    "unknown strategy": (table(strategy='"zero9"'), ["cells 1", "zero9", "known: single, ddp, zero1"]),
    "unknown strategy in a list": (table(strategy='["ddp", "zero9"]'), ["zero9", "known strategy"]),
    "unknown size": (table(size='"9b"'), ["unknown size '9b'", "known: tiny, 0.6b, 1.7b, 4b, 7b, 8b"]),
    "unknown mode": (table(mode='"graphs"'), ["graphs", "known mode: eager, compile"]),
    "unknown link": (table(link='"infiniband"'), ["infiniband", "known link: gloo, native, no_p2p"]),
    "unknown key": (table(microbatch="4"), ["cells 1", "unknown microbatch; known: strategy", "micro_batch"]),
    "unknown dtype": (table(compute_dtype='"float8"'), ["float8", "compute_dtype"]),
    "world size as text": (table(world_size='"2"'), ["world_size '2': a whole number of ranks"]),
    "world size as word": (table(world_size='"tiny"'), ["world_size 'tiny': a whole number of ranks"]),
    "world size as fraction": (table(world_size="2.5"), ["world_size 2.5: a whole number of ranks"]),
    "world size as table": (table(world_size="{a = 1}"), ["cells 1", "world_size {'a': 1}: a whole number"]),
    "world size as truth": (table(world_size="true"), ["world_size True: a whole number of ranks"]),
    "no strategy": (table(strategy=None), ["lacks strategy;", "strategy, size, mode, world_size, link"]),
    "no size and link": (table(size=None, link=None), ["lacks size, link"]),
    "second table wrong": (table() + table(strategy='"fsdp2"', mode=None), ["cells 2", "lacks mode"]),
    "empty list": (table(strategy="[]"), ["cells 1", "list of strategy is empty"]),
    "same cell twice": (table() + table(micro_batch="4"), ["two cells are called ddp-tiny-eager-w2-gloo"]),
    "same cell twice in a list": (table(world_size="[2, 2]"), ["two cells are called ddp-tiny-eager-w2-gloo"]),
    "broken TOML": ("[[cells]]\nstrategy = \n", ["line 2"]),
    "not text": (b"\xff\xfe", ["can't decode byte"]),
    "empty file": ("", ["[[cells]] tables and nothing else"]),
    "no table": ("cells = []", ["[[cells]] tables and nothing else"]),
    "one table": ("[cells]\n", ["[[cells]] tables and nothing else"]),
    "numbers for tables": ("cells = [1]\n", ["1 is not a [[cells]] table"]),
    "another key": ("name = 'x'\n" + table(), ["[[cells]] tables and nothing else", "['name']"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_file_is_refused_with_its_path_the_place_and_what_is_known(load, case):
    text, parts = REFUSED[case]
    with pytest.raises(ValueError, match=re.escape("mine.toml: ")) as caught:
        load(text)
    assert [part for part in parts if part not in str(caught.value)] == []


VARIABLE = "a variable has a name without =, and no zero byte"
NONSENSE = {
    **{
        f"{name} {number}": ({name: number}, f"{name} {number}: must be at least 1")
        for name in ("sequences", "sequence_length", "micro_batch")
        for number in ("0", "-4", "9999999999999")
    },
    **{f"rate {rate}": ({"learning_rate": rate}, f"learning_rate {rate}: must be") for rate in ("nan", "inf", "-0.1")},
    **{f"seed {seed}": ({"seed": seed}, f"seed {seed}: must be a whole") for seed in ("-1", "4294967296", "9" * 20)},
    **{f"clip {norm}": ({"clip_norm": norm}, f"clip_norm {norm}: must") for norm in ("nan", "inf", "0.0", "-1.0")},
    "variable =": ({"variables": '{"A=B" = "x"}', "label": '"v"'}, f"'A=B' = 'x': {VARIABLE}"),
    "variable without a name": ({"variables": '{"" = "x"}', "label": '"v"'}, f"'' = 'x': {VARIABLE}"),
    "zero byte in a name": ({"variables": r'{"A\u0000" = "x"}', "label": '"v"'}, VARIABLE),
    "zero byte in a value": ({"variables": r'{A = "x\u0000"}', "label": '"v"'}, VARIABLE),
    "variable twice": ({"variables": '[["A", "1"], ["A", "2"]]', "label": '"v"'}, "A is set 2 times; keep one"),
    "long label": ({"label": f'"{"a" * 128}"'}, "its name has 151 characters and may have 150; shorten the label 'aaa"),
    "number for a strategy": ({"strategy": "5"}, "strategy 5: a name in quotes"),
    "table for a size": ({"size": "{}"}, "size {}: a name in quotes"),
    "unknown loss": ({"loss": '"half"'}, "known loss: full, chunked"),
}


@pytest.mark.parametrize("case", NONSENSE)
def test_value_that_nothing_could_run_with_is_refused_with_its_field_and_the_cure(load, case):
    changes, says = NONSENSE[case]
    with pytest.raises(ValueError, match=re.escape("mine.toml: cells 1: {'strategy': ")) as caught:
        load(table(**changes))
    assert says in str(caught.value)


def test_values_at_the_edge_are_cells(load):
    changes = {"learning_rate": "0", "seed": "4294967295", "sequence_length": "1", "label": f'"{"a" * 127}"'}
    assert len(load(table(**changes))[0].id) == 150


def test_cells_are_written_as_a_file_that_is_read_back_as_the_same(load):
    odd = 'a " b \\ c \x7f \N{GRINNING FACE} \t'
    cells = (
        cell(),
        replace(cell(), label="odd", variables=(("A", odd), ("B", ""))),
        replace(cell(), label="clipped", options=Options(clip_norm=1e-5)),
    )
    assert load(matrix.as_toml(cells)) == cells


@pytest.mark.parametrize("name", ["a" * 300, "x/" * 3000])
def test_path_that_no_file_can_have_is_refused(name):
    with pytest.raises(ValueError, match="cannot be read: File name too long"):
        matrix.cells_of(name)


@pytest.mark.parametrize("name", ["smok", "missing.toml", "."])
def test_unknown_matrix_says_what_is_known(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ValueError, match=re.escape(f"no matrix {name!r}; known: auto, smoke, node, or the path of a TOML")
    ):
        matrix.cells_of(name)


def test_obstacle_is_the_refusal_then_what_the_node_lacks():
    gpus = tuple(Gpu(name="NVIDIA H200", uuid=f"GPU-{n}", memory_gib=140, power_limit_w=700) for n in range(2))
    bare, pair = (Node(cpu="Test CPU", cpu_cores=2, gpus=some) for some in ((), gpus))
    on_gpus, on_cpu = cell(link=LinkProfile.NATIVE), cell()
    uncut = cell(StrategyName.TP, world_size=3, link=LinkProfile.NATIVE)
    assert matrix.obstacle(on_gpus, pair, "node") is None
    assert matrix.obstacle(on_gpus, bare, "node") == "needs 2 GPUs, sees 0"
    assert matrix.obstacle(uncut, bare, "node") == refusal(uncut.layout)
    assert matrix.obstacle(on_cpu, bare, "auto") is None
    assert matrix.obstacle(on_cpu, pair, "smoke") is None
    assert matrix.obstacle(on_cpu, pair, "auto").startswith("gloo cells are for machines without GPUs, sees 2;")
