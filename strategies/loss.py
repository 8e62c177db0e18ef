"""The loss: each batch's share of the global mean cross-entropy, whole or in chunks that never hold all logits."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from strategies.batch import IGNORE_INDEX, Batch
from strategies.spec import LossKind

CHUNK_TOKENS = 4096
"""Tokens whose logits exist at one time: 4096 x 151,936 bfloat16 logits are 1.2 GiB, those of a whole batch 9.3 GiB."""


@dataclass(slots=True, kw_only=True)
class Head:
    """From the last hidden states to the loss. Strategies that cut the vocabulary bring their own."""

    kind: LossKind
    compiled: bool = False
    """Fuse the elementwise part of a chunk by torch.compile."""

    def loss_share(self, hidden_BSH: Tensor, lm_head: nn.Module, batch: Batch) -> Tensor:
        """The batch's share of the global mean loss, a scalar."""
        if self.kind is LossKind.CHUNKED:
            return chunked_loss_share(hidden_BSH, cast("Tensor", lm_head.weight), batch, compiled=self.compiled)
        return loss_share(lm_head(hidden_BSH), batch)


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
    total, grad_hidden_TH, grad_weight_VH = _share_and_gradients(
        hidden_BSH.flatten(0, 1), weight_VH, batch.labels_BS.flatten(), scale, dtype, chunk
    )
    return known(total, (hidden_BSH, grad_hidden_TH.view_as(hidden_BSH)), (weight_VH, grad_weight_VH))


def known(value: Tensor, *pairs: tuple[Tensor, Tensor]) -> Tensor:
    """A scalar that autograd takes for a function of tensors, given each with the gradient by it.

    One node in autograd's graph for each and a sum, not one node with several inputs: a zero-bubble pipeline asks for
    their gradients at different times, which torch 2.11 cannot do from within a Python function.
    """
    total = value
    for tensor, gradient in pairs:
        part: Tensor = _Known.apply(tensor, torch.zeros_like(value), gradient)
        total = total + part
    return total


@torch.no_grad()
def _share_and_gradients(
    hidden_TH: Tensor, weight_VH: Tensor, labels_T: Tensor, scale: float, dtype: torch.dtype, chunk: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """T = tokens, H = hidden size, V = vocabulary."""
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
    return total, grad_hidden_TH, grad_weight_VH


class _Known(torch.autograd.Function):
    """A scalar whose gradient by `tensor` is known already."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, value: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        ctx.dtype = tensor.dtype
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return (gradient * grad).to(ctx.dtype), None, None


def _chunk(logits_TV: Tensor, labels_T: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Loss of a chunk and its gradient by the logits, in their dtype, both times `scale`; ignored labels count 0."""
    wide_TV = logits_TV.to(torch.promote_types(logits_TV.dtype, torch.float32))
    target_T1 = labels_T.clamp(min=0).unsqueeze(1)
    log_sum_T1 = wide_TV.logsumexp(1, keepdim=True)
    log_probability_T1 = wide_TV.gather(1, target_T1) - log_sum_T1
    # A truth value times a number would be rounded to float32.
    scale_T1 = (labels_T != IGNORE_INDEX).to(wide_TV.dtype).unsqueeze(1) * scale
    grad_TV = ((wide_TV - log_sum_T1).exp() * scale_T1).to(logits_TV.dtype)
    at_target_T1 = ((log_probability_T1.exp() - 1) * scale_T1).to(logits_TV.dtype)
    return -(log_probability_T1 * scale_T1).sum(), grad_TV.scatter(1, target_T1, at_target_T1)


@functools.cache
def _compiled_chunk() -> Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor]]:
    """Made on demand: torch.compile imports the whole compiler."""
    return torch.compile(_chunk, dynamic=False)
