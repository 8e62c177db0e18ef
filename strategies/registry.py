"""The only list of strategies, and the order in which their parts compose.

Order, kept by every builder: the whole model is built; its matrices, experts, sequences or stages are cut; layers are
checkpointed, then compiled; then wrapped (DDP or fully_shard); then the optimizer is made. Compiling comes before
wrapping because fully_shard's hooks must stay outside of the compiled graphs; the optimizer comes last because cutting
replaces the parameters.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from strategies.context_parallel import build_context_parallel
from strategies.data_parallel import build_data_parallel
from strategies.fully_sharded import build_fully_sharded
from strategies.model import build_model
from strategies.pipeline_parallel import build_pipeline_parallel
from strategies.sharded import BuildConfig, Builder, Sharded
from strategies.spec import StrategyName
from strategies.tensor_parallel import build_tensor_parallel
from strategies.unsharded import build_single

BUILDERS: dict[StrategyName, Builder] = {
    StrategyName.SINGLE: build_single,
    StrategyName.DDP: build_data_parallel,
    StrategyName.ZERO1: build_data_parallel,
    StrategyName.ZERO2: build_fully_sharded,
    StrategyName.FSDP2: build_fully_sharded,
    StrategyName.HSDP: build_fully_sharded,
    StrategyName.TP: build_tensor_parallel,
    StrategyName.TP_SP: build_tensor_parallel,
    StrategyName.PP_GPIPE: build_pipeline_parallel,
    StrategyName.PP_1F1B: build_pipeline_parallel,
    StrategyName.PP_INTERLEAVED: build_pipeline_parallel,
    StrategyName.PP_INTERLEAVED_ZB: build_pipeline_parallel,
    StrategyName.PP_ZBV: build_pipeline_parallel,
    StrategyName.PP_DUALPIPEV: build_pipeline_parallel,
    StrategyName.CP_ULYSSES: build_context_parallel,
    StrategyName.CP_RING: build_context_parallel,
    StrategyName.CP_USP: build_context_parallel,
}


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
    axes = config.layout.axes
    mesh = init_device_mesh(config.device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))
    return BUILDERS[config.layout.strategy](model, mesh, config)


def device_of(kind: str, local_rank: int) -> torch.device:
    """The device of a rank: its own GPU, or the CPU."""
    return torch.device(kind, local_rank) if kind == "cuda" else torch.device(kind)
