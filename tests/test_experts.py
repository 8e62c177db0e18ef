"""Room strategies/experts.py: grouped products are those of one expert after the other."""

import pytest
import torch
from torch import nn
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from strategies.experts import apply_experts, by_expert, by_token, counts_of, products

TOKENS, HIDDEN, EXPERTS, EACH = 13, 32, 6, 2


def experts(dtype):
    config = Qwen3MoeConfig(hidden_size=HIDDEN, moe_intermediate_size=16, num_experts=EXPERTS)
    config._experts_implementation = "eager"
    module = Qwen3MoeExperts(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0, 0.2, generator=generator)
    return module.to(dtype)


def routed(dtype):
    """Tokens, their experts (none has the last one) and weights."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator).to(dtype)
    chosen = torch.stack([torch.randperm(EXPERTS - 1, generator=generator)[:EACH] for _ in range(TOKENS)])
    return hidden.requires_grad_(), chosen, torch.rand(TOKENS, EACH, generator=generator).to(dtype).requires_grad_()


def gradients(module, forward, dtype):
    hidden, chosen, weights = routed(dtype)
    output = forward(module, hidden, chosen, weights)
    output.backward(torch.linspace(-1, 1, output.numel()).view_as(output).to(dtype))
    return [output.detach(), hidden.grad, weights.grad, *(parameter.grad for parameter in module.parameters())]


@pytest.mark.parametrize(("dtype", "band"), [(torch.float64, 1e-13), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_products_are_those_of_one_expert_after_the_other(dtype, band):
    ours = gradients(experts(dtype), apply_experts, dtype)
    exact = gradients(experts(torch.float64), lambda module, *of: module(*of), torch.float64)
    for one, other in zip(ours, exact, strict=True):
        assert one.dtype is dtype
        # From where rounded inputs lead, not from the rounded inputs themselves: they differ in the lower dtypes.
        assert float((one.double() - other).norm() / other.norm()) < band


def test_expert_without_a_token_has_a_gradient_of_zeros():
    *_, gate_up, down = gradients(experts(torch.bfloat16), apply_experts, torch.bfloat16)
    for gradient in (gate_up, down):
        assert (gradient[-1] == 0).all()
        assert (gradient[0] != 0).any()


def test_rows_come_back_to_their_tokens():
    hidden, chosen, _ = routed(torch.float64)
    rows, order = by_expert(hidden, chosen)
    assert chosen.flatten()[order].diff().min() >= 0
    assert counts_of(chosen, EXPERTS).tolist() == torch.bincount(chosen.flatten(), minlength=EXPERTS).tolist()
    weights = torch.full((TOKENS, EACH), 1 / EACH, dtype=torch.float64)
    torch.testing.assert_close(by_token(rows, order, weights), hidden)


def test_autocast_multiplies_in_its_dtype():
    module, (hidden, chosen, _) = experts(torch.float32), routed(torch.float32)
    rows, _ = by_expert(hidden, chosen)
    settings = (counts_of(chosen, EXPERTS), module.gate_up_proj, module.down_proj, nn.SiLU())
    with torch.autocast("cpu", torch.bfloat16):
        assert products(rows, *settings).dtype is torch.bfloat16
    assert products(rows, *settings).dtype is torch.float32
