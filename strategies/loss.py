"""The loss: each batch's share of the global mean cross-entropy, whole or in chunks that never hold all logits."""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from strategies.batch import IGNORE_INDEX, Batch

CHUNK_TOKENS = 4096
"""Tokens whose logits exist at one time: 4096 x 151,936 bfloat16 logits are 1.2 GiB, those of a whole batch 9.3 GiB."""


def loss_share(logits_BSV: Tensor, batch: Batch) -> Tensor:
    """This batch's share of the global mean loss, in nats: sum of cross-entropies / label tokens of the global batch.

    Shares of ranks and micro-batches add up to the mean over all label tokens, however unevenly those are spread.
    Computed in float32 at least.
    """
    logits = logits_BSV.to(torch.promote_types(logits_BSV.dtype, torch.float32))
    total = F.cross_entropy(logits.flatten(0, 1), batch.labels_BS.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")
    return total / max(batch.num_label_tokens, 1)


def chunked_loss_share(hidden_BSH: Tensor, weight_VH: Tensor, batch: Batch, *, compiled: bool) -> Tensor:
    """As `loss_share` of the logits hidden @ weight^T, without ever holding more than a chunk of them.

    The gradients are computed with the loss, chunk by chunk, as in Hsu et al., "Liger Kernel: Efficient Triton Kernels
    for LLM Training", 2024, section 3.2; no product is computed twice.

    Args:
        compiled: fuse the elementwise part of a chunk by torch.compile.
    """
    chunk = _compiled_chunk() if compiled else _chunk
    dtype = hidden_BSH.dtype
    if torch.is_autocast_enabled(hidden_BSH.device.type):
        dtype = torch.get_autocast_dtype(hidden_BSH.device.type)
    scale = 1.0 / max(batch.num_label_tokens, 1)
    share: Tensor = _ChunkedLoss.apply(
        hidden_BSH.flatten(0, 1), weight_VH, batch.labels_BS.flatten(), scale, dtype, chunk
    )
    return share


class _ChunkedLoss(torch.autograd.Function):
    """T = tokens, H = hidden size, V = vocabulary."""

    @staticmethod
    def forward(
        ctx: Any, hidden_TH: Tensor, weight_VH: Tensor, labels_T: Tensor, scale: float, dtype: torch.dtype, chunk: Any
    ) -> Tensor:
        wide = torch.promote_types(dtype, torch.float32)
        with torch.autocast(hidden_TH.device.type, enabled=False):
            low_VH = weight_VH.to(dtype)
            total = torch.zeros((), dtype=wide, device=hidden_TH.device)
            grad_hidden_TH = torch.empty_like(hidden_TH)
            grad_weight_VH = torch.zeros_like(weight_VH, dtype=wide)
            for first in range(0, hidden_TH.shape[0], CHUNK_TOKENS):
                rows = slice(first, first + CHUNK_TOKENS)
                low_TH = hidden_TH[rows].to(dtype)
                share, grad_TV = chunk(low_TH @ low_VH.T, labels_T[rows], scale)
                total += share
                grad_hidden_TH[rows] = grad_TV @ low_VH
                grad_weight_VH += grad_TV.T @ low_TH
        ctx.save_for_backward(grad_hidden_TH, grad_weight_VH)
        ctx.weight_dtype = weight_VH.dtype
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden_TH, grad_weight_VH = ctx.saved_tensors
        return grad_hidden_TH * grad, (grad_weight_VH * grad).to(ctx.weight_dtype), None, None, None, None


def _chunk(logits_TV: Tensor, labels_T: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Loss of a chunk and its gradient by the logits, in their dtype, both times `scale`; ignored labels count 0."""
    wide_TV = logits_TV.to(torch.promote_types(logits_TV.dtype, torch.float32))
    counts_T = labels_T != IGNORE_INDEX
    target_T1 = labels_T.clamp(min=0).unsqueeze(1)
    log_sum_T1 = wide_TV.logsumexp(1, keepdim=True)
    log_probability_T1 = wide_TV.gather(1, target_T1) - log_sum_T1
    scale_T1 = (counts_T * scale).to(wide_TV.dtype).unsqueeze(1)
    grad_TV = ((wide_TV - log_sum_T1).exp() * scale_T1).to(logits_TV.dtype)
    at_target_T1 = ((log_probability_T1.exp() - 1) * scale_T1).to(logits_TV.dtype)
    return -(log_probability_T1 * scale_T1).sum(), grad_TV.scatter(1, target_T1, at_target_T1)


@functools.cache
def _compiled_chunk() -> Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor]]:
    """Made on demand: torch.compile imports the whole compiler."""
    return torch.compile(_chunk, dynamic=False)
