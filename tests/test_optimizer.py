"""Room strategies/optimizer.py: AdamW with moments in bfloat16 is AdamW, and really stores half the bytes."""

import pytest
import torch
from torch import nn

from strategies.layout import Layout, default_workload
from strategies.optimizer import ADAMW, LowStateAdamW, adamw
from strategies.shapes import SIZES
from strategies.spec import ComputeDtype, Mode, Options, StrategyName


def layout(state=ComputeDtype.FLOAT32, mode=Mode.EAGER):
    return Layout(
        strategy=StrategyName.SINGLE,
        shape=SIZES["tiny"],
        world_size=1,
        workload=default_workload("tiny"),
        mode=mode,
        options=Options(optimizer_state=state),
    )


def weights(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype)) for shape in ((6, 4), (5,))]


def update(optimizer, parameters, steps=3):
    """Gradients of the same random sequence, whatever the optimizer."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        optimizer.step()


def state_bytes(optimizer):
    moments = (state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq"))
    return sum(moment.numel() * moment.element_size() for moment in moments)


def test_with_moments_in_the_parameters_dtype_it_is_torchs_adamw():
    class Exact(LowStateAdamW):
        STATE_DTYPE = torch.float64

    mine, theirs = weights(torch.float64), weights(torch.float64)
    update(Exact(mine, lr=1e-2, **ADAMW), mine)
    update(torch.optim.AdamW(theirs, lr=1e-2, **ADAMW), theirs)
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


def test_moments_are_stored_in_half_the_bytes_and_round_the_update_a_little():
    both = {state: weights() for state in ComputeDtype}
    optimizers = {state: adamw(parameters, layout(state)) for state, parameters in both.items()}
    for state, optimizer in optimizers.items():
        update(optimizer, both[state])
    low, full = (optimizers[state] for state in (ComputeDtype.BFLOAT16, ComputeDtype.FLOAT32))
    assert 2 * state_bytes(low) == state_bytes(full) == 2 * 4 * (6 * 4 + 5)
    assert {state["exp_avg"].dtype for state in low.state.values()} == {torch.bfloat16}
    starts = weights()
    for start, rounded, right in zip(starts, both[ComputeDtype.BFLOAT16], both[ComputeDtype.FLOAT32], strict=True):
        assert 0 < (rounded - right).abs().max() < 0.02 * (right - start).abs().max()


def test_parameter_without_a_gradient_is_left_alone():
    first, second = weights()
    before = second.detach().clone()
    optimizer = LowStateAdamW([first, second], lr=1e-2, **ADAMW)
    first.grad = torch.ones_like(first)
    optimizer.step()
    assert torch.equal(second, before)
    assert second not in optimizer.state


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_it_makes_the_same_updates():
    eager, compiled = weights(), weights()
    update(adamw(eager, layout(ComputeDtype.BFLOAT16)), eager)
    update(adamw(compiled, layout(ComputeDtype.BFLOAT16, Mode.COMPILE)), compiled)
    for one, other in zip(eager, compiled, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
