"""Attention of queries over one block of keys: an output with its log-sum-exp, and the gradients of a block.

Softmax over a long row is put together from blocks: each block's output is normalised over its own keys only, and the
log-sum-exp of its scores says how much it weighs (Rabe & Staats, "Self-attention Does Not Need O(n^2) Memory", 2021;
Dao, "FlashAttention-2", 2023). The gradient of a block needs the output and the log-sum-exp of the *whole* row.

B = sequences, H = query heads, K = key and value heads, G = H / K, S = queries, T = keys, D = head dim.
"Wide" is float32, or float64 where the inputs are.
"""

import torch
from torch import Tensor

from strategies import gpu_attention

aten = torch.ops.aten


def attend(
    q_BHSD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, *, scale: float, causal: bool, mask_BST: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attention over the keys of one block.

    Args:
        scale: of the scores, before the softmax.
        causal: query i sees the keys 0..i of the block; then S == T. Ignored where there is a mask.
        mask_BST: true where a query sees a key; a query may see none.

    Returns:
        output [B, H, S, D] in the inputs' dtype or wide, 0 where a query sees no key;
        log-sum-exp [B, H, S] of the scores, natural, wide, -inf where a query sees no key.
    """
    if not _has_fused_kernel(q_BHSD, mask_BST):
        return _matmul_forward(q_BHSD, k_BKTD, v_BKTD, scale, _explicit_mask(q_BHSD, k_BKTD, causal, mask_BST))
    if q_BHSD.is_cuda:
        return gpu_attention.forward(q_BHSD, k_BKTD, v_BKTD, scale, causal)
    heads = q_BHSD.shape[1]
    return _cpu_flash_forward(q_BHSD, repeat_heads(k_BKTD, heads), repeat_heads(v_BKTD, heads), scale, causal)


def attend_backward(
    grad_BHSD: Tensor,
    q_BHSD: Tensor,
    k_BKTD: Tensor,
    v_BKTD: Tensor,
    output_BHSD: Tensor,
    log_sum_exp_BHS: Tensor,
    *,
    scale: float,
    causal: bool,
    mask_BST: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """What one block adds to the gradients by its queries, keys and values.

    Args:
        grad_BHSD: gradient by the output of the whole rows.
        output_BHSD: of the whole rows, over all blocks, in the inputs' dtype.
        log_sum_exp_BHS: of the whole rows, over all blocks, wide and finite.
        scale, causal, mask_BST: as in the forward.

    Returns:
        grad_q [B, H, S, D] in the inputs' dtype or wide; grad_k and grad_v [B, K, T, D], the same, summed over the
        query heads of a key head.
    """
    saved = (q_BHSD, k_BKTD, v_BKTD, output_BHSD, log_sum_exp_BHS)
    if not _has_fused_kernel(q_BHSD, mask_BST):
        return _matmul_backward(grad_BHSD, *saved, scale, _explicit_mask(q_BHSD, k_BKTD, causal, mask_BST))
    if q_BHSD.is_cuda:
        return gpu_attention.backward(grad_BHSD, *saved, scale, causal)
    heads, kv_heads = q_BHSD.shape[1], k_BKTD.shape[1]
    grad_q_BHSD, grad_k_BHTD, grad_v_BHTD = _cpu_flash_backward(
        grad_BHSD,
        q_BHSD,
        repeat_heads(k_BKTD, heads),
        repeat_heads(v_BKTD, heads),
        output_BHSD,
        log_sum_exp_BHS,
        scale,
        causal,
    )
    return grad_q_BHSD, sum_repeats(grad_k_BHTD, kv_heads), sum_repeats(grad_v_BHTD, kv_heads)


def repeat_heads(kv_BKTD: Tensor, heads: int) -> Tensor:
    """[B, heads, T, D]: each head heads / K times in a row, as the groups of Ainslie et al., "GQA", 2023, want it."""
    kv_heads = kv_BKTD.shape[1]
    if kv_heads == heads:
        return kv_BKTD
    return kv_BKTD.unsqueeze(2).expand(-1, -1, heads // kv_heads, -1, -1).flatten(1, 2)


def sum_repeats(grad_BHTD: Tensor, kv_heads: int) -> Tensor:
    """[B, kv_heads, T, D]: the gradient by heads that were repeated, summed wide."""
    if grad_BHTD.shape[1] == kv_heads:
        return grad_BHTD
    grad_BKGTD: Tensor = grad_BHTD.unflatten(1, (kv_heads, -1))
    return grad_BKGTD.sum(2, dtype=wide_dtype(grad_BHTD.dtype))


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """In which sums over blocks are kept."""
    return torch.promote_types(dtype, torch.float32)


def _has_fused_kernel(q_BHSD: Tensor, mask_BST: Tensor | None) -> bool:
    """Whether torch has a kernel for this device and dtype that returns the log-sum-exp; none of them takes a mask."""
    if mask_BST is not None:
        return False
    return q_BHSD.device.type == "cpu" or gpu_attention.has_kernel(q_BHSD)


def _cpu_flash_forward(
    q_BHSD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    result: tuple[Tensor, Tensor] = aten._scaled_dot_product_flash_attention_for_cpu(
        q_BHSD, k_BHTD, v_BHTD, 0.0, causal, scale=scale
    )
    return result


def _cpu_flash_backward(
    grad_BHSD: Tensor,
    q_BHSD: Tensor,
    k_BHTD: Tensor,
    v_BHTD: Tensor,
    output_BHSD: Tensor,
    log_sum_exp_BHS: Tensor,
    scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    grads: tuple[Tensor, Tensor, Tensor] = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad_BHSD, q_BHSD, k_BHTD, v_BHTD, output_BHSD, log_sum_exp_BHS, 0.0, causal, scale=scale
    )
    return grads


def _explicit_mask(q_BHSD: Tensor, k_BKTD: Tensor, causal: bool, mask_BST: Tensor | None) -> Tensor | None:
    """[B or 1, S, T], or None where all is seen."""
    if mask_BST is not None or not causal:
        return mask_BST
    return torch.ones((1, q_BHSD.shape[2], k_BKTD.shape[2]), dtype=torch.bool, device=q_BHSD.device).tril()


def _scores(q_BHSD: Tensor, k_BKTD: Tensor, scale: float, mask_BST: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Scores [B, K, G, S, T], -inf where masked, and the queries and keys that they come from, all wide."""
    wide = wide_dtype(q_BHSD.dtype)
    q_BKGSD, k_BK1TD = q_BHSD.to(wide).unflatten(1, (k_BKTD.shape[1], -1)), k_BKTD.to(wide).unsqueeze(2)
    scores_BKGST = q_BKGSD @ k_BK1TD.mT * scale
    if mask_BST is not None:
        scores_BKGST = scores_BKGST.masked_fill(~mask_BST[:, None, None], -torch.inf)
    return scores_BKGST, q_BKGSD, k_BK1TD


def _matmul_forward(
    q_BHSD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, scale: float, mask_BST: Tensor | None
) -> tuple[Tensor, Tensor]:
    scores_BKGST, q_BKGSD, _ = _scores(q_BHSD, k_BKTD, scale, mask_BST)
    log_sum_exp_BKGS = scores_BKGST.logsumexp(-1)
    # A row that sees nothing: exp(-inf - -inf) would be nan, exp(-inf - 0) is the 0 that it weighs.
    finite_BKGS1 = log_sum_exp_BKGS.masked_fill(log_sum_exp_BKGS.isneginf(), 0.0).unsqueeze(-1)
    output_BKGSD = (scores_BKGST - finite_BKGS1).exp() @ v_BKTD.to(q_BKGSD.dtype).unsqueeze(2)
    return output_BKGSD.flatten(1, 2), log_sum_exp_BKGS.flatten(1, 2)


def _matmul_backward(
    grad_BHSD: Tensor,
    q_BHSD: Tensor,
    k_BKTD: Tensor,
    v_BKTD: Tensor,
    output_BHSD: Tensor,
    log_sum_exp_BHS: Tensor,
    scale: float,
    mask_BST: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    scores_BKGST, q_BKGSD, k_BK1TD = _scores(q_BHSD, k_BKTD, scale, mask_BST)
    grouped = (k_BKTD.shape[1], -1)
    wide = q_BKGSD.dtype
    grad_BKGSD = grad_BHSD.to(wide).unflatten(1, grouped)
    probability_BKGST = (scores_BKGST - log_sum_exp_BHS.unflatten(1, grouped).unsqueeze(-1)).exp()
    grad_v_BKTD = (probability_BKGST.mT @ grad_BKGSD).sum(2)
    along_output_BKGS1 = (grad_BKGSD * output_BHSD.to(wide).unflatten(1, grouped)).sum(-1, keepdim=True)
    grad_probability_BKGST = grad_BKGSD @ v_BKTD.to(wide).unsqueeze(2).mT
    grad_scores_BKGST = probability_BKGST * (grad_probability_BKGST - along_output_BKGS1) * scale
    grad_q_BKGSD = grad_scores_BKGST @ k_BK1TD
    return grad_q_BKGSD.flatten(1, 2), (grad_scores_BKGST.mT @ q_BKGSD).sum(2), grad_v_BKTD
