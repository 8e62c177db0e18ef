"""A block of attention on a GPU, with its log-sum-exp, by the fused kernels that torch itself would take.

That of cuDNN where torch prefers it (Hopper and newer), FlashAttention-2 elsewhere (Dao, 2023). Both take fewer key
heads than query heads and sum the gradients of shared ones. In both the log-sum-exp is natural, and the backward works
with the output and log-sum-exp that it is given: those of whole rows give a block's part of the gradient.

B = sequences, H = query heads, K = key heads, S = queries, T = keys, D = head dim.
"""

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

_MAX_HEAD_DIM = 256
_DTYPES = (torch.bfloat16, torch.float16)
_TILE = 128
"""Of lengths that no tile fills, NaN gradients of cuDNN 9 are reported where scores are very negative (pytorch issue
196678); not seen here, where such lengths take the other kernel."""

aten = torch.ops.aten


def has_kernel(q_BHSD: Tensor) -> bool:
    """Whether the kernels take this dtype and head dim."""
    head_dim = q_BHSD.shape[-1]
    return q_BHSD.is_cuda and q_BHSD.dtype in _DTYPES and head_dim % 8 == 0 and head_dim <= _MAX_HEAD_DIM


def forward(q_BHSD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """As `block_attention.attend` without a mask: output in the inputs' dtype, log-sum-exp [B, H, S] in float32."""
    kernel = cudnn_forward if _prefers_cudnn(q_BHSD, k_BKTD, scale, causal) else flash_forward
    return kernel(q_BHSD, k_BKTD, v_BKTD, scale, causal)


def backward(
    grad_BHSD: Tensor,
    q_BHSD: Tensor,
    k_BKTD: Tensor,
    v_BKTD: Tensor,
    output_BHSD: Tensor,
    log_sum_exp_BHS: Tensor,
    scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `block_attention.attend_backward` without a mask, gradients in the inputs' dtype."""
    kernel = cudnn_backward if _prefers_cudnn(q_BHSD, k_BKTD, scale, causal) else flash_backward
    # Both read the log-sum-exp as dense, unchecked; of a part of the rows it is not.
    dense_BHS = log_sum_exp_BHS.contiguous()
    return kernel(grad_BHSD, q_BHSD, k_BKTD, v_BKTD, output_BHSD, dense_BHS, scale, causal)


def _prefers_cudnn(q_BHSD: Tensor, k_BKTD: Tensor, scale: float, causal: bool) -> bool:
    """Whether torch would take cuDNN's kernel for unsharded attention of these shapes, and it is safe for a block."""
    if q_BHSD.shape[2] % _TILE or k_BKTD.shape[2] % _TILE or torch.are_deterministic_algorithms_enabled():
        return False
    grouped = q_BHSD.shape[1] != k_BKTD.shape[1]
    choice: int = torch._fused_sdp_choice(q_BHSD, k_BKTD, k_BKTD, None, 0.0, causal, scale=scale, enable_gqa=grouped)
    return choice == SDPBackend.CUDNN_ATTENTION.value


def flash_forward(q_BHSD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """By FlashAttention-2."""
    output_BHSD, log_sum_exp_BHS, *_ = aten._scaled_dot_product_flash_attention.default(
        q_BHSD, k_BKTD, v_BKTD, 0.0, causal, scale=scale
    )
    return output_BHSD, log_sum_exp_BHS


def flash_backward(
    grad_BHSD: Tensor,
    q_BHSD: Tensor,
    k_BKTD: Tensor,
    v_BKTD: Tensor,
    output_BHSD: Tensor,
    log_sum_exp_BHS: Tensor,
    scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """By FlashAttention-2."""
    # Sequences of one length need no offsets, and without dropout the random state is passed but never read.
    offsets = (None, None)
    random_state = (q_BHSD.new_empty(2, dtype=torch.uint64), q_BHSD.new_empty((), dtype=torch.uint64))
    grads: tuple[Tensor, Tensor, Tensor] = aten._scaled_dot_product_flash_attention_backward.default(
        grad_BHSD,
        q_BHSD,
        k_BKTD,
        v_BKTD,
        output_BHSD,
        log_sum_exp_BHS,
        *offsets,
        q_BHSD.shape[2],
        k_BKTD.shape[2],
        0.0,
        causal,
        *random_state,
        scale=scale,
    )
    return grads


def cudnn_forward(q_BHSD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """By cuDNN."""
    output_BHSD, log_sum_exp_BHS1, *_ = aten._scaled_dot_product_cudnn_attention.default(
        q_BHSD.contiguous(), k_BKTD.contiguous(), v_BKTD.contiguous(), None, True, 0.0, causal, False, scale=scale
    )
    return output_BHSD, log_sum_exp_BHS1.view(q_BHSD.shape[:3])


def cudnn_backward(
    grad_BHSD: Tensor,
    q_BHSD: Tensor,
    k_BKTD: Tensor,
    v_BKTD: Tensor,
    output_BHSD: Tensor,
    log_sum_exp_BHS: Tensor,
    scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """By cuDNN."""
    unused = torch.empty((), dtype=torch.int64, device=q_BHSD.device)
    # torch keeps its plans by the strides of q, k and v alone, and each has those of all others in it: one layout for
    # all, or a later call computes with the strides of an earlier one (pytorch issue 191576).
    dense = [tensor.contiguous() for tensor in (grad_BHSD, q_BHSD, k_BKTD, v_BKTD, output_BHSD)]
    grads: tuple[Tensor, Tensor, Tensor] = aten._scaled_dot_product_cudnn_attention_backward.default(
        *dense,
        log_sum_exp_BHS.unsqueeze(-1),
        unused,
        unused,
        None,
        None,
        None,
        q_BHSD.shape[2],
        k_BKTD.shape[2],
        0.0,
        causal,
        scale=scale,
    )
    return grads
