"""AdamW, as Qwen-like pre-training uses it: torch's fused one, or one that stores its moments in a lower dtype.

Loshchilov & Hutter, "Decoupled Weight Decay Regularization", ICLR 2019.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from strategies.layout import Layout
from strategies.spec import ComputeDtype, Mode

ADAMW = {"betas": (0.9, 0.95), "weight_decay": 0.1}


def adamw(parameters: Iterable[nn.Parameter], layout: Layout) -> torch.optim.Optimizer:
    """The optimizer of a layout over parameters as they are now: make it after every cut."""
    kind, settings = adamw_class(layout)
    # One group for each mesh: torch updates the parameters of a group together, and cannot do so over several.
    groups: dict[object, list[nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault(parameter.device_mesh if isinstance(parameter, DTensor) else None, []).append(parameter)
    return kind([{"params": group} for group in groups.values()], **settings)


def adamw_class(layout: Layout) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """The class and its keyword arguments, for wrappers that make the optimizer themselves."""
    settings: dict[str, Any] = {"lr": layout.workload.learning_rate, **ADAMW}
    if layout.options.optimizer_state is ComputeDtype.FLOAT32:
        # The fused update keeps its step count on the device in any case; torch wants to hear that it may be captured.
        return torch.optim.AdamW, settings | {"fused": True, "capturable": layout.mode is Mode.CUDAGRAPH}
    return LowStateAdamW, settings | {"compiled": layout.compiled}


class LowStateAdamW(torch.optim.Optimizer):
    """AdamW whose two moments are stored in bfloat16, half of float32's bytes, and computed with in float32.

    torch's own stores them in the parameters' dtype. Works on the local parts of DTensors: AdamW is elementwise.
    """

    STATE_DTYPE = torch.bfloat16

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        compiled: bool = False,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self._update = _compiled_update() if compiled else _update

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update. Closures are not supported."""
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_one(parameter, group)

    def _step_one(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        value, gradient = _local(parameter), _local(parameter.grad)
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float64, device=value.device)
            state["exp_avg"] = torch.zeros_like(value, dtype=self.STATE_DTYPE)
            state["exp_avg_sq"] = torch.zeros_like(value, dtype=self.STATE_DTYPE)
        state["step"] += 1
        first, second = group["betas"]
        self._update(
            value.view(-1),
            gradient.view(-1),
            state["exp_avg"].view(-1),
            state["exp_avg_sq"].view(-1),
            state["step"],
            group["lr"],
            first,
            second,
            group["eps"],
            group["weight_decay"],
        )


def _update(
    value: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: Tensor,
    learning_rate: float,
    first: float,
    second: float,
    eps: float,
    weight_decay: float,
) -> None:
    """Algorithm 2 of the paper on flat tensors, in place."""
    wide = torch.promote_types(value.dtype, torch.float32)
    gradient = gradient.to(wide)
    mean = exp_avg.to(wide).lerp(gradient, 1 - first)
    square = exp_avg_sq.to(wide).lerp(gradient * gradient, 1 - second)
    exp_avg.copy_(mean)
    exp_avg_sq.copy_(square)
    mean = mean / (1 - first**step)
    square = square / (1 - second**step)
    value.mul_(1 - learning_rate * weight_decay).sub_(learning_rate * mean / (square.sqrt() + eps))


@functools.cache
def _compiled_update() -> Callable[..., None]:
    """One graph for all sizes."""
    return torch.compile(_update, dynamic=True)


def _local(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
