"""Rooms strategies/tensor_parallel.py, vocabulary_parallel.py, norm.py: right numbers, and just the sums they need."""

import msgspec
import pytest

from perf.facts.record import LedgerEntry
from strategies.spec import ComputeDtype, LossKind, Mode, Options, StrategyName
from tests.equivalence import SHAPE, Case
from tests.tensor_parallel_ranks import CHUNK_TOKENS, Audited
from tests.test_equivalence import distances, faults

TENSOR_PARALLEL = [StrategyName.TP, StrategyName.TP_SP]
FLOAT32_BYTES = 4
DTYPE_BYTES = {ComputeDtype.FLOAT32: FLOAT32_BYTES, ComputeDtype.BFLOAT16: 2}


def entry(op, count, num_bytes, dtype=ComputeDtype.FLOAT32):
    return LedgerEntry(op=op, axis="tp", dtype=str(dtype), count=count, bytes=num_bytes)


def merged(entries):
    """Entries of one op and dtype as one, as a ledger has them."""
    found = {}
    for item in entries:
        count, num_bytes = found.get((item.op, item.dtype), (0, 0))
        found[item.op, item.dtype] = (count + item.count, num_bytes + item.bytes)
    return tuple(entry(op, *numbers, dtype) for (op, dtype), numbers in sorted(found.items()))


PLAIN, CHECKPOINTED = Options(), Options(activation_checkpointing=True)


