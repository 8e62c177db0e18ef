"""RMSNorm whose weight every rank of an axis holds, and whose input is a rank's own part of the activations."""

from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate


class ReplicatedNorm(nn.Module):
    """Qwen3's RMSNorm (Zhang & Sennrich, "Root Mean Square Layer Normalization", NeurIPS 2019) on plain tensors.

    Only the weight is a DTensor: as DTensors, its six elementwise operations would cost the host more than the GPU.
    """

    def __init__(self, norm: nn.Module, mesh: DeviceMesh, *, partial: bool, sent: bool) -> None:
        """Takes the weight [H] of Hugging Face's module over.

        Args:
            partial: each rank sees other positions or heads, so that the weight's gradient is a pending sum.
            sent: other ranks take part in what comes next. Under autocast the output then has its dtype, as the next
                product would have it in any case: Hugging Face's is float32, and twice as much to send.
        """
        super().__init__()
        weight = norm.weight
        assert isinstance(weight, nn.Parameter)
        self.weight = nn.Parameter(DTensor.from_local(weight.detach(), mesh, [Replicate()], run_check=False))
        self.variance_epsilon = cast("float", norm.variance_epsilon)
        self.gradient_placements = [Partial() if partial else Replicate()]
        self.sent = sent

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., H] -> [..., H]."""
        assert isinstance(self.weight, DTensor)
        weight_H = self.weight.to_local(grad_placements=self.gradient_placements)
        wide = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        output = weight_H * wide.to(hidden.dtype)
        return to_compute_dtype(output) if self.sent else output


def to_compute_dtype(hidden: Tensor) -> Tensor:
    """In the dtype of autocast where that is on: what autocast itself would do at the next product."""
    device_type = hidden.device.type
    return hidden.to(torch.get_autocast_dtype(device_type)) if torch.is_autocast_enabled(device_type) else hidden
