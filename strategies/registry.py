"""The only list of strategies, and the order in which their parts compose.

Order, applied by every builder: the whole model is built, then compiled per layer, then wrapped (DDP or fully_shard).
Compiling comes before wrapping because fully_shard's hooks must stay outside of the compiled graphs; the optimizer
comes last because fully_shard replaces the parameters.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from strategies.data_parallel import build_ddp
from strategies.fully_sharded import build_fsdp2
from strategies.model import build_model
from strategies.sharded import DATA_AXIS, BuildConfig, Builder, Sharded
from strategies.spec import StrategyName
from strategies.unsharded import build_single

BUILDERS: dict[StrategyName, Builder] = {
    StrategyName.SINGLE: build_single,
    StrategyName.DDP: build_ddp,
    StrategyName.FSDP2: build_fsdp2,
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
    layout = config.layout
    mesh = init_device_mesh(config.device.type, (layout.data_degree,), mesh_dim_names=(DATA_AXIS,))
    return BUILDERS[layout.strategy](model, mesh, config)


def device_of(kind: str, local_rank: int) -> torch.device:
    """The device of a rank: its own GPU, or the CPU."""
    return torch.device(kind, local_rank) if kind == "cuda" else torch.device(kind)
