"""Room perf/measure/comms.py: the ledger of a step is what the strategy must send, and no collective escapes it."""

import math

import msgspec
import pytest

from perf.facts.measurement import RankLedger, measure
from perf.facts.record import LedgerEntry
from perf.judge.correctness import differences
from strategies.model import build_model
from strategies.shapes import SIZES
from strategies.spec import Mode, StrategyName
from tests.comms_ranks import NUM_VALUES, Calls, Seen, Steps
from tests.equivalence import CPU, SHAPE, Case
from tests.factory import PLAN, change_ranks, invariants, run_record

FLOAT32_BYTES = 4
PAYLOAD_BYTES = NUM_VALUES * FLOAT32_BYTES
C10D_OPS = {"all_reduce": "c10d::allreduce_", "all_gather": "c10d::_allgather_base_"}
C10D_OPS["reduce_scatter"] = "c10d::_reduce_scatter_base_"
FIRST_BUCKET_BYTES = 2**20
"""DDP closes its first bucket at 1 MiB, the next at 25 MiB."""


def entry(op, count, num_bytes, *, axis="dp", dtype="float32"):
    return LedgerEntry(op=op, axis=axis, dtype=dtype, count=count, bytes=num_bytes)


def see(launcher, strategy, *, world_size=2, shape=SHAPE, mode=Mode.EAGER, planted=None):
    """What each rank sees of its steps of a strategy: 8 sequences in micro-batches of 2."""
    layout = Case(strategy=strategy, world_size=world_size).layout
    task = Steps(layout=msgspec.structs.replace(layout, shape=shape, mode=mode), planted=planted)
    records, teardown_hang = launcher.run(
        "tests.comms_ranks:steps", task, world_size=world_size, record=Seen, deadline_s=120.0
    )
    assert not teardown_hang
    return records


def by_hand(launcher, entry_point, record, world_size=2):
    return launcher.run(
        f"tests.comms_ranks:{entry_point}", None, world_size=world_size, record=record, deadline_s=60.0
    )[0]


def ddp_ledger(shape):
    """One all-reduce of every gradient, in buckets, with the last micro-batch only."""
    layer_bytes = FLOAT32_BYTES * (shape.num_parameters - shape.vocab_size * shape.hidden_size)
    num_buckets = 2 if layer_bytes > FIRST_BUCKET_BYTES else 1
    return (entry("all_reduce", num_buckets, FLOAT32_BYTES * shape.num_parameters),)


def fsdp2_ledger(shape, world_size):
    """Of every micro-batch: all layers gathered twice, the root (embedding, last norm, head) once, all reduced once.

    A parameter is cut along dim 0 into equal shards, the last one padded.
    """
    layers_bytes, root_bytes = 0, 0
    for name, parameter in build_model(shape, device=CPU, seed=0).named_parameters():
        shard_bytes = FLOAT32_BYTES * math.ceil(parameter.shape[0] / world_size) * math.prod(parameter.shape[1:])
        if ".layers." in name:
            layers_bytes += shard_bytes
        else:
            root_bytes += shard_bytes
    num_micro_batches = 8 // (world_size * 2)
    num_gathers, num_reduces = 2 * shape.num_layers + 1, shape.num_layers + 1
    gathered_bytes, reduced_bytes = 2 * layers_bytes + root_bytes, world_size * (layers_bytes + root_bytes)
    return (
        entry("all_gather", num_micro_batches * num_gathers, num_micro_batches * gathered_bytes),
        entry("reduce_scatter", num_micro_batches * num_reduces, num_micro_batches * reduced_bytes),
    )


@pytest.mark.parametrize("num_layers", [2, 4, 8])
def test_ddp_sends_every_gradient_once(launcher, num_layers):
    shape = msgspec.structs.replace(SIZES["tiny"], num_layers=num_layers)
    for seen in see(launcher, StrategyName.DDP, shape=shape):
        assert seen.ledgers == (ddp_ledger(shape),) * 2
        assert seen.profiled == {C10D_OPS[call.op]: call.count for call in seen.ledgers[0]}


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_fsdp2_gathers_shards_and_scatters_gradients_of_every_micro_batch(launcher, world_size, tied):
    shape = msgspec.structs.replace(SHAPE, tied_embeddings=tied)
    for seen in see(launcher, StrategyName.FSDP2, world_size=world_size, shape=shape):
        assert seen.ledgers == (fsdp2_ledger(shape, world_size),) * 2
        assert seen.profiled == {C10D_OPS[call.op]: call.count for call in seen.ledgers[0]}


def test_shape_that_needs_no_padding_scatters_exactly_the_parameters_bytes():
    reduced = fsdp2_ledger(SIZES["tiny"], 2)[1]
    assert reduced.bytes == 2 * FLOAT32_BYTES * SIZES["tiny"].num_parameters


