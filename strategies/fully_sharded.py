"""`fsdp2`: parameters, gradients and optimizer state are sharded over the data axis, layer by layer.

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


def build_fsdp2(model: nn.Module, mesh: DeviceMesh, config: BuildConfig) -> Sharded:
    """Shards each decoder layer and then the root (embedding, last norm, head).

    Gradients are reduced after every micro-batch, not only the last: holding them back would keep one unsharded float32
    copy of all gradients on every rank, the memory that this strategy exists to save.
    """
    if config.mode is Mode.COMPILE:
        compile_layers(model)
    data = mesh[DATA_AXIS]
    dtype = compute_dtype(config.layout)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32 if dtype else None)
    for layer in model.get_submodule("model.layers").children():
        fully_shard(layer, mesh=data, mp_policy=policy)
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
