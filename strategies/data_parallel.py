"""`ddp` and `zero1`: every rank holds the whole model and sees other sequences; gradients are averaged in buckets.

Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020. `zero1` keeps a part
of the optimizer state on each rank and sends the updated parameters round: Rajbhandari et al., "ZeRO: Memory
Optimizations Toward Training Trillion Parameter Models", SC 2020, stage 1. APIs: torch's DistributedDataParallel and
ZeroRedundancyOptimizer.
"""

import warnings
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from strategies.batch import Share
from strategies.model import prepare_layers
from strategies.optimizer import adamw, adamw_class
from strategies.sharded import BuildConfig, Sharded, compute_dtype
from strategies.spec import Layout, StrategyName


@dataclass(kw_only=True)
class Replicated(Sharded):
    """A replica: gradients are reduced with the last micro-batch."""

    module: DistributedDataParallel

    def no_sync(self) -> AbstractContextManager[None]:
        return self.module.no_sync()


def build_data_parallel(model: nn.Module, mesh: DeviceMesh, config: BuildConfig) -> Sharded:
    """Wraps the model in DistributedDataParallel over the data axis."""
    layout, data = config.layout, mesh["dp"]
    if layout.compiled:
        # DDP would have the compiler split every graph at the borders of its buckets, three parts a layer: layers are
        # small enough to overlap with the reduction of others as they are, and each part costs the host a call.
        torch._dynamo.config.optimize_ddp = False
    prepare_layers(model, layout)
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
        optimizer=_optimizer(model, data, layout),
        mesh=mesh,
        layout=layout,
        share=Share(data_rank=data.get_local_rank(), data_degree=data.size()),
        autocast_dtype=compute_dtype(layout),
        gradient_scale=data.size(),
    )


def _optimizer(model: nn.Module, data: DeviceMesh, layout: Layout) -> torch.optim.Optimizer:
    if layout.strategy is not StrategyName.ZERO1:
        return adamw(model.parameters(), layout)
    with warnings.catch_warnings():
        # Its package compiles old optimizers with torch.jit.script as it is imported, and torch warns of itself.
        warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated", DeprecationWarning)
        from torch.distributed.optim import ZeroRedundancyOptimizer
    kind, settings = adamw_class(layout)
    # Parameters as views of one buffer a rank: one broadcast each after the update, instead of one a parameter.
    return ZeroRedundancyOptimizer(
        model.parameters(), kind, process_group=data.get_group(), parameters_as_bucket_view=True, **settings
    )
