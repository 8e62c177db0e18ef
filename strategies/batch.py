"""Synthetic training data: one global batch per step, the same whatever the layout, and a rank's share of it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from strategies.spec import ModelShape, Workload

IGNORE_INDEX = -100
"""Label of a position that does not count in the loss, as in torch's cross_entropy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Sequences with their labels. B = sequences, S = sequence length."""

    ids_BS: Tensor
    """Token ids, int64."""
    labels_BS: Tensor
    """The next token of each position, shifted before any cut, so that no shard needs its neighbour's first token."""
    positions_BS: Tensor
    """Position of each token in its sequence, int64."""
    num_label_tokens: int
    """Labels that count in the loss, over the *global* batch: every shard divides its summed loss by this number."""

    def rows(self, start: int, stop: int) -> "Batch":
        """The sequences [start, stop); the loss is still normalised by the global batch."""
        return Batch(
            ids_BS=self.ids_BS[start:stop],
            labels_BS=self.labels_BS[start:stop],
            positions_BS=self.positions_BS[start:stop],
            num_label_tokens=self.num_label_tokens,
        )

    def micro_batches(self, *, data_rank: int, data_degree: int, size: int) -> list["Batch"]:
        """The share of one data rank, cut into forwards of `size` sequences."""
        share = self.ids_BS.shape[0] // data_degree
        start = data_rank * share
        return [self.rows(first, first + size) for first in range(start, start + share, size)]


def from_ids(ids_BS: Tensor, labels_BS: Tensor) -> Batch:
    """A batch of contiguous sequences from their ids and already shifted labels."""
    positions_BS = torch.arange(ids_BS.shape[1], device=ids_BS.device).expand_as(ids_BS).contiguous()
    return Batch(
        ids_BS=ids_BS,
        labels_BS=labels_BS,
        positions_BS=positions_BS,
        num_label_tokens=int((labels_BS != IGNORE_INDEX).sum()),
    )


def synthetic_batch(shape: ModelShape, workload: Workload, *, step: int, device: torch.device) -> Batch:
    """The global batch of one step, drawn on the CPU from (seed, step) alone.

    Ids follow floor(V * u^4) with u uniform: frequent tokens exist, so a model that learns shows a falling loss within
    a few steps, and a step that updates nothing does not.
    """
    generator = torch.Generator().manual_seed(workload.seed * 1_000_003 + step)
    uniform = torch.rand((workload.sequences, workload.sequence_length + 1), generator=generator, dtype=torch.float64)
    ids = (shape.vocab_size * uniform**4).long().clamp_(max=shape.vocab_size - 1).to(device)
    return from_ids(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