def expected_ledger(layout):
    """The formula in the docstring of strategies/tensor_parallel.py."""
    shape, workload, degree = layout.shape, layout.workload, layout.degree("tp")
    forwards, tokens = layout.num_micro_batches, workload.micro_batch * workload.sequence_length
    dtype, layers = workload.compute_dtype, shape.num_layers
    activation_bytes = tokens * shape.hidden_size * DTYPE_BYTES[dtype]
    num_chunks = -(-tokens // CHUNK_TOKENS) if workload.loss is LossKind.CHUNKED else 1
    exchanged = 2 * (2 * layers + 1) * forwards
    # A checkpointed layer needs its last sum no more, but a compiled one is run as a whole.
    repeated = layers * forwards * layout.options.activation_checkpointing * (1 if layout.mode is Mode.EAGER else 2)
    loss = entry("all_gather", num_chunks * forwards, 2 * tokens * FLOAT32_BYTES * forwards)
    norms_bytes = 2 * layers * shape.head_dim * FLOAT32_BYTES
    if layout.strategy is StrategyName.TP:
        exchanged += repeated
        sums = [entry("all_reduce", exchanged, exchanged * activation_bytes, dtype)]
    else:
        norms_bytes += (2 * layers + 1) * shape.hidden_size * FLOAT32_BYTES
        gathered = exchanged + 2 * layers * forwards * layout.options.activation_checkpointing
        scattered = exchanged + repeated
        gathers = entry("all_gather", gathered, gathered * activation_bytes // degree, dtype)
        sums = [gathers, entry("reduce_scatter", scattered, scattered * activation_bytes, dtype)]
    return merged([loss, entry("all_reduce", 1, norms_bytes), *sums])


def audit(launcher, strategy, *, dtype=ComputeDtype.FLOAT32, kind=LossKind.FULL, mode=Mode.EAGER, options=PLAIN):
    layout = Case(strategy=strategy, world_size=2, loss=kind, mode=mode, options=options).layout
    workload = msgspec.structs.replace(layout.workload, compute_dtype=dtype)
    layout = msgspec.structs.replace(layout, workload=workload)
    records, teardown_hang = launcher.run(
        "tests.tensor_parallel_ranks:audit", layout, world_size=2, record=Audited, deadline_s=120.0
    )
    assert not teardown_hang
    return layout, records


VARIANTS = {
    "untied, chunked, grouped queries, packed documents, one forward": {
        "changes": {"tied_embeddings": False, "num_heads": 8},
        "packed": True,
        "loss": LossKind.CHUNKED,
        "micro_batch": 8,
    },
    "tied, low state, a forward without labels": {
        "options": Options(optimizer_state=ComputeDtype.BFLOAT16),
        "masked_sequences": (2, 3),
        "masked_positions": (0, 5),
    },
    "chunked, checkpointed, no labels at the end, clipped": {
        "loss": LossKind.CHUNKED,
        "masked_sequences": (6, 7),
        "options": Options(activation_checkpointing=True, clip_norm=0.5),
    },
}


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("strategy", TENSOR_PARALLEL)
def test_variant_equals_unsharded_model(launcher, strategy, variant):
    case = Case(strategy=strategy, world_size=2, **variant)
    assert not faults(distances(launcher, case), case)


def test_four_ranks_of_one_kv_head_each(launcher):
    changes = {"num_kv_heads": 4, "vocab_size": 100}
    case = Case(strategy=StrategyName.TP_SP, world_size=4, changes=changes, loss=LossKind.CHUNKED)
    assert not faults(distances(launcher, case), case)


MISTAKES = {
    "head norms not summed": ({"gradients"}, "_norm.weight"),
    "tie broken": ({"gradients", "gradient_norm"}, ""),
    "gradient of the embedding left whole": ({"gradient_norm"}, ""),
    "loss counted by every rank": ({"loss"}, ""),
}
"""Planted mistake -> what must be wrong then, and the worst gradient. All others stay right."""


@pytest.mark.parametrize(("strategy", "mistake"), list(zip(2 * TENSOR_PARALLEL, MISTAKES, strict=True)))
def test_planted_mistake_is_found(launcher, strategy, mistake):
    case = Case(strategy=strategy, world_size=2, mistake=mistake)
    records = distances(launcher, case)
    wrong, worst = MISTAKES[mistake]
    assert {field for field in wrong if any(field in fault for fault in faults(records, case))} == wrong
    for record in records:
        assert {field for field in wrong if getattr(record, field) > 0.01} == wrong
        assert worst in record.worst_gradient
        assert record.logits < 1e-2 or mistake == "tie broken"


def test_norms_that_see_a_part_of_the_positions_are_summed(launcher):
    """Without sequence parallelism each rank has the whole gradient already, and the same switch is right."""
    mistake = "layer norms not summed"
    wrong, right = (Case(strategy=s, world_size=2, mistake=mistake) for s in reversed(TENSOR_PARALLEL))
    assert any("gradients" in fault for fault in faults(distances(launcher, wrong), wrong))
    assert not faults(distances(launcher, right), right)


@pytest.mark.parametrize(
    ("dtype", "kind"),
    [(ComputeDtype.FLOAT32, LossKind.FULL), (ComputeDtype.BFLOAT16, LossKind.CHUNKED)],
)
@pytest.mark.parametrize("strategy", TENSOR_PARALLEL)
def test_step_sends_what_the_formula_says(launcher, strategy, dtype, kind):
    """In bfloat16 as well, where it also is as exact as the unsharded model: sums of halves are rounded once more."""
    layout, records = audit(launcher, strategy, dtype=dtype, kind=kind)
    for record in records:
        assert record.ledger == expected_ledger(layout)
        if dtype is ComputeDtype.BFLOAT16:
            assert 1e-4 < record.unsharded_gradient_error < 0.02
            assert record.gradient_error < 1.25 * record.unsharded_gradient_error
            assert record.loss_error < 1e-3
        else:
            assert record.gradient_error < 1e-5


def test_rank_keeps_no_more_than_its_slices_and_one_counts_the_tokens(launcher):
    replicated = SHAPE.num_layers * (2 * SHAPE.hidden_size + 2 * SHAPE.head_dim) + SHAPE.hidden_size
    records = audit(launcher, StrategyName.TP)[1]
    assert [record.counts_tokens for record in records] == [True, False]
    for record in records:
        assert record.local_bytes == FLOAT32_BYTES * ((SHAPE.num_parameters - replicated) // 2 + replicated)


@pytest.mark.parametrize("strategy", TENSOR_PARALLEL)
def test_checkpointed_step_repeats_the_sums_that_it_needs(launcher, strategy):
    layout, records = audit(launcher, strategy, options=CHECKPOINTED)
    assert all(record.ledger == expected_ledger(layout) for record in records)


def test_compiled_and_checkpointed_step_is_right(launcher):
    layout, records = audit(launcher, StrategyName.TP, kind=LossKind.CHUNKED, mode=Mode.COMPILE, options=CHECKPOINTED)
    for record in records:
        assert record.ledger == expected_ledger(layout)
        assert record.gradient_error < 1e-5
        # One of both layers, and two of the loss for a whole chunk and for the last one.
        assert record.graphs == 5
