"""The canary: every collective that strategies use, on known values. If one is wrong, no equivalence can be judged.

gloo has had a reduce-scatter AVG that only summed: all strategies built on it would look wrong, or right by luck.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import FileStore

from perf.facts import jsonfile
from perf.measure.launch import Launcher
from perf.measure.server import RankContext
from strategies.value import Value

REDUCED = {"SUM": 3.0, "AVG": 1.5, "MAX": 2.0}
"""Of 1 on rank 0 and 2 on rank 1."""


class Song(Value, frozen=True, kw_only=True):
    """What came out of each collective on one rank."""

    values: dict[str, tuple[float, ...]]


def sing(payload: None, context: RankContext) -> None:
    """Entry point of the server, for two ranks: every tensor holds rank + 1, or counts up from ten times that."""
    store = FileStore(str(context.store), context.world_size)
    dist.init_process_group("gloo", store=store, rank=context.rank, world_size=context.world_size)
    song = Song(values={name: tuple(tensor.tolist()) for name, tensor in _values(context.rank).items()})
    jsonfile.write(context.folder / f"record-{context.rank}.json", song)
    context.report("recorded")
    dist.destroy_process_group()


def _values(rank: int) -> dict[str, Tensor]:
    values = {}
    for name in REDUCED:
        op, mine = getattr(dist.ReduceOp, name), torch.full((2,), rank + 1.0)
        reduced, of_list, of_tensor = mine.clone(), torch.empty(1), torch.empty(1)
        dist.all_reduce(reduced, op)
        dist.reduce_scatter(of_list, list(mine.split(1)), op)
        dist.reduce_scatter_tensor(of_tensor, mine, op)
        values |= {f"all_reduce {name}": reduced, f"reduce_scatter {name}": of_list}
        values[f"reduce_scatter_tensor {name}"] = of_tensor
    counting = torch.arange(4.0) + 10 * (rank + 1)
    gathered, exchanged = torch.empty(8), torch.empty(4)
    dist.all_gather_into_tensor(gathered, counting)
    dist.all_to_all_single(exchanged, counting)
    sent = counting.clone()
    dist.broadcast(sent, src=1)
    received = torch.empty(4)
    ops = [dist.P2POp(dist.isend, counting, 1 - rank), dist.P2POp(dist.irecv, received, 1 - rank)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return values | {
        "all_gather_into_tensor": gathered,
        "all_to_all_single": exchanged,
        "broadcast": sent,
        "send and recv": received,
    }


def right(rank: int) -> dict[str, tuple[float, ...]]:
    """What every collective must give on a rank."""
    first, second = (10.0, 11.0, 12.0, 13.0), (20.0, 21.0, 22.0, 23.0)
    half = slice(2 * rank, 2 * rank + 2)
    values: dict[str, tuple[float, ...]] = {}
    for name, value in REDUCED.items():
        values |= {f"all_reduce {name}": (value, value), f"reduce_scatter {name}": (value,)}
        values[f"reduce_scatter_tensor {name}"] = (value,)
    return values | {
        "all_gather_into_tensor": first + second,
        "all_to_all_single": first[half] + second[half],
        "broadcast": second,
        "send and recv": first if rank else second,
    }


def wrong(songs: list[Song]) -> list[str]:
    """Each collective that is not right, with what it gave."""
    return [
        f"{name} gives {song.values.get(name)} on rank {rank}, not {expected}"
        for rank, song in enumerate(songs)
        for name, expected in right(rank).items()
        if song.values.get(name) != expected
    ]


def listen(launcher: Launcher) -> list[Song]:
    """The canary's song on both ranks."""
    return launcher.run("tests.canary:sing", None, world_size=2, record=Song, deadline_s=60.0)[0]
