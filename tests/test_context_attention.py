"""Attention over sequences that are cut over ranks is full attention: outputs, gradients, and who sees whom."""

import pytest
import torch

from strategies import block_attention, gpu_attention
from strategies.block_attention import attend, attend_backward
from strategies.context_index import contiguous_index, usp_index, zigzag_index
from strategies.ring_attention import merge, visible_block
from strategies.ulysses import check_heads
from tests.context_ranks import Changes, Errors, Task

BOUNDS = {"float64": 1e-12, "float32": 2e-5, "bfloat16": 3e-2}
TENSORS = ("output", "grad_q", "grad_k", "grad_v")
VARIANTS = [("ring", 2), ("ring", 4), ("ulysses", 2), ("ulysses", 4), ("usp", 4)]
IDS = [f"{variant}-{ranks}" for variant, ranks in VARIANTS]
PACKED = (0,) * 5 + (1,) * 9 + (2,) * 1 + (3,) * 14 + (4,) * 3
"""Documents whose boundaries are none of the cuts' (multiples of 4), one of a single token."""


def run(launcher, task, num_ranks, entry="compare", record=Errors):
    records, teardown_hang = launcher.run(
        f"tests.context_ranks:{entry}", task, world_size=num_ranks, record=record, deadline_s=60.0
    )
    assert not teardown_hang
    return records


def errors(launcher, task, num_ranks):
    """The worst rank's, by tensor."""
    records = run(launcher, task, num_ranks)
    return {name: max(getattr(record, name) for record in records) for name in TENSORS}


def wrong(launcher, task, num_ranks):
    """Names of the tensors that are not full attention's."""
    return {name for name, error in errors(launcher, task, num_ranks).items() if not error <= BOUNDS[task.dtype]}


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize(("variant", "ranks"), VARIANTS, ids=IDS)
def test_equals_full_attention(launcher, variant, ranks, dtype):
    assert not wrong(launcher, Task(variant=variant, dtype=dtype, heads=8), ranks)


@pytest.mark.parametrize(("variant", "ranks"), VARIANTS, ids=IDS)
def test_scores_of_a_hundred(launcher, variant, ranks):
    assert not wrong(launcher, Task(variant=variant, largest_score=100.0), ranks)


@pytest.mark.parametrize(("variant", "ranks"), VARIANTS, ids=IDS)
def test_packed_documents(launcher, variant, ranks):
    assert not wrong(launcher, Task(variant=variant, documents=PACKED), ranks)


def test_packed_documents_in_bfloat16(launcher):
    assert not wrong(launcher, Task(variant="ring", documents=PACKED, dtype="bfloat16"), 2)


@pytest.mark.parametrize(
    ("variant", "ranks", "heads", "kv_heads"),
    [("ulysses", 4, 8, 8), ("ulysses", 4, 4, 1), ("ulysses", 2, 2, 2), ("ring", 2, 3, 3), ("ring", 4, 3, 1)],
)
def test_numbers_of_heads(launcher, variant, ranks, heads, kv_heads):
    assert not wrong(launcher, Task(variant=variant, heads=heads, kv_heads=kv_heads), ranks)


@pytest.mark.parametrize(("variant", "ranks"), [("ring", 1), ("ulysses", 1)])
def test_one_rank(launcher, variant, ranks):
    assert not wrong(launcher, Task(variant=variant), ranks)


@pytest.mark.parametrize(("variant", "ranks", "breaks"), [("ulysses", 2, False), ("ring", 2, True), ("usp", 4, True)])
def test_compiled_caller(launcher, variant, ranks, breaks):
    # In float32: torch 2.11 expects a float32 log-sum-exp of its own CPU kernel in any compiled code.
    records = run(launcher, Task(variant=variant, dtype="float32", compiled=True), ranks)
    assert [record.graph_breaks > 0 for record in records] == [breaks] * ranks
    assert all(getattr(record, name) <= BOUNDS["float32"] for record in records for name in TENSORS)


