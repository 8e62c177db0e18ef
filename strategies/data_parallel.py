"""`ddp`: every rank holds the whole model and other sequences; gradients are averaged in buckets during backward.

Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020.
"""

import warnings
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from strategies.model import compile_layers
from strategies.sharded import DATA_AXIS, BuildConfig, Sharded, adamw, compute_dtype
from strategies.spec import Mode


@dataclass(kw_only=True)
class Replicated(Sharded):
    """A replica: gradients are reduced with the last micro-batch, and rank 0 stands for all copies of a parameter."""

    module: DistributedDataParallel

    def no_sync(self) -> AbstractContextManager[None]:
        return self.module.no_sync()

    def owned_numel(self) -> int:
        return super().owned_numel() if self.data_rank == 0 else 0


def build_ddp(model: nn.Module, mesh: DeviceMesh, config: BuildConfig) -> Sharded:
    """Wraps the model in DistributedDataParallel over the data axis."""
    if config.mode is Mode.COMPILE:
        # DDP would have the compiler split every graph at the borders of its buckets, three parts a layer: layers are
        # small enough to overlap with the reduction of others as they are, and each part costs the host a call.
        torch._dynamo.config.optimize_ddp = False
        compile_layers(model)
    data = mesh[DATA_AXIS]
    with warnings.catch_warnings():
        # torch 2.13 renames broadcast_buffers; torch 2.11 does not know the new name.
        warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
        wrapped = DistributedDataParallel(
            model,
            process_group=data.get_group(),
            # The rotary frequencies are the only buffers and never change: broadcasting them every forward is waste.
            broadcast_buffers=False,
            # Gradients are views of the buckets: no copy, and one model of float32 gradients less memory.
            gradient_as_bucket_view=True,
        )
    return Replicated(
        module=wrapped,
        unwrapped=model,
        optimizer=adamw(model, config.layout.workload.learning_rate),
        mesh=mesh,
        data_rank=data.get_local_rank(),
        data_degree=data.size(),
        autocast_dtype=compute_dtype(config.layout),
        gradient_scale=data.size(),
    )
