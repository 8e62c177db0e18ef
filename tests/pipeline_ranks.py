"""What a rank does in the tests of pipelines beside the comparison with the unsharded model: two steps, a clipping."""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import FileStore

from perf.facts import jsonfile
from perf.facts.record import LedgerEntry
from perf.measure.comms import Ledger
from perf.measure.server import RankContext
from strategies.layout import Layout
from strategies.model import build_model
from strategies.pipeline_parallel import Pipelined
from strategies.registry import shard
from strategies.sharded import BuildConfig, train_step
from strategies.value import Value
from tests.equivalence import CPU, synthetic_batch

NORMS = (3.0, 4.0, 12.0)
"""Of the gradients of the first rank, of the last one, and of the tied weight: sqrt(9 + 16 + 144) = 13."""


class Watched(Value, frozen=True, kw_only=True):
    """What one rank saw of two steps."""

    ledger: tuple[LedgerEntry, ...]
    """Of the second."""
    names: tuple[str, ...]
    """Of this rank's parameters."""
    num_copies_of_tied: int
    """Over all ranks."""
    copies_are_equal: bool
    """Bit by bit, after both steps."""
    holds_loss: bool
    """Whether the loss that the step returned was more than 0."""


class Gathered(Value, frozen=True, kw_only=True):
    """What one rank has of what all ranks put in."""

    values: dict[str, list[float]]
    shapes: dict[str, list[int]]
    dtypes: dict[str, str]
    num_bytes: int
    """That it gave to collectives."""


class Clipped(Value, frozen=True, kw_only=True):
    """The global norm of known gradients, and this rank's own and its tied ones after clipping to 1."""

    norm: float
    own: float
    tied: tuple[float, ...]


def two_steps(payload: dict[str, Any], context: RankContext) -> None:
    """Entry point of the server."""
    sharded, layout = _build(payload, context)
    losses, ledger = [], Ledger(sharded.mesh)
    for step in range(2):
        mine = sharded.micro_batches(synthetic_batch(layout.shape, layout.workload, step=step, device=CPU))
        if step == 0:
            losses.append(train_step(sharded, mine))
        else:
            with ledger:
                losses.append(train_step(sharded, mine))
    copies = _tied_copies(sharded)
    watched = Watched(
        ledger=ledger.entries(),
        names=tuple(name for name, _ in sharded.named_parameters()),
        num_copies_of_tied=len(copies),
        copies_are_equal=all(torch.equal(copy, copies[0]) for copy in copies),
        holds_loss=all(float(loss) > 0 for loss in losses),
    )
    _leave(context, watched)


def clipped(payload: dict[str, Any], context: RankContext) -> None:
    """Entry point of the server: one element of a layer's gradient on each rank, and one of the tied weight's."""
    sharded, _ = _build(payload, context)
    first, last, tied = NORMS
    own = None
    for name, parameter in sharded.named_parameters():
        parameter.grad = torch.zeros_like(parameter)
        if name == "model.embed_tokens.weight":
            parameter.grad.view(-1)[0] = tied
        elif own is None:
            own = parameter
            parameter.grad.view(-1)[0] = first if context.rank == 0 else last
    norm = float(sharded.gradient_norm())
    sharded.clip_gradients(1.0)
    assert own is not None
    copies = [float(copy.grad.view(-1)[0]) for copy in (sharded.embedding, sharded.head) if copy is not None]
    _leave(context, Clipped(norm=norm, own=float(own.grad.view(-1)[0]), tied=tuple(copies)))


def gathered(payload: dict[str, Any], context: RankContext) -> None:
    """Entry point of the server: each rank puts in views of one bucket of 1 MiB, one name from both, and a scalar."""
    sharded, _ = _build(payload, context)
    bucket = torch.arange(2**17, dtype=torch.float64) + 1000 * context.rank
    tensors = {f"{context.rank}.{index}": bucket[index : index + 4].view(2, 2).T for index in range(8)}
    tensors |= {"both": bucket[:1], f"scalar.{context.rank}": torch.tensor(context.rank, dtype=torch.bfloat16)}
    with Ledger() as ledger:
        whole = sharded.gather(tensors)
    record = Gathered(
        values={name: value.flatten().tolist() for name, value in whole.items()},
        shapes={name: list(value.shape) for name, value in whole.items()},
        dtypes={name: str(value.dtype) for name, value in whole.items()},
        num_bytes=sum(entry.bytes for entry in ledger.entries()),
    )
    _leave(context, record)


def _build(payload: dict[str, Any], context: RankContext) -> tuple[Pipelined, Layout]:
    torch.set_num_threads(1)
    layout = jsonfile.convert(payload, Layout, source="layout")
    store = FileStore(str(context.store), context.world_size)
    dist.init_process_group("gloo", store=store, rank=context.rank, world_size=context.world_size)
    model = build_model(layout.shape, device=CPU, seed=0, loss=layout.workload.loss)
    sharded = shard(model, BuildConfig(layout=layout, device=CPU))
    assert isinstance(sharded, Pipelined)
    return sharded, layout


def _tied_copies(sharded: Pipelined) -> list[torch.Tensor]:
    mine = [copy.detach() for copy in (sharded.embedding, sharded.head) if copy is not None]
    everyone: list[list[torch.Tensor]] = [[]] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return [copy for theirs in everyone for copy in theirs]


def _leave(context: RankContext, record: Value) -> None:
    jsonfile.write(context.folder / f"record-{context.rank}.json", record)
    context.report("recorded")
    dist.destroy_process_group()
