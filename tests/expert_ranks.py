"""What a rank does in the tests of experts: a step of a model in which some experts get no token."""

from typing import Any

import torch
import torch.distributed as dist

from perf.facts import jsonfile
from perf.measure.server import RankContext
from strategies.value import Value
from tests.equivalence import Case, batch_of, join, leave, sharded_of


class Load(Value, frozen=True, kw_only=True):
    """Of the first layer."""

    tokens: tuple[int, ...]
    """That each expert of this rank got."""
    gradients: tuple[float, ...]
    """Largest element of the gradient of each expert of this rank, by its first matrices."""


def step(payload: dict[str, Any], context: RankContext) -> None:
    """Entry point of the server."""
    case = jsonfile.convert(payload, Case, source="case")
    join(context)
    sharded, batch = sharded_of(case, torch.float64), batch_of(case, 0)
    experts, tokens = sharded.experts[0], []
    products = experts._products

    def watched(hidden_RH: torch.Tensor, counts_L: torch.Tensor) -> torch.Tensor:
        tokens.append(counts_L.clone())
        return products(hidden_RH, counts_L)

    experts._products = watched  # type: ignore[method-assign]
    sharded.forward_backward(sharded.micro_batches(batch))
    gradient = experts.gate_up_proj.grad
    assert gradient is not None
    local = gradient.to_local()
    total = torch.stack(tokens).sum(0)
    everything = total.sum()
    dist.all_reduce(everything)
    assert int(everything) == batch.ids_BS.numel() * case.layout.shape.experts_per_token
    leave(context, Load(tokens=tuple(total.tolist()), gradients=tuple(local.abs().amax((1, 2)).tolist())))
