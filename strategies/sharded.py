"""What every strategy returns: this rank's pieces of a model, and how to make one training step with them."""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from strategies.batch import Batch
from strategies.model import forward_loss
from strategies.spec import ComputeDtype, Layout, Mode

DATA_AXIS = "dp"


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildConfig:
    """What a builder needs beside the mesh."""

    layout: Layout
    mode: Mode
    device: torch.device
    checkpoint: Path | None = None


class Builder(Protocol):
    """The one signature of a strategy: a whole model and a named mesh in, this rank's part out."""

    def __call__(self, model: nn.Module, mesh: DeviceMesh, config: BuildConfig) -> "Sharded": ...


@dataclass(kw_only=True)
class Sharded:
    """This rank's part of a model under one strategy.

    The base class is a strategy with nothing to synchronise by hand; builders that need more override `no_sync` (a
    wrapper that can skip its gradient reduction) or `owned_numel`.
    """

    module: nn.Module
    """The (wrapped) model that is called."""
    unwrapped: nn.Module
    """The same model without wrappers: its parameters carry the Hugging Face names."""
    optimizer: torch.optim.Optimizer
    mesh: DeviceMesh
    data_rank: int = 0
    data_degree: int = 1
    autocast_dtype: torch.dtype | None = None
    gradient_scale: float = field(default=1.0)
    """Multiplies the loss before backward: the degree by which a wrapper will average the gradients."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Entered around every micro-batch but the last."""
        return nullcontext()

    def autocast(self, device_type: str) -> AbstractContextManager[object]:
        if self.autocast_dtype is None:
            return nullcontext()
        return torch.autocast(device_type, dtype=self.autocast_dtype)

    def forward_backward(self, micro_batches: Sequence[Batch]) -> Tensor:
        """Forward and backward over this rank's micro-batches.

        Returns:
            This rank's share of the global mean loss (scalar, detached): the sum over data ranks is the loss.
        """
        shares = []
        for index, batch in enumerate(micro_batches):
            with nullcontext() if index == len(micro_batches) - 1 else self.no_sync():
                with self.autocast(batch.ids_BS.device.type):
                    share = forward_loss(self.module, batch)
                (share * self.gradient_scale).backward()
            shares.append(share.detach())
        return torch.stack(shares).sum()

    def step(self) -> None:
        """Updates the parameters and frees the gradients."""
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def owned_numel(self) -> int:
        """Elements of parameters that this rank alone stands for: their sum over all ranks is the model's count."""
        return sum(_local(parameter).numel() for _, parameter in self.named_parameters())

    def named_parameters(self) -> Iterable[tuple[str, nn.Parameter]]:
        """Parameters under their Hugging Face names; a tied one once."""
        return self.unwrapped.named_parameters()

    def full_parameters(self) -> dict[str, Tensor]:
        """Unsharded parameters by name. Every rank must call it. For tests and checks, not for a timed step."""
        return {name: _full(parameter.detach()) for name, parameter in self.named_parameters()}

    def full_gradients(self) -> dict[str, Tensor]:
        """Unsharded gradients by name, before `step`; without those that are None. Every rank must call it."""
        return {
            name: _full(parameter.grad) for name, parameter in self.named_parameters() if parameter.grad is not None
        }

    def gradient_norm(self) -> Tensor:
        """Global L2 norm of the gradients in float64, equal on every rank. Every rank must call it."""
        squares = [
            _full(parameter.grad.double().pow(2).sum())
            for _, parameter in self.named_parameters()
            if parameter.grad is not None
        ]
        return torch.stack(squares).sum().sqrt()


def train_step(sharded: Sharded, micro_batches: Sequence[Batch]) -> Tensor:
    """One optimizer update, the same loop for every strategy. Returns this rank's share of the loss before it."""
    loss = sharded.forward_backward(micro_batches)
    sharded.step()
    return loss


def adamw(module: nn.Module, learning_rate: float) -> torch.optim.Optimizer:
    """Fused AdamW with float32 state, as Qwen-like pre-training uses it (betas 0.9, 0.95)."""
    return torch.optim.AdamW(module.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.1, fused=True)


def compute_dtype(layout: Layout) -> torch.dtype | None:
    """The lower dtype of the matrix products, or None where they run in the parameters' own."""
    return torch.bfloat16 if layout.workload.compute_dtype is ComputeDtype.BFLOAT16 else None


def _full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
