"""How a strategy or product is put together out of its parts: the one order in which they compose.

The whole model is built; its sequences, stages and matrices are cut, in this order, for a stage is cut out of a whole
model and matrices within a stage; layers are checkpointed, then compiled; then wrapped (DistributedDataParallel,
fully_shard), for the hooks of a wrapper must stay outside of the compiled graphs; the optimizer is made last, for each
cut replaces the parameters.
"""

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from strategies.batch import Share
from strategies.context_parallel import attention_over, positions, use_attention
from strategies.data_parallel import distribute, zero_redundancy_optimizer
from strategies.expert_parallel import distribute_experts
from strategies.fully_sharded import fully_shard_model, shard_experts
from strategies.layout import Layout
from strategies.model import Qwen3, build_model, prepare_layers
from strategies.optimizer import adamw
from strategies.pipeline_parallel import Pipelined
from strategies.product import is_product
from strategies.sharded import BuildConfig, Sharded, compute_dtype
from strategies.spec import CONTEXT_AXES, DATA_AXES, StrategyName
from strategies.stage import Stage, take_stages
from strategies.tensor_parallel import parallelize, pipeline_products


def build(config: BuildConfig) -> Sharded:
    """This rank's part of the model under `config`. The default process group must exist; every rank must call it.

    The whole model is made first, by parameter name, and then cut: so every layout starts from the same weights.
    """
    layout = config.layout
    model = build_model(
        layout.shape,
        device=config.device,
        seed=layout.workload.seed,
        loss=layout.workload.loss,
        checkpoint=config.checkpoint,
    )
    return shard(model, config)


def shard(model: nn.Module, config: BuildConfig) -> Sharded:
    """This rank's part of a whole model, which is consumed. Every rank must call it, with the same weights."""
    assert isinstance(model, Qwen3)
    layout, axes = config.layout, config.layout.axes
    mesh = init_device_mesh(config.device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))
    if layout.part("context"):
        use_attention(model, attention_over(mesh))
    stages = take_stages(model, mesh["pp"], layout) if layout.part("pipeline") else []
    pieces = [stage.part for stage in stages] or [model]
    experts = distribute_experts(model, mesh["ep"]) if layout.part("expert") else []
    for piece in pieces:
        _cut_and_prepare(piece, mesh, layout)
    averaged = averaged_mesh(mesh, layout)
    unwrapped = nn.ModuleList(stages) if stages else model
    if experts:
        shard_experts(experts, _mesh_of_groups(mesh, layout), layout)
    module = _wrap(unwrapped, stages or [model], pieces, averaged, layout)
    is_sharded = averaged is not None and module is unwrapped
    common: dict[str, Any] = {
        "module": module,
        "unwrapped": unwrapped,
        "optimizer": _optimizer(unwrapped, mesh, layout),
        "mesh": mesh,
        "averaged": averaged,
        "layout": layout,
        "share": share_of(mesh, layout, config.device),
        # fully_shard gathers in the lower dtype; elsewhere autocast chooses it, product by product.
        "autocast_dtype": None if is_sharded else compute_dtype(layout),
        "gradient_scale": float(averaged.size()) if averaged is not None else 1.0,
        "loss_copies": layout.degree("tp"),
        "experts": experts,
    }
    return Pipelined(**common, stages=stages, pipeline=mesh["pp"]) if stages else Sharded(**common)


def share_of(mesh: DeviceMesh, layout: Layout, device: torch.device) -> Share:
    """What a rank sees of the global batch."""
    data_rank = 0
    for axis, degree in layout.axes.items():
        if axis in DATA_AXES:
            data_rank = data_rank * degree + mesh.get_local_rank(axis)
    positions_S = None
    if layout.part("context"):
        positions_S = positions(mesh, layout.workload.sequence_length).to(device)
    return Share(data_rank=data_rank, data_degree=layout.data_degree, positions_S=positions_S)


def averaged_mesh(mesh: DeviceMesh, layout: Layout) -> DeviceMesh | None:
    """The ranks whose gradients a wrapper averages: all that see other sequences or positions; None without any.

    Of one axis, or of two where `hsdp` replicates over the first: what shards does so over the positions too.
    """
    names = [axis for axis in layout.axes if axis in DATA_AXES | CONTEXT_AXES]
    if not names or layout.part("data") is StrategyName.SINGLE:
        return None
    if names[0] != "dp_replicate":
        return _flattened(mesh, names)
    _flattened(mesh, names[1:])
    return mesh["dp_replicate", "_".join(names[1:])]


def _mesh_of_groups(mesh: DeviceMesh, layout: Layout) -> DeviceMesh | None:
    """The data axes without that of the experts: over the ranks of it an expert is the same."""
    names = [axis for axis in layout.axes if axis in DATA_AXES and axis != "ep"]
    return (mesh[tuple(names)] if len(names) > 1 else mesh[names[0]]) if names else None


def _flattened(mesh: DeviceMesh, names: list[str]) -> DeviceMesh:
    return mesh[names[0]] if len(names) == 1 else mesh[tuple(names)]._flatten("_".join(names))


def _cut_and_prepare(piece: Qwen3, mesh: DeviceMesh, layout: Layout) -> None:
    if tensor := layout.part("tensor"):
        parallelize(piece, mesh["tp"], sequence_parallel=tensor is StrategyName.TP_SP)
        if layout.options.async_tp:
            pipeline_products(mesh["tp"])
    prepare_layers(piece, layout)


def _wrap(
    unwrapped: nn.Module,
    roots: list[Qwen3] | list[Stage],
    pieces: list[Qwen3],
    averaged: DeviceMesh | None,
    layout: Layout,
) -> nn.Module:
    """The module that is called; `unwrapped` itself where it is wrapped in place, or not at all."""
    if averaged is None:
        return unwrapped
    if layout.part("data") in (StrategyName.DDP, StrategyName.ZERO1) and not is_product(layout.strategy):
        return distribute(unwrapped, averaged, layout)
    for root, piece in zip(roots, pieces, strict=True):
        fully_shard_model(root, list(piece.model.layers.children()), averaged, layout)
    return unwrapped


def _optimizer(unwrapped: nn.Module, mesh: DeviceMesh, layout: Layout) -> torch.optim.Optimizer:
    if layout.part("data") is StrategyName.ZERO1:
        return zero_redundancy_optimizer(unwrapped.parameters(), mesh["dp"], layout)
    return adamw(unwrapped.parameters(), layout)


def device_of(kind: str, local_rank: int) -> torch.device:
    """The device of a rank: its own GPU, or the CPU."""
    return torch.device(kind, local_rank) if kind == "cuda" else torch.device(kind)
