"""What a rank does in the tests of the ledger: steps of a strategy, every collective by hand, sums of known values."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed import FileStore
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from perf.facts import jsonfile
from perf.facts.record import LedgerEntry
from perf.measure.comms import Ledger
from perf.measure.probes import CompileProbe
from perf.measure.server import RankContext
from strategies.batch import synthetic_batch
from strategies.layout import Layout
from strategies.registry import build
from strategies.sharded import BuildConfig, Sharded, train_step
from strategies.value import Value

CPU = torch.device("cpu")
NUM_VALUES = 6
"""Elements of the tensor that the collectives by hand are given."""


class Steps(Value, frozen=True, kw_only=True):
    """Steps of a strategy to watch."""

    layout: Layout
    planted: str | None = None
    """`extra_all_reduce` after every update, or `float16` gradients on the wire."""


class Seen(Value, frozen=True, kw_only=True):
    """What one rank saw of its steps."""

    ledgers: tuple[tuple[LedgerEntry, ...], ...]
    """Of two steps."""
    profiled: dict[str, int]
    """Calls of the c10d ops of a third step, as torch's profiler counts them."""
    ran_silu: bool
    """Whether the activation was dispatched as an op of its own: compiled code fuses it."""
    graphs: int


class Calls(Value, frozen=True, kw_only=True):
    """What the ledgers say of collectives by hand."""

    ledgers: dict[str, tuple[LedgerEntry, ...]]
    num_arrivals: int
    """In the last of the ledgers."""


class WatchfulLedger(Ledger):
    """Also notes whether the MLP's activation comes by."""

    ran_silu = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ran_silu = self.ran_silu or func is torch.ops.aten.silu.default
        return super().__torch_dispatch__(func, types, args, kwargs)


def steps(payload: dict[str, Any], context: RankContext) -> None:
    """Entry point of the server: two steps under a ledger, a third under the profiler."""
    task = jsonfile.convert(payload, Steps, source="steps")
    _join(context)
    sharded = build(BuildConfig(layout=task.layout, device=CPU))
    _plant(task, sharded)
    workload = task.layout.workload
    batches = [
        sharded.micro_batches(synthetic_batch(task.layout.shape, workload, step=step, device=CPU)) for step in range(5)
    ]
    for batch in batches[:2]:
        train_step(sharded, batch)  # DDP fixes its buckets after the first step
    ledgers = [WatchfulLedger(sharded.mesh, sharded.averaged) for _ in range(2)]
    for ledger, batch in zip(ledgers, batches[2:4], strict=True):
        with ledger:
            train_step(sharded, batch)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        train_step(sharded, batches[4])
    seen = Seen(
        ledgers=tuple(ledger.entries() for ledger in ledgers),
        profiled=dict(Counter(event.name for event in profile.events() if event.name.startswith("c10d::"))),
        ran_silu=any(ledger.ran_silu for ledger in ledgers),
        graphs=CompileProbe().state().graphs,
    )
    _leave(context, seen)


def calls(payload: None, context: RankContext) -> None:
    """Entry point of the server: each collective by hand under a ledger of its own, and three under one."""
    mesh = _join(context)

    def three() -> None:
        for payload in (torch.ones(2), torch.ones(5), torch.ones(1, dtype=torch.int64)):
            dist.all_reduce(payload, group=mesh.get_group("dp"))

    _leave(context, _ledgers(mesh, _calls(mesh, context.rank) | {"three": three}))


def axes(payload: None, context: RankContext) -> None:
    """Entry point of the server: four ranks as a 2 x 2 mesh; a sum over each axis, over all, over a new group."""
    _join(context)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    groups = {"dp": mesh.get_group("dp"), "tp": mesh.get_group("tp"), "all": dist.group.WORLD}
    groups["new"] = dist.new_group([0, 1, 2, 3])
    sums = {name: partial(dist.all_reduce, torch.ones(1), group=group) for name, group in groups.items()}
    _leave(context, _ledgers(mesh, sums))


def _join(context: RankContext) -> DeviceMesh:
    torch.set_num_threads(1)
    store = FileStore(str(context.store), context.world_size)
    dist.init_process_group("gloo", store=store, rank=context.rank, world_size=context.world_size)
    return init_device_mesh("cpu", (context.world_size,), mesh_dim_names=("dp",))


