"""Gradients of parameters that every rank of an axis holds, but of which each saw a part of the heads or positions."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate


@torch.no_grad()
def sum_partial_gradients(model: nn.Module, tp_mesh: DeviceMesh) -> None:
    """Gives every gradient the placement of its parameter on `tp_mesh`, by one all-reduce for all of them.

    Only replicated parameters that saw a part of the heads or positions have others: pending sums. Left to the
    optimizer, each of its operations would make the sum again.
    """
    pending = [(parameter, parameter.grad) for parameter in model.parameters() if _is_partial(parameter.grad)]
    if not pending:
        return
    pieces = [gradient.to_local().flatten() for _, gradient in pending if isinstance(gradient, DTensor)]
    flat = torch.cat(pieces)
    dist.all_reduce(flat, group=tp_mesh.get_group())
    for (parameter, _), summed in zip(pending, flat.split([piece.numel() for piece in pieces]), strict=True):
        whole = summed.view(parameter.shape)
        parameter.grad = DTensor.from_local(whole, tp_mesh, [Replicate()], run_check=False)


def _is_partial(gradient: Tensor | None) -> bool:
    return isinstance(gradient, DTensor) and any(placement.is_partial() for placement in gradient.placements)