def test_compiled_step_is_compiled_under_the_ledger_and_sends_what_the_eager_one_sends(launcher):
    for seen in see(launcher, StrategyName.FSDP2, mode=Mode.COMPILE):
        assert seen.graphs > 0
        assert not seen.ran_silu, "torch fell back to eager under the ledger: the count says nothing of compiled code"
        assert seen.ledgers == (fsdp2_ledger(SHAPE, 2),) * 2
    assert all(seen.ran_silu for seen in see(launcher, StrategyName.FSDP2))


HEALTHY = f"1 calls, {FLOAT32_BYTES * SHAPE.num_parameters:,} bytes"
MORE = f"2 calls, {FLOAT32_BYTES * SHAPE.num_parameters + 3 * FLOAT32_BYTES:,} bytes"
HALF = f"1 calls, {FLOAT32_BYTES // 2 * SHAPE.num_parameters:,} bytes"


@pytest.mark.parametrize(
    ("planted", "said"),
    [
        ("extra_all_reduce", f"all_reduce/dp/float32: {HEALTHY} -> {MORE}"),
        ("float16", f"all_reduce/dp/float16: none -> {HALF}; all_reduce/dp/float32: {HEALTHY} -> none"),
    ],
    ids=["added", "other-dtype"],
)
def test_changed_communication_is_a_difference_from_the_recorded_ledger(launcher, planted, said):
    changed = see(launcher, StrategyName.DDP, planted=planted)
    run = change_ranks(run_record(), ledger=changed[0].ledgers[0])
    recorded = msgspec.structs.replace(invariants(), ledger=(RankLedger(ranks=(0, 1), entries=ddp_ledger(SHAPE)),))
    assert differences(measure(run.cell, PLAN, [run]), recorded) == [f"run 0: collectives of ranks 0, 1: {said}"]


BY_HAND = {
    "all_reduce": [entry("all_reduce", 1, PAYLOAD_BYTES)],
    "all_gather": [entry("all_gather", 1, PAYLOAD_BYTES)],
    "all_gather_into_tensor": [entry("all_gather", 1, PAYLOAD_BYTES)],
    "reduce_scatter": [entry("reduce_scatter", 1, PAYLOAD_BYTES)],
    "reduce_scatter_tensor": [entry("reduce_scatter", 1, PAYLOAD_BYTES)],
    "broadcast": [entry("broadcast", 1, PAYLOAD_BYTES)],
    "reduce": [entry("reduce", 1, PAYLOAD_BYTES)],
    "all_to_all": [entry("all_to_all", 1, PAYLOAD_BYTES)],
    "all_to_all_single": [entry("all_to_all", 1, PAYLOAD_BYTES)],
    "batch_isend_irecv": [entry("recv", 1, PAYLOAD_BYTES), entry("send", 1, PAYLOAD_BYTES)],
    "barrier": [entry("barrier", 1, 1, dtype="uint8")],
    "functional.all_reduce": [entry("all_reduce", 1, PAYLOAD_BYTES)],
    "functional.all_gather": [entry("all_gather", 1, PAYLOAD_BYTES)],
    "functional.reduce_scatter": [entry("reduce_scatter", 1, PAYLOAD_BYTES)],
    "functional.all_to_all": [entry("all_to_all", 1, PAYLOAD_BYTES)],
    "functional.broadcast": [entry("broadcast", 1, PAYLOAD_BYTES)],
    "functional.in_place": [entry("all_reduce", 1, PAYLOAD_BYTES)],
    "functional.coalesced": [entry("all_gather", 1, PAYLOAD_BYTES)],
    "autograd": [entry("all_to_all", 2, 2 * PAYLOAD_BYTES)],
    "dtensor": [entry("all_gather", 1, PAYLOAD_BYTES)],
    "inside_dtensor_op": [entry("all_reduce", 1, FLOAT32_BYTES)],
    "three": [entry("all_reduce", 2, 7 * FLOAT32_BYTES), entry("all_reduce", 1, 8, dtype="int64")],
}
"""Payload that this rank passes in: six float32 values, whatever comes out."""


def test_every_collective_by_hand_is_counted_by_name_axis_dtype_and_payload(launcher):
    for record in by_hand(launcher, "calls", Calls):
        assert set(BY_HAND) - set(record.ledgers) <= {"all_to_all"}
        assert record.ledgers == {name: tuple(BY_HAND[name]) for name in record.ledgers}
        assert record.num_arrivals == 3


def test_collective_is_counted_on_the_mesh_axis_of_its_group(launcher):
    on = {"dp": "dp", "tp": "tp", "all": "world", "new": "world"}
    for record in by_hand(launcher, "axes", Calls, world_size=4):
        assert {name: [call.axis for call in ledger] for name, ledger in record.ledgers.items()} == {
            name: [axis] for name, axis in on.items()
        }
