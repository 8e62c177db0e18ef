"""More ranks than GPUs, for tests of what ranks compute: how fast they are there says nothing."""

import os
from pathlib import Path

import pytest
import torch

from perf.facts.gpus import visible_gpus
from perf.measure.server import RankContext
from strategies.registry import device_of

NUM_GPUS = len(visible_gpus(os.environ.get("CUDA_VISIBLE_DEVICES")))
SERVICE = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"))
"""Of CUDA's Multi-Process Service, which runs the kernels of several processes at once."""


def lack_of_gpus(world_size: int, num_gpus: int = NUM_GPUS, service: Path = SERVICE) -> str:
    """Why so many ranks cannot be tested here, with the cure; empty when they can.

    They can share GPUs where the service is on. Without it their kernels take turns: a small all-reduce of four ranks
    took 40 ms on an H200, and 0.1 ms with it.
    """
    if num_gpus >= world_size or (num_gpus and any(service.glob("control*"))):
        return ""
    share = "; under MPS ranks share them: nvidia-cuda-mps-control -d" if num_gpus else ""
    return f"needs {world_size} GPU{'s' * (world_size > 1)}, sees {num_gpus}{share}"


def on_gpus(world_size: int) -> pytest.MarkDecorator:
    """Marks a test with so many ranks, which is skipped where these GPUs cannot hold them."""
    lack = lack_of_gpus(world_size)
    return pytest.mark.skipif(bool(lack), reason=lack)


def gpu_of(context: RankContext) -> torch.device:
    """This rank's GPU, which it shares where there are fewer GPUs than ranks.

    NCCL refuses two ranks of one host on one GPU. Ranks that say they are on hosts of their own talk over sockets.
    """
    if context.world_size > NUM_GPUS:
        os.environ.update(NCCL_HOSTID=f"rank-{context.rank}", NCCL_SOCKET_IFNAME="lo")
    return device_of("cuda", context.rank % NUM_GPUS)
