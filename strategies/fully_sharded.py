"""`fsdp2`, `zero2`, `hsdp`: parameters, gradients and optimizer state are sharded, a few layers at a time.

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020 (`fsdp2` is stage 3,
`zero2` stage 2: parameters, once gathered, stay whole until backward has used them); Zhao et al., "PyTorch FSDP",
VLDB 2023 (`hsdp`: sharded within a group, replicated over the groups). API: torch.distributed.fsdp.fully_shard.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from strategies.batch import Share
from strategies.model import prepare_layers
from strategies.optimizer import adamw
from strategies.sharded import BuildConfig, Sharded, compute_dtype
from strategies.spec import Layout, StrategyName

UNIT_NUMEL = 60_000_000
"""Neighbouring layers are gathered and reduced together up to so many parameters (120 MB in bfloat16).

Each unit costs the host some 3 ms a step in hooks and collectives, whatever its size. With one per layer, a compiled
step of 0.6b on two H200s waits for the host: 247 ms, and 178 ms with four layers a unit, for 0.3 % more memory.
"""


def build_fully_sharded(model: nn.Module, mesh: DeviceMesh, config: BuildConfig) -> Sharded:
    """Shards the decoder layers in units and then the root (embedding, last norm, head) over the whole mesh.

    Gradients are reduced after every micro-batch, not only the last: holding them back would keep one unsharded float32
    copy of all gradients on every rank, the memory that these strategies exist to save.
    """
    prepare_layers(model, config.layout)
    fully_shard_model(model, mesh, config.layout)
    return Sharded(
        module=model,
        unwrapped=model,
        optimizer=adamw(model.parameters(), config.layout),
        mesh=mesh,
        layout=config.layout,
        share=Share(data_rank=mesh.get_rank(), data_degree=mesh.size()),
        gradient_scale=mesh.size(),
    )


def fully_shard_model(model: nn.Module, mesh: DeviceMesh, layout: Layout) -> None:
    """Shards a model in place over a mesh of one axis, or of two: replicated over the first, sharded over the other."""
    dtype = compute_dtype(layout)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32 if dtype else None)
    reshard = False if layout.strategy is StrategyName.ZERO2 else None
    for unit in units(list(model.get_submodule("model.layers").children())):
        fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)


def units(layers: list[nn.Module]) -> list[list[nn.Module]]:
    """Runs of neighbouring layers that are gathered together; at least two, so that one can overlap with another."""
    layer_numel = sum(parameter.numel() for parameter in layers[0].parameters())
    size = max(1, min(round(UNIT_NUMEL / layer_numel), len(layers) // 2))
    return [layers[first : first + size] for first in range(0, len(layers), size)]
