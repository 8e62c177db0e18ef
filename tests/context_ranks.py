"""What a rank does in the tests of context-parallel attention: its share beside full attention in the same process."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.utils import counters
from torch.distributed import FileStore
from torch.distributed.device_mesh import init_device_mesh

from perf.facts import jsonfile
from perf.measure.server import RankContext
from strategies import block_attention, ring_attention, ulysses
from strategies.context_index import contiguous_index, usp_index, zigzag_index
from strategies.spec import Value

NUM_SEQUENCES, HEAD_DIM = 2, 8
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
Cut = tuple[Attention, Tensor]
"""Attention of local tensors, and the positions that they hold."""


class Task(Value, frozen=True, kw_only=True):
    """An attention to compare with full attention."""

    variant: str
    """`ring`, `ulysses` or `usp` (2 x 2)."""
    dtype: str = "float64"
    sequence_length: int = 32
    heads: int = 4
    kv_heads: int = 2
    largest_score: float = 4.0
    documents: tuple[int, ...] | None = None
    """Id of each position's document in the first sequence; the second one has them in reverse order."""
    compiled: bool = False
    planted: str | None = None


class Errors(Value, frozen=True, kw_only=True):
    """Largest |a - b| / largest |b| of this rank's share."""

    output: float
    grad_q: float
    grad_k: float
    grad_v: float
    graph_breaks: int = 0


class Changes(Value, frozen=True, kw_only=True):
    """Which outputs move when the key and value at one position do."""

    positions: tuple[int, ...]
    """That this rank holds."""
    changed: tuple[tuple[int, ...], ...]
    """By the position that moved: this rank's positions, of the first sequence, whose output is another."""


def compare(payload: dict[str, Any], context: RankContext) -> None:
    """Entry point of the server: output and gradients of this rank's share beside those of full attention."""
    task = jsonfile.convert(payload, Task, source="task")
    _join(context)
    PLANTS[task.planted]()
    inputs = _inputs(task)
    scale = _scale(task, inputs)
    attention, index = _cut(task, scale, context)
    wide = [tensor.double().requires_grad_() for tensor in inputs[:3]]
    expected_output = _full_attention(*wide, scale, _documents(task))
    expected = [expected_output, *torch.autograd.grad(expected_output, wide, inputs[3].double())]
    if task.compiled:
        attention = torch.compile(attention, backend="aot_eager", fullgraph=task.variant == "ulysses", dynamic=False)
    mine = [_share(tensor, index).requires_grad_() for tensor in inputs[:3]]
    output = attention(*mine)
    actual = [output, *torch.autograd.grad(output, mine, _share(inputs[3], index))]
    assert all(tensor.dtype == inputs[0].dtype for tensor in actual)
    distances = [
        _distance(one.detach().double(), other.detach(), index) for one, other in zip(actual, expected, strict=True)
    ]
    breaks = sum(counters["graph_break"].values())
    _leave(context, Errors(**dict(zip(Errors.__struct_fields__[:4], distances, strict=True)), graph_breaks=breaks))


def perturb(payload: dict[str, Any], context: RankContext) -> None:
    """Entry point of the server: moves the key and value at each position in turn."""
    task = jsonfile.convert(payload, Task, source="task")
    _join(context)
    PLANTS[task.planted]()
    q, k, v, _ = _inputs(task)
    attention, index = _cut(task, 1.0, context)
    before = attention(*(_share(tensor, index) for tensor in (q, k, v)))
    changed = []
    for position in range(task.sequence_length):
        moved = [tensor.clone() for tensor in (k, v)]
        for tensor in moved:
            tensor[:, :, position] += 1.0
        after = attention(*(_share(tensor, index) for tensor in (q, *moved)))
        changed.append(tuple(index[(after != before)[0].any(-1).any(0)].tolist()))
    _leave(context, Changes(positions=tuple(index.tolist()), changed=tuple(changed)))


def _join(context: RankContext) -> None:
    torch.set_num_threads(1)
    store = FileStore(str(context.store), context.world_size)
    dist.init_process_group("gloo", store=store, rank=context.rank, world_size=context.world_size)


def _leave(context: RankContext, record: Value) -> None:
    jsonfile.write(context.folder / f"record-{context.rank}.json", record)
    context.report("recorded")
    dist.destroy_process_group()


def _inputs(task: Task) -> list[Tensor]:
    """Queries, keys, values and the gradient by the output, of whole sequences [B, heads, S, D]."""
    generator = torch.Generator().manual_seed(7)
    heads = (task.heads, task.kv_heads, task.kv_heads, task.heads)
    shapes = [(NUM_SEQUENCES, number, task.sequence_length, HEAD_DIM) for number in heads]
    drawn = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return [tensor.to(getattr(torch, task.dtype)) for tensor in drawn]


