"""`fsdp2`: parameters, gradients and optimizer state are sharded over the data axis, a few layers at a time.

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020 (stage 3);
Zhao et al., "PyTorch FSDP", VLDB 2023. API: torch.distributed.fsdp.fully_shard.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from strategies.model import compile_layers
from strategies.sharded import DATA_AXIS, BuildConfig, Sharded, adamw, compute_dtype
from strategies.spec import Mode

UNIT_NUMEL = 60_000_000
"""Neighbouring layers are gathered and reduced together up to so many parameters (120 MB in bfloat16).

Each unit costs the host about 2 ms a step in hooks and collectives, whatever its size. With one per layer, a compiled
step of 0.6b on two H200s waits for the host: 247 ms, and 178 ms with four layers a unit, for 0.3 % more memory.
"""


def build_fsdp2(model: nn.Module, mesh: DeviceMesh, config: BuildConfig) -> Sharded:
    """Shards the decoder layers in units and then the root (embedding, last norm, head).

    Gradients are reduced after every micro-batch, not only the last: holding them back would keep one unsharded float32
    copy of all gradients on every rank, the memory that this strategy exists to save.
    """
    if config.mode is Mode.COMPILE:
        compile_layers(model)
    data = mesh[DATA_AXIS]
    dtype = compute_dtype(config.layout)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32 if dtype else None)
    for unit in units(list(model.get_submodule("model.layers").children())):
        fully_shard(unit, mesh=data, mp_policy=policy)
    fully_shard(model, mesh=data, mp_policy=policy)
    return Sharded(
        module=model,
        unwrapped=model,
        optimizer=adamw(model, config.layout.workload.learning_rate),
        mesh=mesh,
        data_rank=data.get_local_rank(),
        data_degree=data.size(),
        gradient_scale=data.size(),
    )


def units(layers: list[nn.Module]) -> list[list[nn.Module]]:
    """Runs of neighbouring layers that are gathered together; at least two, so that one can overlap with another."""
    layer_numel = sum(parameter.numel() for parameter in layers[0].parameters())
    size = max(1, min(round(UNIT_NUMEL / layer_numel), len(layers) // 2))
    return [layers[first : first + size] for first in range(0, len(layers), size)]
