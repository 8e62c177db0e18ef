"""The feed-forward parts of Qwen3-MoE on one rank: tokens in the order of their experts, and a product for all experts.

Gale et al., "MegaBlocks: Efficient Sparse Training with Mixture-of-Experts", MLSys 2023: no token is dropped or padded.
API: torch.nn.functional.grouped_mm.

T = tokens, H = hidden size, I = intermediate size, E = experts, k = experts a token, N = T k, R = rows.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.integrations.moe import ExpertsInterface

GROUPED = "grouped_products"
"""Registered name of `apply_experts`."""


def by_expert(hidden_TH: Tensor, chosen_Tk: Tensor) -> tuple[Tensor, Tensor]:
    """Each token as often as it has experts, in the order of these: rows [N, H] and where each came from [N]."""
    order_N = chosen_Tk.flatten().argsort(stable=True)
    # Not hidden[order // k]: that gradient would be a scatter of k summands in bfloat16; this one is a sum in float32.
    return hidden_TH.unsqueeze(1).expand(-1, chosen_Tk.shape[1], -1).flatten(0, 1)[order_N], order_N


def by_token(outputs_NH: Tensor, order_N: Tensor, weights_Tk: Tensor) -> Tensor:
    """The reverse: the outputs of a token's experts, weighted and summed, [T, H]."""
    back_N = torch.empty_like(order_N).scatter_(0, order_N, torch.arange(order_N.shape[0], device=order_N.device))
    outputs_TkH = outputs_NH[back_N].unflatten(0, weights_Tk.shape)
    summed_TH: Tensor = (outputs_TkH * weights_Tk.unsqueeze(-1).to(outputs_TkH.dtype)).sum(1)
    return summed_TH


def products(
    hidden_RH: Tensor, counts_E: Tensor, gate_up_EIH: Tensor, down_EHI: Tensor, activation: nn.Module
) -> Tensor:
    """The experts on rows that lie in their order.

    Args:
        counts_E: rows of each expert; some may have none.
        gate_up_EIH: both first matrices of each, one after the other, [E, 2 I, H].
        down_EHI: [E, H, I].

    Returns:
        [R, H] in the dtype of the products: autocast's where that is on, else the rows' own.
    """
    dtype, kind = hidden_RH.dtype, hidden_RH.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
    hidden_RH, gate_up_EIH, down_EHI = (tensor.to(dtype) for tensor in (hidden_RH, gate_up_EIH, down_EHI))
    if dtype is torch.bfloat16:
        ends_E = counts_E.cumsum(0).to(torch.int32)
        gate_RI, up_RI = F.grouped_mm(hidden_RH, gate_up_EIH.mT, offs=ends_E).chunk(2, dim=-1)
        return F.grouped_mm(activation(gate_RI) * up_RI, down_EHI.mT, offs=ends_E)
    outputs = []  # grouped_mm knows no float64, and float32 on some devices only
    for index, rows in enumerate(hidden_RH.split(counts_E.tolist())):
        gate, up = F.linear(rows, gate_up_EIH[index]).chunk(2, dim=-1)
        outputs.append(F.linear(activation(gate) * up, down_EHI[index]))
    return torch.cat(outputs)


def counts_of(chosen_Tk: Tensor, num_experts: int) -> Tensor:
    """How many tokens each expert gets, [E], without waiting for the device."""
    zeros_E = torch.zeros(num_experts, dtype=torch.int64, device=chosen_Tk.device)
    return zeros_E.scatter_add_(0, chosen_Tk.flatten(), torch.ones_like(chosen_Tk.flatten()))


def apply_experts(experts: Any, hidden_TH: Tensor, chosen_Tk: Tensor, weights_Tk: Tensor) -> Tensor:
    """What Hugging Face's modules call in place of their own, whose grouped product autocast leaves in float32."""
    rows_NH, order_N = by_expert(hidden_TH, chosen_Tk)
    counts_E = counts_of(chosen_Tk, experts.num_experts)
    outputs_NH = products(rows_NH, counts_E, experts.gate_up_proj, experts.down_proj, experts.act_fn)
    return by_token(outputs_NH, order_N, weights_Tk)


ExpertsInterface.register(GROUPED, apply_experts)
