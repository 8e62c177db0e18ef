"""`cp_ulysses`, `cp_ring`, `cp_usp`: every rank holds other positions of every sequence, and attention exchanges them.

The exchanges, with their papers, are in `ulysses` and `ring_attention`. All that is not attention works on each
position alone. Parameters, gradients and optimizer state are sharded over the same ranks as `fsdp2` does it, together
with those of a data axis: the sum of the gradients over the positions is then one with that over the shards.
"""

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from strategies.attention import Attention, register
from strategies.context_index import contiguous_index, usp_index, zigzag_index
from strategies.model import Qwen3
from strategies.ring_attention import ring_attention
from strategies.ulysses import ulysses_attention, usp_attention

ATTENTION = "context_parallel"
"""Registered name of the attention of this process."""


def positions(mesh: DeviceMesh, sequence_length: int) -> Tensor:
    """The positions [S] of a sequence that this rank holds, in its order."""
    names = mesh.mesh_dim_names or ()
    if "ulysses" not in names:
        return zigzag_index(sequence_length, mesh["ring"].size(), mesh["ring"].get_local_rank())
    if "ring" not in names:
        return contiguous_index(sequence_length, mesh["ulysses"].size(), mesh["ulysses"].get_local_rank())
    ring, ulysses = mesh["ring"], mesh["ulysses"]
    return usp_index(sequence_length, ring.size(), ring.get_local_rank(), ulysses.size(), ulysses.get_local_rank())


def attention_over(mesh: DeviceMesh) -> Attention:
    """The attention of the axes that the mesh has."""
    names = mesh.mesh_dim_names or ()
    if "ulysses" not in names:
        ring = mesh.get_group("ring")
        return lambda q, k, v, scale, documents: ring_attention(q, k, v, ring, scale, documents)
    ulysses = mesh.get_group("ulysses")
    if "ring" not in names:
        return lambda q, k, v, scale, documents: ulysses_attention(q, k, v, ulysses, scale, documents)
    ring = mesh.get_group("ring")
    return lambda q, k, v, scale, documents: usp_attention(q, k, v, ring, ulysses, scale, documents)


def use_attention(model: Qwen3, attention: Attention) -> None:
    """Makes the model's layers attend over the ranks; one such attention a process."""
    register(ATTENTION, attention)
    model.set_attn_implementation(ATTENTION)
