"""Embedding, head and loss over a vocabulary that is cut over the ranks: no rank ever holds a whole row of logits.

Shoeybi et al., "Megatron-LM", 2019, section 3: each rank looks up the ids of its own slice, and of the logits only
their log-sum-exp and the target's are exchanged.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from strategies import loss
from strategies.batch import IGNORE_INDEX, Batch
from strategies.loss import Head
from strategies.norm import to_compute_dtype
from strategies.spec import LossKind


class VocabularyParallelEmbedding(nn.Module):
    """The rows of a slice of the vocabulary. Its gradient is cut as its weight is; torch's own style makes it whole."""

    def __init__(self, weight_VH: Tensor, tp_mesh: DeviceMesh, outer: Placement) -> None:
        """Cuts the whole weight, equal on all ranks. `outer`: how the hidden states are placed that come out."""
        super().__init__()
        self.weight = nn.Parameter(distribute_tensor(weight_VH.detach(), tp_mesh, [Shard(0)], src_data_rank=None))
        self.tp_mesh = tp_mesh
        self.outer = outer

    def forward(self, ids_BS: Tensor) -> Tensor:
        """Ids [B, S] -> hidden states [B, S, H], or of this rank's positions."""
        weight_WH = _local(self.weight)
        row_BS, mine_BS = _rows(ids_BS, weight_WH.shape[0], self.tp_mesh)
        hidden_BSH = F.embedding(row_BS, weight_WH).masked_fill(~mine_BS.unsqueeze(-1), 0.0)
        # The other ranks add zeros: rounded before the sum it is the same sum, and half as large.
        partial = DTensor.from_local(to_compute_dtype(hidden_BSH), self.tp_mesh, [Partial()], run_check=False)
        return partial.redistribute(placements=[self.outer]).to_local()


@dataclass(slots=True, kw_only=True)
class VocabularyParallelHead(Head):
    """Every rank of `tp_mesh` computes the same loss, from its own slice of the vocabulary."""

    tp_mesh: DeviceMesh
    outer: Placement
    """How the hidden states are placed that come in."""

    def loss_share(self, hidden_BSH: Tensor, lm_head: nn.Module, batch: Batch) -> Tensor:
        """The batch's share of the global mean loss, a scalar, equal on all ranks.

        The gradients are computed with the loss, chunk by chunk as in `loss.chunked_loss_share`, for the whole loss
        (`LossKind.FULL`) in one chunk.
        """
        hidden_BSH = to_compute_dtype(hidden_BSH)
        entering = DTensor.from_local(hidden_BSH, self.tp_mesh, [self.outer], run_check=False)
        # Each rank's slice of the vocabulary adds to the gradient: the sum is made on the way back.
        whole_BSH = entering.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
        settings = _Settings(
            tp_mesh=self.tp_mesh,
            scale=1.0 / max(batch.num_label_tokens, 1),
            chunk_tokens=loss.CHUNK_TOKENS if self.kind is LossKind.CHUNKED else batch.labels_BS.numel(),
            compiled=self.compiled,
        )
        hidden_TH, weight_WH = whole_BSH.flatten(0, 1), _local(cast("Tensor", lm_head.weight))
        total, grad_hidden_TH, grad_weight_WH = _share_and_gradients(
            hidden_TH, weight_WH, batch.labels_BS.flatten(), settings
        )
        return loss.known(total, (hidden_TH, grad_hidden_TH), (weight_WH, grad_weight_WH))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Settings:
    tp_mesh: DeviceMesh
    scale: float
    chunk_tokens: int
    compiled: bool


