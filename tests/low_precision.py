"""bfloat16: how far a strategy is from the float32 unsharded model, beside how far the bfloat16 unsharded model is."""

from typing import Any

import torch
from torch import Tensor, nn

from perf.facts import jsonfile
from perf.measure.server import RankContext
from strategies.batch import Batch
from strategies.loss import loss_share
from strategies.model import forward
from strategies.value import Value
from tests.equivalence import Case, batch_of, join, leave, reference_of, sharded_of


class Errors(Value, frozen=True, kw_only=True):
    """|a - b| / |b| in the L2 norm, of the logits and of each gradient by its name."""

    sharded: dict[str, float]
    unsharded: dict[str, float]


def compare(payload: dict[str, Any], context: RankContext) -> None:
    """Entry point of the server: one forward and backward of three models on the same batch."""
    case = jsonfile.convert(payload, Case, source="case")
    join(context)
    batch = batch_of(case, 0)
    sharded = sharded_of(case, torch.float32)
    exact, exact_logits = _run(reference_of(case, torch.float32), batch)
    with torch.autocast("cpu", torch.bfloat16):
        rounded, rounded_logits = _run(reference_of(case, torch.float32), batch)
    mine = sharded.micro_batches(batch)
    with torch.no_grad(), sharded.autocast("cpu"):
        logits = torch.cat([sharded.logits(micro_batch) for micro_batch in mine])
    sharded.forward_backward(mine)
    share = sharded.share
    errors = Errors(
        sharded={"logits": _error(logits, share.of(exact_logits))} | _errors(sharded.full_gradients(), exact),
        unsharded={"logits": _error(share.of(rounded_logits), share.of(exact_logits))} | _errors(rounded, exact),
    )
    leave(context, errors)


def _run(model: nn.Module, batch: Batch) -> tuple[dict[str, Tensor], Tensor]:
    """Gradients by name, and logits."""
    logits_BSV = forward(model, batch)
    loss_share(logits_BSV, batch).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, logits_BSV.detach()


def _errors(actual: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    assert actual.keys() == exact.keys()
    return {name: _error(actual[name], exact[name]) for name in exact}


def _error(actual: Tensor, exact: Tensor) -> float:
    return float((actual.float() - exact.float()).norm() / exact.float().norm())
