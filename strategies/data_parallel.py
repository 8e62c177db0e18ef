"""`ddp` and `zero1`: every rank holds the whole model and sees other sequences; gradients are averaged in buckets.

Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020. `zero1` keeps a part
of the optimizer state on each rank and sends the updated parameters round: Rajbhandari et al., "ZeRO: Memory
Optimizations Toward Training Trillion Parameter Models", SC 2020, stage 1. APIs: torch's DistributedDataParallel and
ZeroRedundancyOptimizer.
"""

import warnings
from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from strategies.layout import Layout
from strategies.optimizer import adamw_class


def distribute(model: nn.Module, data: DeviceMesh, layout: Layout) -> DistributedDataParallel:
    """Wraps a model whose layers have been prepared; gradients are averaged over `data`."""
    if layout.compiled:
        # DDP would have the compiler split every graph at the borders of its buckets, three parts a layer: layers are
        # small enough to overlap with the reduction of others as they are, and each part costs the host a call.
        torch._dynamo.config.optimize_ddp = False
    with warnings.catch_warnings():
        # torch 2.13 renames broadcast_buffers; torch 2.11 does not know the new name.
        warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
        return DistributedDataParallel(
            model,
            process_group=data.get_group(),
            # The rotary frequencies are the only buffers and never change: broadcasting them every forward is waste.
            broadcast_buffers=False,
            # Gradients are views of the buckets: no copy, and one model of float32 gradients less memory.
            gradient_as_bucket_view=True,
        )


def zero_redundancy_optimizer(
    parameters: Iterable[nn.Parameter], data: DeviceMesh, layout: Layout
) -> torch.optim.Optimizer:
    """AdamW whose state is dealt over the ranks of `data`, each tensor whole."""
    with warnings.catch_warnings():
        # Its package compiles old optimizers with torch.jit.script as it is imported, and torch warns of itself.
        warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated", DeprecationWarning)
        from torch.distributed.optim import ZeroRedundancyOptimizer
    kind, settings = adamw_class(layout)
    # Parameters as views of one buffer a rank: one broadcast each after the update, instead of one a parameter.
    return ZeroRedundancyOptimizer(
        parameters, kind, process_group=data.get_group(), parameters_as_bucket_view=True, **settings
    )
