"""Synthetic training data: one global batch per step, the same whatever the layout, and a rank's share of it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from strategies.shapes import ModelShape
from strategies.spec import Workload

IGNORE_INDEX = -100
"""Label of a position that does not count in the loss, as in torch's cross_entropy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The part of the global batch that one rank sees: some of the sequences, and some positions of each."""

    data_rank: int = 0
    data_degree: int = 1
    positions_S: Tensor | None = None
    """Which positions of a whole sequence the rank holds, in its order; None: all of them."""

    def of(self, whole_BS: Tensor) -> Tensor:
        """The rank's part of a tensor [B, S, ...] over the global batch."""
        rows = self.rows(whole_BS)
        return rows if self.positions_S is None else rows.index_select(1, self.positions_S)

    def rows(self, whole_BS: Tensor) -> Tensor:
        """The rank's sequences, at full length."""
        return whole_BS.chunk(self.data_degree)[self.data_rank]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Sequences with their labels. B = sequences, S = sequence length."""

    ids_BS: Tensor
    """Token ids, int64."""
    labels_BS: Tensor
    """The next token of each position, shifted before any cut, so that no shard needs its neighbour's first token."""
    positions_BS: Tensor
    """Position of each token in its sequence or document, int64."""
    num_label_tokens: int
    """Labels that count in the loss, over the *global* batch: every shard divides its summed loss by this number."""
    documents_BS: Tensor | None = None
    """Which of the documents packed into its sequence a token belongs to, always of whole sequences; None: one each."""

    def micro_batches(self, share: Share, *, size: int) -> list["Batch"]:
        """One rank's share, cut into forwards of `size` sequences; the loss is still normalised by the global batch."""
        ids, labels, positions = (
            share.of(whole_BS).contiguous().split(size) for whole_BS in (self.ids_BS, self.labels_BS, self.positions_BS)
        )
        documents = [None] * len(ids) if self.documents_BS is None else share.rows(self.documents_BS).split(size)
        return [
            Batch(
                ids_BS=ids_BS,
                labels_BS=labels_BS,
                positions_BS=positions_BS,
                num_label_tokens=self.num_label_tokens,
                documents_BS=documents_BS,
            )
            for ids_BS, labels_BS, positions_BS, documents_BS in zip(ids, labels, positions, documents, strict=True)
        ]


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
