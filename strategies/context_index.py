"""Which positions of a sequence a rank of the context-parallel axis holds."""

import torch
from torch import Tensor


def contiguous_index(sequence_length: int, degree: int, rank: int) -> Tensor:
    """Positions [sequence_length / degree] of one of `degree` equal pieces, int64, ascending: Ulysses' cut.

    Raises:
        ValueError: the sequence has no such pieces.
    """
    if sequence_length % degree:
        raise ValueError(f"a sequence of {sequence_length} tokens does not split into {degree} equal pieces")
    return torch.arange(sequence_length).view(degree, -1)[rank]


def zigzag_index(sequence_length: int, degree: int, rank: int) -> Tensor:
    """Positions [sequence_length / degree] of chunks `rank` and `2 degree - 1 - rank` of `2 degree`, int64, ascending.

    An early chunk has few keys to see and its late partner many, so that every rank does the same work under a causal
    mask. Striped attention (Brandon et al., "Striped Attention", 2023) balances it token by token; whole chunks leave
    only square blocks to compute, none of them half masked but a rank's own.

    Raises:
        ValueError: the sequence has no such chunks.
    """
    if sequence_length % (2 * degree):
        raise ValueError(
            f"a sequence of {sequence_length} tokens does not split into {2 * degree} equal chunks, two for each of "
            f"{degree} ranks; make it a multiple of {2 * degree}"
        )
    return torch.arange(sequence_length).view(2 * degree, -1)[[rank, 2 * degree - 1 - rank]].flatten()


def usp_index(sequence_length: int, ring_degree: int, ring_rank: int, ulysses_degree: int, ulysses_rank: int) -> Tensor:
    """Positions [sequence_length / (ring_degree * ulysses_degree)] of a rank of a ring x Ulysses mesh, int64, rising.

    The ring rank's zigzag share in contiguous pieces, so that the ranks of an Ulysses group together hold just what one
    rank of a plain ring would (Fang & Zhao, "USP: A Unified Sequence Parallelism Approach", 2024).

    Raises:
        ValueError: the sequence has no such chunks or pieces.
    """
    share_S = zigzag_index(sequence_length, ring_degree, ring_rank)
    return share_S[contiguous_index(share_S.numel(), ulysses_degree, ulysses_rank)]