def _leave(context: RankContext, record: Value) -> None:
    jsonfile.write(context.folder / f"record-{context.rank}.json", record)
    context.report("recorded")
    dist.destroy_process_group()


def _ledgers(mesh: DeviceMesh, calls_by_name: dict[str, Callable[[], object]]) -> Calls:
    ledgers = {name: Ledger(mesh) for name in calls_by_name}
    for name, call in calls_by_name.items():
        with ledgers[name]:
            call()
    arrivals_s = list(ledgers.values())[-1].arrivals_s
    assert arrivals_s == sorted(arrivals_s)
    return Calls(ledgers={name: ledger.entries() for name, ledger in ledgers.items()}, num_arrivals=len(arrivals_s))


def _plant(task: Steps, sharded: Sharded) -> None:
    if task.planted == "float16":
        sharded.module.register_comm_hook(sharded.mesh.get_group("dp"), fp16_compress_hook)
    elif task.planted == "extra_all_reduce":
        group = sharded.mesh.get_group("dp")
        sharded.optimizer.register_step_post_hook(lambda *_: dist.all_reduce(torch.zeros(3), group=group))


def _calls(mesh: DeviceMesh, rank: int) -> dict[str, Callable[[], object]]:
    """Each collective with six float32 values as this rank's payload."""
    group, axis = mesh.get_group("dp"), (mesh, 0)
    mine, wide, peer = torch.ones(NUM_VALUES), torch.empty(2 * NUM_VALUES), 1 - rank
    halves = list(mine.chunk(2))
    split = distribute_tensor(torch.ones(2 * NUM_VALUES), mesh, [Shard(0)])

    def swap() -> None:
        send = dist.P2POp(dist.isend, mine, peer, group)
        receive = dist.P2POp(dist.irecv, torch.empty(NUM_VALUES), peer, group)
        for work in dist.batch_isend_irecv([send, receive]):
            work.wait()

    def exchange_and_back() -> None:
        functional.all_to_all_single_autograd(mine.clone().requires_grad_(), None, None, axis).sum().backward()

    # gloo has the list form of all-to-all since torch 2.12.
    in_lists = lambda: dist.all_to_all(list(torch.empty(NUM_VALUES).chunk(2)), halves, group=group)  # noqa: E731
    return ({"all_to_all": in_lists} if torch.__version__ >= "2.12" else {}) | {
        "all_reduce": lambda: dist.all_reduce(mine.clone(), group=group),
        "all_gather": lambda: dist.all_gather(list(wide.chunk(2)), mine, group=group),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(wide, mine, group=group),
        "reduce_scatter": lambda: dist.reduce_scatter(torch.empty(3), halves, group=group),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(torch.empty(3), mine, group=group),
        "broadcast": lambda: dist.broadcast(mine.clone(), src=0, group=group),
        "reduce": lambda: dist.reduce(mine.clone(), dst=0, group=group),
        "all_to_all_single": lambda: dist.all_to_all_single(torch.empty(NUM_VALUES), mine, group=group),
        "batch_isend_irecv": swap,
        "barrier": lambda: dist.barrier(group=group),
        "functional.all_reduce": lambda: functional.all_reduce(mine, "sum", axis).sum(),
        "functional.all_gather": lambda: functional.all_gather_tensor(mine, 0, axis).sum(),
        "functional.reduce_scatter": lambda: functional.reduce_scatter_tensor(mine, "sum", 0, axis).sum(),
        "functional.all_to_all": lambda: functional.all_to_all_single(mine, None, None, axis).sum(),
        "functional.broadcast": lambda: functional.broadcast(mine, 0, axis).sum(),
        "functional.in_place": lambda: functional.all_reduce_inplace(mine.clone(), "sum", axis),
        "functional.coalesced": lambda: sum(
            part.sum() for part in functional.all_gather_into_tensor_coalesced(halves, axis)
        ),
        "autograd": exchange_and_back,
        "dtensor": split.full_tensor,
        "inside_dtensor_op": lambda: split.sum().exp(),
    }