@pytest.mark.parametrize(
    ("planted", "task", "ranks", "wrong_tensors"),
    [
        ("merge_without_rescaling", Task(variant="ring"), 2, {"output", "grad_q", "grad_k"}),
        ("wrong_chunk", Task(variant="ring"), 2, set(TENSORS)),
        ("gradient_of_one_repeat", Task(variant="ring"), 2, {"grad_k", "grad_v"}),
        ("block_log_sum_exp", Task(variant="ring"), 2, {"grad_q", "grad_k", "grad_v"}),
        ("no_documents", Task(variant="usp", documents=PACKED), 4, set(TENSORS)),
        ("detached_repeats", Task(variant="ulysses"), 4, {"grad_k", "grad_v"}),
        ("tiled_repeats", Task(variant="ulysses"), 4, set(TENSORS)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_planted_mistake_is_found(launcher, planted, task, ranks, wrong_tensors):
    fields = {name: getattr(task, name) for name in task.__struct_fields__} | {"planted": planted}
    assert wrong(launcher, Task(**fields), ranks) == wrong_tensors


def changes(launcher, task, ranks):
    """By the position whose key and value move: the positions whose output does."""
    records = run(launcher, task, ranks, "perturb", Changes)
    assert sorted(position for record in records for position in record.positions) == list(range(task.sequence_length))
    return [sorted(sum((record.changed[moved] for record in records), ())) for moved in range(task.sequence_length)]


@pytest.mark.parametrize("documents", [None, (0, 0, 0, 1, 1, 1, 1, 2)], ids=["causal", "packed"])
@pytest.mark.parametrize(("variant", "ranks"), [("ring", 2), ("ring", 4), ("ulysses", 4), ("usp", 4)])
def test_a_token_reaches_all_later_ones_of_its_document_and_no_others(launcher, variant, ranks, documents):
    of = documents or (0,) * 8
    reached = [[query for query in range(key, 8) if of[query] == of[key]] for key in range(8)]
    task = Task(variant=variant, sequence_length=8, documents=documents)
    assert changes(launcher, task, ranks) == reached


def test_attention_that_sees_its_own_shard_only_is_found(launcher):
    task = Task(variant="ring", sequence_length=8, planted="only_own_block")
    assert changes(launcher, task, 2)[0] == [0, 1, 6, 7]


def test_positions_of_a_rank():
    assert zigzag_index(8, 2, 0).tolist() == [0, 1, 6, 7]
    assert zigzag_index(8, 2, 1).tolist() == [2, 3, 4, 5]
    assert contiguous_index(8, 2, 1).tolist() == [4, 5, 6, 7]
    assert usp_index(8, 2, 0, 2, 0).tolist() == [0, 1]
    assert usp_index(8, 2, 0, 2, 1).tolist() == [6, 7]


@pytest.mark.parametrize(
    "index",
    [
        *([zigzag_index(48, degree, rank) for rank in range(degree)] for degree in (1, 2, 3, 4)),
        *([contiguous_index(48, degree, rank) for rank in range(degree)] for degree in (1, 2, 3, 4)),
        *([usp_index(48, 2, r, u, s) for r in range(2) for s in range(u)] for u in (1, 2, 3)),
    ],
)
def test_every_position_once_and_unshard_undoes_shard(index):
    whole = torch.cat(index)
    assert sorted(whole.tolist()) == list(range(48))
    assert all(bool((share.diff() > 0).all()) for share in index)
    sequence = torch.arange(48) * 3
    shards = torch.cat([sequence[share] for share in index])
    assert torch.equal(shards[whole.argsort()], sequence)


def test_sequences_that_cannot_be_cut_are_refused():
    with pytest.raises(ValueError, match="10 tokens does not split into 4 equal chunks"):
        zigzag_index(10, 2, 0)
    with pytest.raises(ValueError, match="10 tokens does not split into 4 equal pieces"):
        contiguous_index(10, 4, 0)
    with pytest.raises(ValueError, match="4 tokens does not split into 3"):
        usp_index(8, 2, 0, 3, 0)


def test_heads_that_cannot_be_exchanged_are_refused():
    for heads, kv_heads, degree in [(8, 2, 2), (8, 2, 4), (8, 8, 4), (8, 2, 8), (6, 6, 3)]:
        check_heads(heads, kv_heads, degree)
    for heads, kv_heads, degree in [(8, 2, 3), (8, 2, 16), (6, 2, 3), (12, 6, 4)]:
        with pytest.raises(ValueError, match=f"over {degree} ranks"):
            check_heads(heads, kv_heads, degree)


def test_blocks_are_what_a_causal_mask_leaves():
    degree, length = 4, 6
    for rank in range(degree):
        seen = torch.zeros(degree * length, degree * length, dtype=torch.bool)
        for source in range(degree):
            block = visible_block(rank, source, length)
            queries, keys = (zigzag_index(degree * length, degree, of) for of in (rank, source))
            pairs = torch.ones(length, length, dtype=torch.bool)[block.queries, block.keys]
            seen[queries[block.queries, None], keys[block.keys]] = pairs.tril() if block.is_own else pairs
        mine = zigzag_index(degree * length, degree, rank)
        assert torch.equal(seen[mine], torch.ones_like(seen).tril()[mine])


def tensors(dtype=torch.float64, queries=6, keys=6):
    generator = torch.Generator().manual_seed(1)
    shapes = [(2, 4, queries, 8), (2, 2, keys, 8), (2, 2, keys, 8), (2, 4, queries, 8)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


@pytest.mark.parametrize(("queries", "keys", "causal"), [(6, 6, True), (3, 6, False), (6, 3, False)])
def test_kernels_agree(monkeypatch, queries, keys, causal):
    q, k, v, grad = tensors(queries=queries, keys=keys)

    def both_passes():
        output, log_sum_exp = attend(q, k, v, scale=0.5, causal=causal)
        return [output, log_sum_exp, *attend_backward(grad, q, k, v, output, log_sum_exp, scale=0.5, causal=causal)]

    fused = both_passes()
    monkeypatch.setattr(block_attention, "_has_fused_kernel", lambda *_: False)
    for one, other in zip(fused, both_passes(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-13, atol=1e-14)


def test_row_that_sees_nothing_weighs_nothing():
    q, k, v, grad = tensors()
    mask = torch.ones(2, 6, 6, dtype=torch.bool)
    mask[1, 2] = False
    output, log_sum_exp = attend(q, k, v, scale=0.5, causal=False, mask_BST=mask)
    assert bool((output[1, :, 2] == 0).all())
    assert log_sum_exp[1, :, 2].tolist() == [-torch.inf] * 4
    whole, whole_log_sum_exp = attend(q, k, v, scale=0.5, causal=False)
    before = whole.clone()
    merge(whole, whole_log_sum_exp, output, log_sum_exp)
    torch.testing.assert_close(whole, before)  # twice the same keys, so the same mean; and the row as it was
    assert torch.equal(whole[1, :, 2], before[1, :, 2])
    grads = attend_backward(grad, q, k, v, whole, whole_log_sum_exp, scale=0.5, causal=False, mask_BST=mask)
    assert all(bool(torch.isfinite(tensor).all()) for tensor in grads)
    assert bool((grads[0][1, :, 2] == 0).all())


@pytest.mark.parametrize(
    "kernel",
    [
        (gpu_attention.flash_forward, gpu_attention.flash_backward),
        (gpu_attention.cudnn_forward, gpu_attention.cudnn_backward),
    ],
    ids=["flash", "cudnn"],
)
def test_gpu_kernel_takes_what_it_is_given(kernel):
    """The schema only, on tensors without data: no GPU here."""
    q, k, v, grad = (tensor.to("meta", torch.bfloat16) for tensor in tensors(keys=3))
    forward, backward = kernel
    output, log_sum_exp = forward(q, k, v, 0.5, False)
    assert (output.shape, log_sum_exp.shape, log_sum_exp.dtype) == (q.shape, (2, 4, 6), torch.float32)
    grads = backward(grad, q, k, v, output, log_sum_exp, 0.5, False)
    assert [tensor.shape for tensor in grads] == [q.shape, k.shape, v.shape]
