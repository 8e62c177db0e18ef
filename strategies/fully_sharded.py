"""`fsdp2`, `zero2`, `hsdp`: parameters, gradients and optimizer state are sharded, a few layers at a time.

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020 (`fsdp2` is stage 3,
`zero2` stage 2: parameters, once gathered, stay whole until backward has used them); Zhao et al., "PyTorch FSDP",
VLDB 2023 (`hsdp`: sharded within a group, replicated over the groups). API: torch.distributed.fsdp.fully_shard.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from strategies.layout import Layout
from strategies.sharded import compute_dtype
from strategies.spec import StrategyName

UNIT_NUMEL = 60_000_000
"""Neighbouring layers are gathered and reduced together up to so many parameters (120 MB in bfloat16).

Each unit costs the host some 3 ms a step in hooks and collectives, whatever its size. With one per layer, a compiled
step of 0.6b on two H200s waits for the host: 247 ms, and 178 ms with four layers a unit, for 0.3 % more memory.
"""


def fully_shard_model(root: nn.Module, layers: list[nn.Module], mesh: DeviceMesh, layout: Layout) -> None:
    """Shards decoder layers in units, and then the rest of `root` (embedding, last norm, head), in place.

    Gradients are reduced after every micro-batch, not only the last: holding them back would keep one unsharded float32
    copy of all gradients on every rank, the memory that these strategies exist to save. In a pipeline torch's schedules
    hold them back, and keep what was gathered until the step ends: else each microbatch would gather anew.

    Args:
        mesh: of one axis, or of two: replicated over the first, sharded over the other.
    """
    wrap = _wrapper(mesh, layout)
    alone = {parameter for layer in layers for parameter in layer.parameters() if _is_expert(parameter)}
    for unit in units(layers):
        wrap(unit, ignored_params=alone)
    wrap(root, ignored_params=alone)


def shard_experts(experts: Sequence[nn.Module], mesh: DeviceMesh | None, layout: Layout) -> None:
    """Wraps the experts of each layer by themselves: they are the same over fewer ranks than the rest of the model.

    Args:
        mesh: those ranks; None: each expert is on one rank alone.
    """
    if mesh is not None:
        wrap = _wrapper(mesh, layout)
        for module in experts:
            wrap(module)


def _wrapper(mesh: DeviceMesh, layout: Layout) -> Callable[..., Any]:
    """What shards or replicates modules over `mesh`, as the layout's data part asks for it.

    In a product `dp` replicates over the one axis, and so does `ep` what is no expert: DistributedDataParallel takes
    neither DTensors nor backwards in two parts.
    """
    dtype, data = compute_dtype(layout), layout.part("data")
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32 if dtype else None)
    if data is StrategyName.DDP or (data is None and layout.part("expert") is not None):
        return partial(replicate, mesh=mesh, mp_policy=policy)
    keeps = data is StrategyName.ZERO2 or layout.part("pipeline") is not None
    return partial(fully_shard, mesh=mesh, mp_policy=policy, reshard_after_forward=False if keeps else None)


def _is_expert(parameter: nn.Parameter) -> bool:
    """Whether it is cut over the axis of the experts, and not yet sharded any further."""
    return isinstance(parameter, DTensor) and parameter.device_mesh.mesh_dim_names == ("ep",)


def units(layers: list[nn.Module]) -> list[list[nn.Module]]:
    """Runs of neighbouring layers that are gathered together; at least two, so that one can overlap with another."""
    layer_numel = sum(parameter.numel() for parameter in layers[0].parameters())
    size = max(1, min(round(UNIT_NUMEL / layer_numel), len(layers) // 2))
    return [layers[first : first + size] for first in range(0, len(layers), size)]
