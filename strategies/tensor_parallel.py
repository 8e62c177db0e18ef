"""`tp` and `tp_sp`: every matrix is cut over the ranks, the vocabulary too; every rank sees all sequences.

Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism", 2019: queries,
keys, values, gate and up are cut by columns, out and down by rows, so that a layer needs one sum over the ranks for
each of its two halves. `tp_sp` cuts the activations between the matrices along the sequence (Korthikanti et al.,
"Reducing Activation Recomputation in Large Transformer Models", 2022): the sum becomes a reduce-scatter, and an
all-gather precedes the next matrix. API: torch.distributed.tensor.parallel, for the layers' matrices.

What one rank passes in per micro-batch, with t ranks, L layers, H = hidden size, T tokens and A = T x H elements of the
dtype of the products; the head makes one exchange a chunk of tokens, C of them:

    tp      all_reduce      A each: embedding 1, forward 2 L, backward 2 L, into the head 1
    tp_sp   all_gather      A / t each: 2 L and the head 1 forward, 2 L and the embedding 1 backward
            reduce_scatter  A each: the embedding 1 and 2 L forward, 2 L and the head 1 backward
    both    all_gather      C of them, 2 T elements of float32 (or wider) in all

A checkpointed layer repeats its forward's, in eager mode without the last sum, which nothing needs again.

And per step one all_reduce of the gradients of those norm weights that saw a part of the heads or positions: 2 L x
head_dim elements of the parameters' dtype in `tp`, with (2 L + 1) x H more in `tp_sp`.
"""

import warnings

import torch
from torch import nn
from torch.distributed._symmetric_memory import enable_symm_mem_for_group
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)
from torch.distributed.tensor.parallel.style import ParallelStyle
from torch.distributed.tensor.placement_types import Placement

from strategies.model import Qwen3
from strategies.norm import ReplicatedNorm
from strategies.vocabulary_parallel import VocabularyParallelEmbedding, VocabularyParallelHead


def parallelize(model: nn.Module, tp_mesh: DeviceMesh, *, sequence_parallel: bool) -> None:
    """Cuts a model, or a pipeline stage of one, in place: afterwards every parameter is a DTensor on `tp_mesh`.

    Args:
        tp_mesh: of one axis; every rank of it must hold the same weights.
        sequence_parallel: cut the activations between the matrices along the sequence, which must divide by the degree.
    """
    assert isinstance(model, Qwen3)
    outer: Placement = Shard(1) if sequence_parallel else Replicate()
    embedding, head = model.model.embed_tokens, model.lm_head
    tied = embedding is not None and head is not None and head.weight is embedding.weight
    for layer in model.model.layers.children():
        _parallelize_layer(layer, tp_mesh, outer)
    if embedding is not None:
        model.model.embed_tokens = VocabularyParallelEmbedding(embedding.weight, tp_mesh, outer)
    if head is not None:
        model.model.norm = ReplicatedNorm(model.model.norm, tp_mesh, partial=sequence_parallel, sent=True)
        whole = ColwiseParallel(input_layouts=outer, output_layouts=Replicate())
        parallelize_module(head, tp_mesh, whole, src_data_rank=None)
        model.head = VocabularyParallelHead(kind=model.head.kind, tp_mesh=tp_mesh, outer=outer)
        if tied:
            # Cutting each module has made two parameters of one.
            head.weight = model.model.embed_tokens.weight


def _parallelize_layer(layer: nn.Module, tp_mesh: DeviceMesh, outer: Placement) -> None:
    """One decoder layer. `outer` is how the activations outside of its two halves are placed."""
    # One DTensor for all matrices of a half: each would otherwise sum the gradient of its input on its own.
    whole, by_name = (Replicate(),), {"hidden_states": outer}
    plan: dict[str, ParallelStyle] = {
        "self_attn": PrepareModuleInput(
            input_kwarg_layouts=by_name,
            desired_input_kwarg_layouts={"hidden_states": Replicate()},
            use_local_output=False,
        ),
        "mlp": PrepareModuleInput(input_layouts=(outer,), desired_input_layouts=whole, use_local_output=False),
    }
    plan |= {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
    plan |= {f"mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")}
    plan |= {name: RowwiseParallel(output_layouts=outer) for name in ("self_attn.o_proj", "mlp.down_proj")}
    # The weights are equal on all ranks already: nothing needs to be sent.
    parallelize_module(layer, tp_mesh, plan, src_data_rank=None)
    for name in ("input_layernorm", "post_attention_layernorm"):
        norm = ReplicatedNorm(getattr(layer, name), tp_mesh, partial=outer.is_shard(), sent=True)
        setattr(layer, name, norm)
    for name in ("q_norm", "k_norm"):
        # They see a rank's own heads.
        norm = ReplicatedNorm(getattr(layer.self_attn, name), tp_mesh, partial=True, sent=False)
        setattr(layer.self_attn, name, norm)


def pipeline_products(tp_mesh: DeviceMesh) -> None:
    """Has inductor split products beside a gather or a scatter and exchange their pieces meanwhile (async TP).

    Wang et al., "Overlap Communication with Dependent Computation via Decomposition in Large Deep Learning Models",
    ASPLOS 2023. On CPUs there is no memory of peers to read: torch leaves the collectives as they are.
    """
    torch._inductor.config._micro_pipeline_tp = True
    if tp_mesh.device_type == "cuda":
        with warnings.catch_warnings():
            # Deprecated as needless, yet the pass of torch 2.13 asks whether it has been called.
            warnings.filterwarnings("ignore", "`enable_symm_mem_for_group` is deprecated", FutureWarning)
            enable_symm_mem_for_group(tp_mesh.get_group().group_name)