def _scale(task: Task, inputs: list[Tensor]) -> float:
    """Of the scores, so that the largest one is the task's."""
    q, k = inputs[0].double(), inputs[1].double().repeat_interleave(task.heads // task.kv_heads, dim=1)
    return task.largest_score / float((q @ k.mT).abs().max())


def _documents(task: Task) -> Tensor | None:
    return None if task.documents is None else torch.tensor([task.documents, task.documents[::-1]])


def _full_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, documents: Tensor | None) -> Tensor:
    """Softmax over all scores at once, by nothing but elementary ops."""
    group = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(group, dim=1).mT * scale
    sees = torch.ones(scores.shape[-2:], dtype=torch.bool).tril().expand(q.shape[0], 1, -1, -1)
    if documents is not None:
        sees = sees & (documents[:, None, :, None] == documents[:, None, None, :])
    return scores.masked_fill(~sees, -torch.inf).softmax(-1) @ v.repeat_interleave(group, dim=1)


def _cut(task: Task, scale: float, context: RankContext) -> Cut:
    length, rank, world, documents = task.sequence_length, context.rank, context.world_size, _documents(task)
    everyone = dist.group.WORLD
    if task.variant == "ring":
        attention = lambda q, k, v: ring_attention.ring_attention(q, k, v, everyone, scale, documents)  # noqa: E731
        return attention, zigzag_index(length, world, rank)
    if task.variant == "ulysses":
        attention = lambda q, k, v: ulysses.ulysses_attention(q, k, v, everyone, scale, documents)  # noqa: E731
        return attention, contiguous_index(length, world, rank)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ring", "ulysses"))
    ring, heads = mesh.get_group("ring"), mesh.get_group("ulysses")
    attention = lambda q, k, v: ulysses.usp_attention(q, k, v, ring, heads, scale, documents)  # noqa: E731
    return attention, usp_index(length, 2, dist.get_rank(ring), 2, dist.get_rank(heads))


def _share(tensor: Tensor, index: Tensor) -> Tensor:
    """[B, heads, positions, D] with the positions before the heads in memory, as a model's projections give it."""
    return tensor[:, :, index].transpose(1, 2).contiguous().transpose(1, 2)


def _distance(actual: Tensor, expected: Tensor, index: Tensor) -> float:
    assert torch.isfinite(actual).all()
    return float((actual - expected[:, :, index]).abs().max() / expected.abs().max())


def _plant_merge_without_rescaling() -> None:
    def merge(output: Tensor, log_sum_exp: Tensor, block_output: Tensor, block_log_sum_exp: Tensor) -> None:
        output.add_(block_output).mul_(0.5)
        torch.logaddexp(log_sum_exp, block_log_sum_exp, out=log_sum_exp)

    ring_attention.merge = merge


def _plant_only_own_block() -> None:
    ring_attention.merge = lambda *_: None


def _plant_wrong_chunk() -> None:
    right = ring_attention.visible_block

    def visible_block(rank: int, source: int, length: int) -> ring_attention.Block:
        block = right(rank, source, length)
        if source < rank:
            return ring_attention.Block(rank, source, block.queries, slice(length // 2, length))
        return block

    ring_attention.visible_block = visible_block


def _plant_gradient_of_one_repeat() -> None:
    block_attention.sum_repeats = lambda grad, kv_heads: grad.unflatten(1, (kv_heads, -1))[:, :, 0]


def _plant_block_log_sum_exp() -> None:
    """The backward takes each block for the whole row."""
    right = block_attention.attend_backward

    def attend_backward(*tensors: Tensor, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
        grad, q, k, v, output, _ = tensors
        return right(grad, q, k, v, output, block_attention.attend(q, k, v, **options)[1], **options)

    ring_attention.attend_backward = attend_backward


def _plant_detached_repeats() -> None:
    def repeat_heads(kv: Tensor, heads: int) -> Tensor:
        copies = kv.unsqueeze(2).expand(-1, -1, heads // kv.shape[1], -1, -1)
        return torch.cat([copies[:, :, :1], copies[:, :, 1:].detach()], 2).flatten(1, 2)

    ulysses.repeat_heads = repeat_heads


def _plant_tiled_repeats() -> None:
    ulysses.repeat_heads = lambda kv, heads: kv.repeat(1, heads // kv.shape[1], 1, 1)


def _plant_no_documents() -> None:
    right = ring_attention.document_mask
    ring_attention.document_mask = lambda documents, block, degree: right(torch.zeros_like(documents), block, degree)


PLANTS: dict[str | None, Callable[[], None]] = {
    None: lambda: None,
    "merge_without_rescaling": _plant_merge_without_rescaling,
    "only_own_block": _plant_only_own_block,
    "wrong_chunk": _plant_wrong_chunk,
    "gradient_of_one_repeat": _plant_gradient_of_one_repeat,
    "block_log_sum_exp": _plant_block_log_sum_exp,
    "detached_repeats": _plant_detached_repeats,
    "tiled_repeats": _plant_tiled_repeats,
    "no_documents": _plant_no_documents,
}
"""Mistakes, by name: each is made in the rank that plants it."""
