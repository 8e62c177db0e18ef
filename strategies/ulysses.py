"""Ulysses: all-to-alls exchange the cut over positions for one over heads, and attention sees whole sequences.

Jacobs et al., "DeepSpeed Ulysses: System Optimizations for Enabling Training of Extreme Long Sequence Transformer
Models", 2023. With a ring instead of whole sequences: Fang & Zhao, "USP: A Unified Sequence Parallelism Approach for
Long Context Generative AI", 2024.

B = sequences, H = query heads, K = key and value heads, S = positions of this rank, U = ranks of the Ulysses group,
T = U * S, D = head dim.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from strategies.attention import causal_attention
from strategies.block_attention import repeat_heads
from strategies.ring_attention import ring_attention

OfHeads = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(q [B, h, T, D], k [B, j, T, D], v [B, j, T, D]) -> [B, h, T, D]"""


def ulysses_attention(
    q_BHSD: Tensor,
    k_BKSD: Tensor,
    v_BKSD: Tensor,
    group: ProcessGroup,
    scale: float,
    documents_BS: Tensor | None = None,
) -> Tensor:
    """Causal attention over sequences of which each rank of `group` holds its `contiguous_index`.

    One all-to-all takes queries, keys and values together, another one the outputs back. Both can be compiled.

    Args:
        q_BHSD: this rank's queries, in the dtype to compute in, as are keys and values; H a multiple of K.
        group: in the order of the pieces; every rank of it must call this, and its backward, in the same order.
        scale: of the scores, before the softmax.
        documents_BS: int ids [B, T] of packed documents of the whole sequence, the same on every rank: no query then
            sees another document. That path holds a dense mask.

    Returns:
        [B, H, S, D] in the dtype of the queries; in memory [B, S, H, D].

    Raises:
        ValueError: U does not divide the heads (`check_heads`).
    """

    def attention(q_BhTD: Tensor, k_BjTD: Tensor, v_BjTD: Tensor) -> Tensor:
        return causal_attention(q_BhTD, k_BjTD, v_BjTD, scale, documents_BS)

    return _over_heads(q_BHSD, k_BKSD, v_BKSD, group, attention)


def usp_attention(
    q_BHSD: Tensor,
    k_BKSD: Tensor,
    v_BKSD: Tensor,
    ring_group: ProcessGroup,
    ulysses_group: ProcessGroup,
    scale: float,
    documents_BS: Tensor | None = None,
) -> Tensor:
    """Causal attention over sequences of which each rank of a ring x Ulysses mesh holds its `usp_index`.

    Ulysses outside, `ring_attention` inside: a compiled caller breaks its graph at the ring.

    Args:
        ring_group: the ranks with this one's place in their Ulysses groups.
        ulysses_group: the ranks that share one zigzag share. Other arguments as of the two attentions.

    Returns:
        [B, H, S, D] in the dtype of the queries; in memory [B, S, H, D].

    Raises:
        ValueError: as the two attentions do.
    """

    def attention(q_BhTD: Tensor, k_BjTD: Tensor, v_BjTD: Tensor) -> Tensor:
        return ring_attention(q_BhTD, k_BjTD, v_BjTD, ring_group, scale, documents_BS)

    return _over_heads(q_BHSD, k_BKSD, v_BKSD, ulysses_group, attention)


def check_heads(heads: int, kv_heads: int, degree: int) -> None:
    """Raises ValueError unless every rank can have as many query heads, and all the key heads that they attend to."""
    if heads % degree or (kv_heads % degree and degree % kv_heads):
        raise ValueError(
            f"Ulysses over {degree} ranks needs query heads divisible by {degree} (there are {heads}), and key heads "
            f"that are a multiple or a divisor of {degree} (there are {kv_heads})"
        )


def _over_heads(q_BHSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, group: ProcessGroup, attention: OfHeads) -> Tensor:
    degree, heads, kv_heads = group.size(), q_BHSD.shape[1], k_BKSD.shape[1]
    check_heads(heads, kv_heads, degree)
    copies = max(kv_heads, degree)
    parts = (q_BHSD, repeat_heads(k_BKSD, copies), repeat_heads(v_BKSD, copies))
    # Piece u is what rank u gets. With positions before sequences the pieces of all ranks line up to [T, B, n, D] as
    # they arrive, and nothing has to be copied into place.
    pieces_USBnD = torch.cat([part.unflatten(1, (degree, -1)).permute(1, 3, 0, 2, 4) for part in parts], dim=3)
    arrived_TBnD = _exchange(pieces_USBnD, group).flatten(0, 1)
    # Split before the permutation: so the gradients are put together in the order in which they are sent.
    parts_TBnD = arrived_TBnD.split([heads // degree, copies // degree, copies // degree], dim=2)
    output_TBhD = attention(*(part_TBnD.permute(1, 2, 0, 3) for part_TBnD in parts_TBnD)).permute(2, 0, 1, 3)
    output_USBhD = _exchange(output_TBhD.unflatten(0, (degree, -1)), group)
    return output_USBhD.permute(2, 1, 0, 3, 4).flatten(2, 3).transpose(1, 2)


def _exchange(pieces: Tensor, group: ProcessGroup) -> Tensor:
    """Sends piece u of dim 0 to rank u; returns what came from each rank, contiguous. Autograd follows."""
    exchanged: Tensor = _Exchange.apply(pieces, group.size(), group.group_name)
    return exchanged


class _Exchange(torch.autograd.Function):
    """The gradient of a piece comes from the rank that the piece went to: the exchange is its own transpose."""

    @staticmethod
    def forward(ctx: Any, pieces: Tensor, degree: int, group_name: str) -> Tensor:
        ctx.degree, ctx.group_name = degree, group_name
        return _all_to_all(pieces, degree, group_name)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _all_to_all(grad, ctx.degree, ctx.group_name), None, None


def _all_to_all(pieces: Tensor, degree: int, group_name: str) -> Tensor:
    # The functional ops as they are: their Python wrappers differ between torch versions, and return a lazy subclass.
    sizes = [1] * degree
    started = torch.ops._c10d_functional.all_to_all_single(pieces.contiguous(), sizes, sizes, group_name)
    exchanged: Tensor = torch.ops._c10d_functional.wait_tensor(started)
    return exchanged
