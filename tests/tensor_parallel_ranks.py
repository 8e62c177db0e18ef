"""What a rank does in the tests of tensor parallelism: a step under the ledger, beside the unsharded model."""

from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn

from perf.facts import jsonfile
from perf.facts.record import LedgerEntry
from perf.measure.comms import Ledger
from perf.measure.probes import CompileProbe
from perf.measure.server import RankContext
from strategies import loss
from strategies.batch import Share, synthetic_batch
from strategies.layout import Layout
from strategies.loss import Head
from strategies.model import build_model, forward_loss
from strategies.registry import shard
from strategies.sharded import BuildConfig, compute_dtype, train_step
from strategies.spec import ComputeDtype
from strategies.value import Value
from tests.equivalence import CPU, join, leave, sharpen

CHUNK_TOKENS = 7


class Audited(Value, frozen=True, kw_only=True):
    """What one rank saw of its second step, and how far its first one was from the unsharded model in float32."""

    ledger: tuple[LedgerEntry, ...]
    gradient_error: float
    """Relative L2 distance of all gradients."""
    unsharded_gradient_error: float
    """The same of the unsharded model, when it computes in the layout's dtype."""
    loss_error: float
    graphs: int
    counts_tokens: bool
    local_bytes: int
    """Of the storage behind this rank's parameters."""


def audit(payload: dict[str, Any], context: RankContext) -> None:
    """Entry point of the server."""
    layout = jsonfile.convert(payload, Layout, source="layout")
    join(context)
    loss.CHUNK_TOKENS = CHUNK_TOKENS
    leave(context, _audited(layout))


def _audited(layout: Layout) -> Audited:
    workload = msgspec.structs.replace(layout.workload, compute_dtype=ComputeDtype.FLOAT32)
    exact_loss, exact = _gradients(msgspec.structs.replace(layout, workload=workload))
    _, rounded = _gradients(layout)
    sharded = shard(_model(layout), BuildConfig(layout=layout, device=CPU))
    mine = sharded.micro_batches(synthetic_batch(layout.shape, layout.workload, step=0, device=CPU))
    share = sharded.forward_backward(mine)
    dist.all_reduce(share)
    actual = sharded.full_gradients()
    sharded.step()
    ledger = Ledger(sharded.mesh)
    with ledger:
        train_step(sharded, mine)
    return Audited(
        ledger=ledger.entries(),
        gradient_error=_error(actual, exact),
        unsharded_gradient_error=_error(rounded, exact),
        loss_error=float((share - exact_loss).abs() / exact_loss),
        counts_tokens=sharded.counts_tokens,
        graphs=CompileProbe().state().graphs,
        local_bytes=sum(p.to_local().untyped_storage().nbytes() for _, p in sharded.named_parameters()),
    )


def _model(layout: Layout) -> nn.Module:
    model = build_model(layout.shape, device=CPU, seed=0)
    model.head = Head(kind=layout.workload.loss)
    sharpen(model)
    return model


def _gradients(layout: Layout) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of the unsharded model, computed in the dtype of the layout."""
    model = _model(layout)
    batch = synthetic_batch(layout.shape, layout.workload, step=0, device=CPU)
    shares = []
    for part in batch.micro_batches(Share(), size=layout.workload.micro_batch):
        with torch.autocast("cpu", dtype=compute_dtype(layout), enabled=compute_dtype(layout) is not None):
            shares.append(forward_loss(model, part))
        shares[-1].backward()
    return torch.stack(shares).detach().sum(), {name: p.grad for name, p in model.named_parameters()}


def _error(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert actual.keys() == expected.keys()
    far = torch.stack([(actual[name] - expected[name]).double().norm() for name in expected]).norm()
    return float(far / torch.stack([tensor.double().norm() for tensor in expected.values()]).norm())
