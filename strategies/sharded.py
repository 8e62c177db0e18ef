"""What every strategy returns: this rank's pieces of a model, and how to make one training step with them."""

import math
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import get_total_norm

from strategies.batch import Batch, Share
from strategies.expert_parallel import DistributedExperts, divide_gradients
from strategies.layout import Layout
from strategies.model import forward, forward_loss
from strategies.partial_gradients import sum_partial_gradients
from strategies.spec import CONTEXT_AXES, DATA_AXES, ComputeDtype


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildConfig:
    """What a builder needs beside the mesh."""

    layout: Layout
    device: torch.device
    checkpoint: Path | None = None


@dataclass(kw_only=True)
class Sharded:
    """This rank's part of a model under one strategy or product; with pipelines, `Pipelined`."""

    module: nn.Module
    """The (wrapped) model that is called."""
    unwrapped: nn.Module
    """The same model without wrappers: its parameters carry the Hugging Face names."""
    optimizer: torch.optim.Optimizer
    mesh: DeviceMesh
    """All axes of the strategy."""
    averaged: DeviceMesh | None = None
    """The ranks whose gradients a wrapper averages."""
    layout: Layout
    share: Share = field(default_factory=Share)
    """The part of the global batch that this rank sees."""
    autocast_dtype: torch.dtype | None = None
    gradient_scale: float = 1.0
    """Multiplies the loss before backward: the degree by which a wrapper will average the gradients."""
    experts: list[DistributedExperts] = field(default_factory=list)
    """Of each layer, where they are spread over ranks."""
    loss_copies: int = 1
    """Ranks that compute the same loss, and of which each takes a part as its share: the tensor degree."""

    def micro_batches(self, batch: Batch) -> list[Batch]:
        """This rank's share of a global batch, as its forwards take it."""
        return batch.micro_batches(self.share, size=self.layout.workload.micro_batch)

    @property
    def counts_tokens(self) -> bool:
        """Whether this rank is the first of those that see the same tokens: cuts of the model, not of the batch."""
        coordinate = self.mesh.get_coordinate()
        assert coordinate is not None
        pairs = zip(_names(self.mesh), coordinate, strict=True)
        return all(at == 0 for axis, at in pairs if axis not in DATA_AXES | CONTEXT_AXES)

    def no_sync(self) -> AbstractContextManager[None]:
        """Entered around every micro-batch but the last: DistributedDataParallel reduces with that one."""
        return self.module.no_sync() if isinstance(self.module, DistributedDataParallel) else nullcontext()

    def autocast(self, device_type: str) -> AbstractContextManager[object]:
        if self.autocast_dtype is None:
            return nullcontext()
        return torch.autocast(device_type, dtype=self.autocast_dtype)

    def forward_backward(self, micro_batches: Sequence[Batch]) -> Tensor:
        """Forward and backward over this rank's micro-batches, gradients complete.

        Returns:
            This rank's share of the global mean loss (scalar, detached): the sum over all ranks is the loss.
        """
        shares = []
        for index, batch in enumerate(micro_batches):
            with nullcontext() if index == len(micro_batches) - 1 else self.no_sync():
                with self.autocast(batch.ids_BS.device.type):
                    share = forward_loss(self.module, batch)
                (share * self.gradient_scale).backward()
            shares.append(share.detach())
        self.finish_gradients()
        return torch.stack(shares).sum() / self.loss_copies

    def finish_gradients(self) -> None:
        """Sums over ranks that no wrapper makes; called once, after the last micro-batch's backward."""
        if "tp" in _names(self.mesh):
            sum_partial_gradients(self.unwrapped, self.mesh["tp"])
        if self.experts:
            divide_gradients(self.experts, self.layout.degree("ep"))

    def step(self) -> None:
        """Clips when asked, updates the parameters and frees the gradients."""
        if self.layout.options.clip_norm is not None:
            self.clip_gradients(self.layout.options.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def logits(self, batch: Batch) -> Tensor:
        """Logits [B, S, V] of a micro-batch, the vocabulary whole. Every rank must call it; for tests."""
        return forward(self.module, batch)

    def named_parameters(self) -> Iterable[tuple[str, nn.Parameter]]:
        """Parameters under their Hugging Face names; a tied one once."""
        return self.unwrapped.named_parameters()

    def copies(self, name: str, parameter: nn.Parameter) -> tuple[int, bool]:  # noqa: ARG002 - for overrides
        """How many ranks hold the same elements of a parameter, and whether this rank is the first of them."""
        mesh, dims = self.mesh, [axis for axis in range(self.mesh.ndim) if _names(self.mesh)[axis] != "pp"]
        if isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
            # A mesh of fewer ranks would have copies on the others, which nothing here counts.
            assert mesh.size() == math.prod(self.mesh.size(dim) for dim in dims)
            dims = [dim for dim, placement in enumerate(parameter.placements) if placement.is_replicate()]
        coordinate = mesh.get_coordinate()
        assert coordinate is not None
        return math.prod(mesh.size(dim) for dim in dims), all(coordinate[dim] == 0 for dim in dims)

    def owned_numel(self) -> int:
        """Elements of parameters that this rank alone stands for: their sum over all ranks is the model's count."""
        return sum(
            _local(parameter).numel() for name, parameter in self.named_parameters() if self.copies(name, parameter)[1]
        )

    def full_parameters(self) -> dict[str, Tensor]:
        """Unsharded parameters by name. Every rank must call it. For tests and checks, not for a timed step."""
        return self.gather({name: _full(parameter.detach()) for name, parameter in self.named_parameters()})

    def full_gradients(self) -> dict[str, Tensor]:
        """Unsharded gradients by name, before `step`; without those that are None. Every rank must call it."""
        gradients = ((name, parameter.grad) for name, parameter in self.named_parameters())
        return self.gather({name: _full(gradient) for name, gradient in gradients if gradient is not None})

    def gather(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The union over ranks that hold different parameters."""
        return tensors

    def gradient_norm(self) -> Tensor:
        """Global L2 norm of the gradients, as float64, each element counted once. Every rank must call it."""
        by_copies: dict[int, list[Tensor]] = {}
        for name, parameter in self.named_parameters():
            if parameter.grad is not None:
                by_copies.setdefault(self.copies(name, parameter)[0], []).append(_local(parameter.grad))
        device = next(self.unwrapped.parameters()).device
        total = torch.zeros((), dtype=torch.float64, device=device)
        for copies, gradients in by_copies.items():
            total += get_total_norm(gradients).double() ** 2 / copies
        if dist.get_world_size() > 1:
            dist.all_reduce(total)
        return total.sqrt()

    def clip_gradients(self, clip_norm: float) -> None:
        """Scales all gradients down to a global norm, never waiting for the device. Every rank must call it.

        Pascanu et al., "On the difficulty of training recurrent neural networks", ICML 2013; the epsilon is torch's.
        """
        scale = (clip_norm / (self.gradient_norm() + 1e-6)).clamp(max=1.0)
        for _, parameter in self.named_parameters():
            if parameter.grad is not None:
                _local(parameter.grad).mul_(scale)


def train_step(sharded: Sharded, micro_batches: Sequence[Batch]) -> Tensor:
    """One optimizer update, the same loop for every strategy. Returns this rank's share of the loss before it."""
    loss = sharded.forward_backward(micro_batches)
    sharded.step()
    return loss


def compute_dtype(layout: Layout) -> torch.dtype | None:
    """The lower dtype of the matrix products, or None where they run in the parameters' own."""
    return torch.bfloat16 if layout.workload.compute_dtype is ComputeDtype.BFLOAT16 else None


def _names(mesh: DeviceMesh) -> tuple[str, ...]:
    assert mesh.mesh_dim_names is not None
    return mesh.mesh_dim_names


def _full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
