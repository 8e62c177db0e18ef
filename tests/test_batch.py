"""Room strategies/batch.py: one global batch per step, whoever asks, and every sequence of it on exactly one rank."""

import dataclasses

import msgspec
import pytest
import torch

from strategies.batch import IGNORE_INDEX, Share, from_ids, synthetic_batch
from strategies.layout import default_workload
from strategies.shapes import SIZES
from tests.equivalence import CPU

SHAPE, WORKLOAD = SIZES["tiny"], default_workload("tiny")


def batch(step=0, shape=SHAPE, **changes):
    return synthetic_batch(shape, msgspec.structs.replace(WORKLOAD, **changes), step=step, device=CPU)


@pytest.mark.parametrize(("data_degree", "size"), [(1, 8), (1, 1), (2, 4), (2, 2), (4, 2), (4, 1), (8, 1)])
def test_micro_batches_of_all_ranks_are_the_global_batch_in_order(data_degree, size):
    whole = batch()
    ranks = [Share(data_rank=rank, data_degree=data_degree) for rank in range(data_degree)]
    shares = [whole.micro_batches(rank, size=size) for rank in ranks]
    assert {len(share) for share in shares} == {WORKLOAD.sequences // (data_degree * size)}
    parts = [part for share in shares for part in share]
    assert all(part.ids_BS.shape == (size, WORKLOAD.sequence_length) for part in parts)
    for field in ("ids_BS", "labels_BS", "positions_BS"):
        assert torch.equal(torch.cat([getattr(part, field) for part in parts]), getattr(whole, field)), field


def test_micro_batch_size_is_no_part_of_the_data():
    assert torch.equal(batch(micro_batch=1).ids_BS, batch(micro_batch=4).ids_BS)


def test_labels_are_the_next_tokens():
    whole = batch()
    assert torch.equal(whole.labels_BS[:, :-1], whole.ids_BS[:, 1:])
    assert whole.labels_BS.shape == whole.ids_BS.shape == (WORKLOAD.sequences, WORKLOAD.sequence_length)
    assert whole.num_label_tokens == WORKLOAD.tokens_per_step  # the last position has its next token too


def test_positions_count_from_zero_in_every_sequence():
    whole = batch()
    assert torch.equal(whole.positions_BS, torch.arange(WORKLOAD.sequence_length).repeat(WORKLOAD.sequences, 1))
    assert whole.positions_BS.is_contiguous()
    assert {tensor.dtype for tensor in (whole.ids_BS, whole.labels_BS, whole.positions_BS)} == {torch.int64}


@pytest.mark.parametrize("size", SIZES)
def test_ids_are_words_of_the_vocabulary(size):
    whole = batch(shape=SIZES[size], sequences=32)
    both = torch.stack([whole.ids_BS, whole.labels_BS])
    assert both.min() >= 0
    assert both.max() < SIZES[size].vocab_size


def test_some_tokens_are_frequent():
    """floor(V u^4): P(id = 0) = V^(-1/4) = 0.21 where uniform ids would have 1/512; half of all lie below V/16."""
    ids = batch(sequences=256).ids_BS
    assert (ids == 0).float().mean().item() == pytest.approx(SHAPE.vocab_size**-0.25, rel=0.05)
    assert (ids < SHAPE.vocab_size / 16).float().mean().item() == pytest.approx(0.5, abs=0.02)
    assert ids.max() > 0.9 * SHAPE.vocab_size


def test_batch_depends_on_seed_and_step_only():
    torch.manual_seed(1)
    first = batch(step=3, seed=5)
    torch.manual_seed(2)
    torch.rand(7)
    assert torch.equal(batch(step=3, seed=5).ids_BS, first.ids_BS)
    assert not torch.equal(batch(step=4, seed=5).ids_BS, first.ids_BS)
    assert not torch.equal(batch(step=3, seed=6).ids_BS, first.ids_BS)


def test_no_step_of_one_seed_is_a_step_of_another():
    seen = {tuple(batch(step=step, seed=seed).ids_BS.flatten().tolist()) for seed in range(4) for step in range(16)}
    assert len(seen) == 4 * 16


def test_drawing_a_batch_leaves_the_global_generator_alone():
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    batch()
    assert torch.equal(torch.rand(1), expected)


def test_rows_keep_the_number_of_label_tokens_of_the_global_batch():
    ids = torch.arange(12).reshape(4, 3)
    labels = ids.clone()
    labels[1:3] = IGNORE_INDEX
    whole = from_ids(ids, labels)
    assert whole.num_label_tokens == 6
    first, second = whole.micro_batches(Share(data_rank=1, data_degree=2), size=1)
    assert (first.num_label_tokens, second.num_label_tokens) == (6, 6)
    assert torch.equal(first.ids_BS, ids[2:3])
    assert (first.labels_BS == IGNORE_INDEX).all()


def test_share_of_a_sequence_holds_its_positions_in_its_order_and_documents_whole():
    ids = torch.arange(32).reshape(4, 8)
    whole = dataclasses.replace(from_ids(ids, ids + 1), documents_BS=(ids % 8) // 3)
    share = Share(data_rank=1, data_degree=2, positions_S=torch.tensor([0, 1, 6, 7]))
    first, second = whole.micro_batches(share, size=1)
    assert first.ids_BS.tolist() == [[16, 17, 22, 23]]
    assert second.labels_BS.tolist() == [[25, 26, 31, 32]]
    assert first.positions_BS.tolist() == [[0, 1, 6, 7]]
    assert first.num_label_tokens == 32
    assert first.documents_BS.tolist() == [[0, 0, 0, 1, 1, 1, 2, 2]]
