"""Causal attention on one rank, and how an attention of ours becomes that of Hugging Face's layers."""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

Attention = Callable[[Tensor, Tensor, Tensor, float, Tensor | None], Tensor]
"""(q [B, H, S, D], k and v [B, K, S, D], scale of the scores, documents) -> output [B, H, S, D]."""


def causal_attention(
    q_BHSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, scale: float, documents_BS: Tensor | None = None
) -> Tensor:
    """Causal attention over whole sequences, by torch's fused kernels; with documents, by a dense mask.

    Args:
        documents_BS: which of the documents packed into a sequence each token belongs to: none sees another's tokens.
    """
    mask = None if documents_BS is None else (documents_BS[:, None, :, None] == documents_BS[:, None, None, :]).tril()
    output_BHSD: Tensor = F.scaled_dot_product_attention(
        q_BHSD, k_BKSD, v_BKSD, mask, is_causal=mask is None, scale=scale, enable_gqa=q_BHSD.shape[1] != k_BKSD.shape[1]
    )
    return output_BHSD


def register(name: str, attention: Attention) -> None:
    """Makes an attention known to transformers, in this process.

    Under a name of its own transformers builds no mask: its mask code costs a device sync per forward in eager mode,
    and a dense 4-D mask (which rules out the flash kernels) when the model is compiled.
    """

    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        scaling: float,
        documents_BS: Tensor | None = None,
        **kwargs: object,
    ) -> tuple[Tensor, None]:
        # A float32 norm has widened queries and keys; not every attention of ours is one that autocast knows.
        output_BHSD = attention(query.to(value.dtype), key.to(value.dtype), value, scaling, documents_BS)
        return output_BHSD.transpose(1, 2).contiguous(), None

    AttentionInterface.register(name, attend)