@torch.no_grad()
def _share_and_gradients(
    hidden_TH: Tensor, weight_WH: Tensor, labels_T: Tensor, settings: _Settings
) -> tuple[Tensor, Tensor, Tensor]:
    """T = tokens, H = hidden size, W = this rank's part of the vocabulary."""
    wide = torch.promote_types(hidden_TH.dtype, torch.float32)
    partials, finish = _compiled_parts() if settings.compiled else (_partials, _finish)
    with torch.autocast(hidden_TH.device.type, enabled=False):
        low_WH = weight_WH.to(hidden_TH.dtype)
        total = torch.zeros((), dtype=wide, device=hidden_TH.device)
        grad_hidden_TH = torch.empty_like(hidden_TH)
        grad_weight_WH = torch.zeros_like(weight_WH, dtype=wide)
        for first in range(0, hidden_TH.shape[0], settings.chunk_tokens):
            rows = slice(first, first + settings.chunk_tokens)
            low_TH, labels_C = hidden_TH[rows], labels_T[rows]
            logits_TW = low_TH @ low_WH.T
            row_T, mine_T = _rows(labels_C, weight_WH.shape[0], settings.tp_mesh)
            parts_2T = _gather(partials(logits_TW, row_T, mine_T), settings.tp_mesh)
            share, grad_TW = finish(logits_TW, row_T, mine_T, labels_C, parts_2T, settings.scale)
            total += share
            grad_hidden_TH[rows] = grad_TW @ low_WH
            grad_weight_WH += grad_TW.T @ low_TH
    return total, grad_hidden_TH, grad_weight_WH


def _partials(logits_TW: Tensor, row_T: Tensor, mine_T: Tensor) -> Tensor:
    """[2, T]: this rank's log-sum-exp, and the target's logit or 0 where another rank has it."""
    wide_TW = logits_TW.to(torch.promote_types(logits_TW.dtype, torch.float32))
    target_T = wide_TW.gather(1, row_T.unsqueeze(1)).squeeze(1)
    return torch.stack([wide_TW.logsumexp(1), target_T.masked_fill(~mine_T, 0.0)])


def _finish(
    logits_TW: Tensor, row_T: Tensor, mine_T: Tensor, labels_T: Tensor, parts_R2T: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Loss of a chunk and its gradient by this rank's logits, in their dtype, both times `scale`. R = ranks."""
    wide_TW = logits_TW.to(parts_R2T.dtype)
    scale_T = (labels_T != IGNORE_INDEX).to(wide_TW.dtype) * scale
    log_sum_T = parts_R2T[:, 0].logsumexp(0)
    log_probability_T = parts_R2T[:, 1].sum(0) - log_sum_T
    grad_TW = ((wide_TW - log_sum_T.unsqueeze(1)).exp() * scale_T.unsqueeze(1)).to(logits_TW.dtype)
    at_target_T = ((log_probability_T.exp() - 1) * scale_T).to(logits_TW.dtype)
    row_T1 = row_T.unsqueeze(1)
    at_target_T1 = torch.where(mine_T.unsqueeze(1), at_target_T.unsqueeze(1), grad_TW.gather(1, row_T1))
    return -(log_probability_T * scale_T).sum(), grad_TW.scatter(1, row_T1, at_target_T1)


@functools.cache
def _compiled_parts() -> tuple[Callable[..., Tensor], Callable[..., tuple[Tensor, Tensor]]]:
    """Made on demand: torch.compile imports the whole compiler."""
    return torch.compile(_partials, dynamic=False), torch.compile(_finish, dynamic=False)


def _rows(ids: Tensor, num_rows: int, tp_mesh: DeviceMesh) -> tuple[Tensor, Tensor]:
    """Row of each id in this rank's slice, 0 where it is none of its own, and whether it is."""
    row = ids - tp_mesh.get_local_rank() * num_rows
    mine = (row >= 0) & (row < num_rows)
    return row.masked_fill(~mine, 0), mine


def _gather(parts_2T: Tensor, tp_mesh: DeviceMesh) -> Tensor:
    """[2, T] of every rank -> [ranks, 2, T]."""
    parts = DTensor.from_local(parts_2T, tp_mesh, [Shard(0)], run_check=False)
    return parts.full_tensor().view(tp_mesh.size(), *parts_2T.shape)


def _local(parameter: Tensor) -> Tensor:
    assert isinstance(parameter, DTensor)
    return parameter.to_local()
