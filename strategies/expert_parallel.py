"""`ep`: each rank holds some of a layer's experts, and tokens travel to theirs and back.

Lepikhin et al., "GShard: Scaling Giant Models with Conditional Computation and Automatic Sharding", 2020; the ranks are
data parallel ones too, as in Rajbhandari et al., "DeepSpeed-MoE", ICML 2022: each sees other sequences. The router and
all that is not an expert is replicated or sharded as a data part asks for it.

What a rank passes in per micro-batch and layer, T tokens of hidden size H, k experts a token, W ranks: forward one
all-to-all of the counts (as many integers as experts), one of T k H elements to the experts; what it got, as much on
average, goes back; in backward the same two again. How many tokens travel between two ranks is the router's choice, so
the host waits for the counts, and only the sum over the ranks is a fixed number.

T = tokens of a rank, k = experts a token, N = T k, E = experts, L = experts of a rank, R = rows that its experts get.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from strategies.experts import by_expert, by_token, counts_of, products
from strategies.model import Qwen3


class DistributedExperts(nn.Module):
    """A rank's experts of one layer, in place of Hugging Face's `mlp.experts`, with its parameters' names and order."""

    def __init__(self, experts: nn.Module, ep_mesh: DeviceMesh) -> None:
        """Cuts the whole experts, equal on all ranks, which are consumed."""
        super().__init__()
        self.gate_up_proj = _cut(experts.get_parameter("gate_up_proj"), ep_mesh)
        self.down_proj = _cut(experts.get_parameter("down_proj"), ep_mesh)
        self.num_experts = cast("int", experts.num_experts)
        self.act_fn = cast("nn.Module", experts.act_fn)
        self.group = ep_mesh.get_group()

    def forward(self, hidden_TH: Tensor, chosen_Tk: Tensor, weights_Tk: Tensor) -> Tensor:
        """The chosen experts' outputs, weighted and summed for each token, in its place: [T, H].

        torch.compile leaves it alone: how many tokens travel is known at run time only.
        """
        output_TH: Tensor = _outside_of_graphs(self._forward)(hidden_TH, chosen_Tk, weights_Tk)
        return output_TH

    def _forward(self, hidden_TH: Tensor, chosen_Tk: Tensor, weights_Tk: Tensor) -> Tensor:
        # In the order of their experts, rows are also in that of the ranks that hold these.
        rows_NH, order_N = by_expert(hidden_TH, chosen_Tk)
        degree, name = self.group.size(), self.group.group_name
        equal = [self.num_experts // degree] * degree
        counts_E = counts_of(chosen_Tk, self.num_experts)
        arrived_WL = _all_to_all(counts_E, equal, equal, name).view(degree, -1)
        sent, got = counts_E.view(degree, -1).sum(1).tolist(), arrived_WL.sum(1).tolist()
        outputs_RH = self._own(_Exchange.apply(rows_NH, sent, got, name), arrived_WL)
        return by_token(_Exchange.apply(outputs_RH, got, sent, name), order_N, weights_Tk)

    def _own(self, arrived_RH: Tensor, counts_WL: Tensor) -> Tensor:
        """This rank's experts on the rows that came, which lie by rank, then by expert; the same order comes out."""
        num_ranks, num_experts = counts_WL.shape
        expert_R = torch.arange(num_experts, device=counts_WL.device).repeat(num_ranks)
        expert_R = expert_R.repeat_interleave(counts_WL.flatten(), output_size=arrived_RH.shape[0])
        order_R = expert_R.argsort(stable=True)
        outputs_RH = self._products(arrived_RH[order_R], counts_WL.sum(0))
        return outputs_RH[order_R.argsort()]

    def _products(self, rows_RH: Tensor, counts_L: Tensor) -> Tensor:
        return products(rows_RH, counts_L, _local(self.gate_up_proj), _local(self.down_proj), self.act_fn)


def distribute_experts(model: Qwen3, ep_mesh: DeviceMesh) -> list[DistributedExperts]:
    """Cuts the experts of every layer over `ep_mesh`, in place; returns their new modules."""
    found = []
    for layer in model.model.layers.children():
        layer.mlp.experts = DistributedExperts(layer.mlp.experts, ep_mesh)
        found.append(layer.mlp.experts)
    return found


@torch.no_grad()
def divide_gradients(experts: list[DistributedExperts], averaged_degree: int) -> None:
    """Takes the scale of the loss out of the experts' gradients again.

    The loss is scaled for an average over all data ranks. An expert has the tokens of all ranks of its group already:
    its gradient is averaged only over the groups, if at all.
    """
    for parameter in (parameter for module in experts for parameter in module.parameters()):
        if parameter.grad is not None:
            _local(parameter.grad).div_(averaged_degree)


def _outside_of_graphs(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return cast("Callable[..., Tensor]", torch.compiler.disable(function, reason="routing is known at run time only"))


def _cut(whole: nn.Parameter, ep_mesh: DeviceMesh) -> nn.Parameter:
    return nn.Parameter(distribute_tensor(whole.detach(), ep_mesh, [Shard(0)], src_data_rank=None))


class _Exchange(torch.autograd.Function):
    """Rows to the ranks that `sent` says; in backward their gradients go the same ways back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], got: list[int], group_name: str) -> Tensor:
        ctx.settings = (got, sent, group_name)
        return _all_to_all(rows, got, sent, group_name)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        got, sent, group_name = ctx.settings
        return _all_to_all(grad, sent, got, group_name), None, None, None


def _all_to_all(rows: Tensor, got: list[int], sent: list[int], group_name: str) -> Tensor:
    """`got`, `sent`: rows from and to each rank."""
    started = torch.ops._c10d_functional.all_to_all_single(rows.contiguous(), got, sent, group_name)
    exchanged: Tensor = torch.ops._c10d_functional.wait_tensor(started)
    return exchanged


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
