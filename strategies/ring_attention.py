"""Ring attention: every rank keeps its queries, and the keys and values travel round the ranks.

Liu et al., "Ring Attention with Blockwise Transformers for Near-Infinite Context", 2023, over the zigzag cut of
`context_index`, under which a causal mask leaves every rank the same work in every round.

B = sequences, H = query heads, K = key and value heads, S = positions of this rank, D = head dim, 2 = keys and values.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from strategies.block_attention import attend, attend_backward, wide_dtype
from strategies.context_index import zigzag_index

Function = TypeVar("Function", bound=Callable[..., Tensor])


def _outside_of_graphs(function: Function) -> Function:
    """Left alone by torch.compile as a whole: the graphs of all compiled callers break at the call."""
    return cast(
        "Function",
        torch.compiler.disable(function, reason="the transfers of a round are objects that a graph cannot hold"),
    )


@_outside_of_graphs
def ring_attention(
    q_BHSD: Tensor,
    k_BKSD: Tensor,
    v_BKSD: Tensor,
    group: ProcessGroup,
    scale: float,
    documents_BS: Tensor | None = None,
) -> Tensor:
    """Causal attention over sequences of which each rank of `group` holds its `zigzag_index`.

    A round computes with one block while the next is on its way. The backward sends keys and values round again, and
    their gradients with them, summed in float32 at least. torch.compile leaves all of it alone: compiled callers
    break their graphs here.

    Args:
        q_BHSD: this rank's queries, in the dtype to compute in; H a multiple of K.
        group: the ring, in ring order; every rank of it must call this, and its backward, in the same order.
        scale: of the scores, before the softmax.
        documents_BS: int ids [B, S * ranks] of packed documents in natural order, the same on every rank: no query
            then sees another document. That path holds the scores of a block and is slow.

    Returns:
        [B, H, S, D] in the dtype of the queries.

    Raises:
        ValueError: S is odd, or `documents_BS` is not as long as the sequence.
    """
    length = q_BHSD.shape[2]
    sequence_length = length * dist.get_world_size(group)
    if length % 2:
        raise ValueError(f"each rank of a ring holds two chunks of equal length, not {length} positions in all")
    if documents_BS is not None and documents_BS.shape[1] != sequence_length:
        raise ValueError(f"documents of {documents_BS.shape[1]} positions for a sequence of {sequence_length}")
    output_BHSD: Tensor = _RingAttention.apply(q_BHSD, k_BKSD, v_BKSD, documents_BS, group, scale)
    return output_BHSD


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_BHSD: Tensor,
        k_BKSD: Tensor,
        v_BKSD: Tensor,
        documents_BS: Tensor | None,
        group: ProcessGroup,
        scale: float,
    ) -> Tensor:
        rank, degree = dist.get_rank(group), dist.get_world_size(group)
        own_2BKSD = kv_2BKSD = torch.stack((k_BKSD, v_BKSD))
        wide = wide_dtype(q_BHSD.dtype)
        for turn in range(degree):
            transfer = pass_on([kv_2BKSD] if turn < degree - 1 else [], group)
            block = visible_block(rank, (rank - turn) % degree, q_BHSD.shape[2])
            k_BKTD, v_BKTD = kv_2BKSD[:, :, :, block.keys]
            mask_BST = None if documents_BS is None else document_mask(documents_BS, block, degree)
            block_output, block_log_sum_exp = attend(
                q_BHSD[:, :, block.queries], k_BKTD, v_BKTD, scale=scale, causal=block.is_own, mask_BST=mask_BST
            )
            if turn == 0:
                output_BHSD, log_sum_exp_BHS = block_output.to(wide), block_log_sum_exp.to(wide).contiguous()
            else:
                merge(
                    output_BHSD[:, :, block.queries],
                    log_sum_exp_BHS[:, :, block.queries],
                    block_output,
                    block_log_sum_exp,
                )
            kv_2BKSD = next(iter(transfer.wait()), kv_2BKSD)
        output_BHSD = output_BHSD.to(q_BHSD.dtype)
        ctx.save_for_backward(q_BHSD, own_2BKSD, output_BHSD, log_sum_exp_BHS, documents_BS)
        ctx.group, ctx.scale = group, scale
        return output_BHSD

    @staticmethod
    def backward(ctx: Any, grad_BHSD: Tensor) -> tuple[Tensor | None, ...]:
        q_BHSD, kv_2BKSD, output_BHSD, log_sum_exp_BHS, documents_BS = ctx.saved_tensors
        rank, degree = dist.get_rank(ctx.group), dist.get_world_size(ctx.group)
        wide = wide_dtype(q_BHSD.dtype)
        grad_q_BHSD = torch.zeros_like(q_BHSD, dtype=wide)
        grad_kv_2BKSD = torch.zeros_like(kv_2BKSD, dtype=wide)
        for turn in range(degree):
            # The gradient follows its block one turn later: what this rank added in the last turn leaves in this one.
            leaving = ([kv_2BKSD] if turn < degree - 1 else []) + ([grad_kv_2BKSD] if turn > 0 else [])
            transfer = pass_on(leaving, ctx.group)
            block = visible_block(rank, (rank - turn) % degree, q_BHSD.shape[2])
            k_BKTD, v_BKTD = kv_2BKSD[:, :, :, block.keys]
            grad_q, grad_k, grad_v = attend_backward(
                grad_BHSD[:, :, block.queries],
                q_BHSD[:, :, block.queries],
                k_BKTD,
                v_BKTD,
                output_BHSD[:, :, block.queries],
                log_sum_exp_BHS[:, :, block.queries],
                scale=ctx.scale,
                causal=block.is_own,
                mask_BST=None if documents_BS is None else document_mask(documents_BS, block, degree),
            )
            grad_q_BHSD[:, :, block.queries] += grad_q
            arrived = transfer.wait()
            if turn < degree - 1:
                kv_2BKSD = arrived.pop(0)
            if turn > 0:
                grad_kv_2BKSD = arrived.pop(0)
            grad_kv_2BKSD[0, :, :, block.keys] += grad_k
            grad_kv_2BKSD[1, :, :, block.keys] += grad_v
        if degree > 1:
            (grad_kv_2BKSD,) = pass_on([grad_kv_2BKSD], ctx.group).wait()
        grad_k_BKSD, grad_v_BKSD = grad_kv_2BKSD.to(kv_2BKSD.dtype)
        return grad_q_BHSD.to(q_BHSD.dtype), grad_k_BKSD, grad_v_BKSD, None, None, None


@dataclass(frozen=True, slots=True)
class Block:
    """The part of a rank's queries that sees a part of another rank's keys, as slices of their positions."""

    rank: int
    source: int
    """Whose keys they are."""
    queries: slice
    keys: slice

    @property
    def is_own(self) -> bool:
        """Whether it needs a causal mask: in all other blocks every query sees every key."""
        return self.rank == self.source


def visible_block(rank: int, source: int, length: int) -> Block:
    """What `rank` sees of the keys of `source` under the zigzag cut of `length` positions a rank.

    A rank's first chunk comes before those of later ranks, its second one after all first chunks and after the second
    ones of later ranks.
    """
    whole, first, second = slice(0, length), slice(0, length // 2), slice(length // 2, length)
    if source == rank:
        return Block(rank, source, whole, whole)
    if source < rank:
        return Block(rank, source, whole, first)
    return Block(rank, source, second, whole)


def document_mask(documents_BS: Tensor, block: Block, degree: int) -> Tensor:
    """[B, queries, keys]: true where a query of the block sees a key, by position and document."""
    length, device = documents_BS.shape[1], documents_BS.device
    queries = zigzag_index(length, degree, block.rank)[block.queries].to(device)
    keys = zigzag_index(length, degree, block.source)[block.keys].to(device)
    same_BST = documents_BS[:, queries].unsqueeze(2) == documents_BS[:, keys].unsqueeze(1)
    return same_BST & (keys <= queries.unsqueeze(1))


def merge(output_BHSD: Tensor, log_sum_exp_BHS: Tensor, block_output: Tensor, block_log_sum_exp: Tensor) -> None:
    """Puts the attention over one more block of keys to that over earlier ones, in place and in their dtype.

    Outputs are averaged by the sums of exponentials of their scores: out = sum_i exp(lse_i) out_i / sum_i exp(lse_i).
    Only the difference of two log-sum-exps is exponentiated, so large scores do not overflow; a block of which a row
    sees nothing (-inf) weighs nothing. `log_sum_exp_BHS` must be finite: each query sees itself in the first block.
    """
    weight_BHS1 = torch.sigmoid(block_log_sum_exp - log_sum_exp_BHS).unsqueeze(-1)
    output_BHSD.lerp_(block_output.to(output_BHSD.dtype), weight_BHS1)
    torch.logaddexp(log_sum_exp_BHS, block_log_sum_exp, out=log_sum_exp_BHS)


@dataclass(frozen=True, slots=True)
class Transfer:
    """Tensors on their way to the next rank, and those that come from the previous one."""

    leaving: list[Tensor]
    """Kept alive, and not to be written, until they have left."""
    arriving: list[Tensor]
    works: list[dist.Work]

    def wait(self) -> list[Tensor]:
        """What has arrived, in the order in which it was sent; for a GPU, in stream order."""
        for work in self.works:
            work.wait()
        return self.arriving


def pass_on(tensors: list[Tensor], group: ProcessGroup) -> Transfer:
    """Begins to send contiguous tensors to the next rank of the ring, and to receive as many from the previous one."""
    arriving = [torch.empty_like(tensor) for tensor in tensors]
    if not tensors:
        return Transfer(tensors, arriving, [])
    rank, degree = dist.get_rank(group), dist.get_world_size(group)
    following, previous = (rank + 1) % degree, (rank - 1) % degree
    sends = [dist.P2POp(dist.isend, tensor, group=group, group_peer=following) for tensor in tensors]
    receives = [dist.P2POp(dist.irecv, tensor, group=group, group_peer=previous) for tensor in arriving]
    return Transfer(tensors, arriving, dist.batch_isend_irecv(sends + receives))
