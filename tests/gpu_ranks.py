"""What a rank does in the tests on GPUs: the first steps of a cell, a replay that hangs, a watched step."""

import itertools
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed import FileStore
from torch.profiler import ProfilerActivity, profile

from perf.facts import jsonfile
from perf.facts.cell import Cell
from perf.facts.record import LedgerEntry
from perf.measure.comms import Ledger
from perf.measure.server import RankContext
from strategies import gpu_attention
from strategies.batch import Batch, synthetic_batch
from strategies.captured import CapturedStep
from strategies.registry import build, device_of
from strategies.ring_attention import merge
from strategies.sharded import BuildConfig, Sharded, train_step
from strategies.spec import STEPS_BEFORE_CAPTURE, Mode
from strategies.value import Value
from tests.equivalence import leave
from tests.shared_gpus import gpu_of

STEPS = 20


class Task(Value, frozen=True, kw_only=True):
    """A cell to train for some steps."""

    cell: Cell
    gradients: str
    """File of the gradients of the first step: written by the reference, compared with by all others."""
    steps: int = STEPS
    of_names: str = ""
    """Only gradients whose names have this in them: all of a large model's would fill a disk."""
    is_reference: bool = False
    stale: bool = False
    """Planted: replays go on with the batch of the capture."""


class Training(Value, frozen=True, kw_only=True):
    """The first steps as one rank saw them."""

    shares: tuple[float, ...]
    """Of the loss, each step's: the sum over the ranks is the loss."""
    gradient_norm: float
    errors: dict[str, float]
    """|a - b| / |b| in the L2 norm of each gradient of the first step, by name; of rank 0 only."""
    replays: int


class Watched(Value, frozen=True, kw_only=True):
    """One step, as the ledger and as torch's profiler counted it."""

    ledger: tuple[LedgerEntry, ...]
    host: dict[str, int]
    """Calls of NCCL by the names that torch gives them."""
    device: dict[str, int]
    """Kernels of NCCL by name."""


class Blocks(Value, frozen=True, kw_only=True):
    """Kernel and case -> errors of the forward and of the gradients."""

    errors: dict[str, dict[str, float]]


KERNELS = {
    "flash": (gpu_attention.flash_forward, gpu_attention.flash_backward),
    "cudnn": (gpu_attention.cudnn_forward, gpu_attention.cudnn_backward),
}


def train(payload: dict[str, Any], context: RankContext) -> None:
    """Entry point of the server: some steps, the first one's gradients kept or compared."""
    task = jsonfile.convert(payload, Task, source="task")
    sharded, batches = begin(task.cell, context, task.steps)
    shares = [sharded.forward_backward(batches[0])]
    norm = float(sharded.gradient_norm())
    gradients = {name: value for name, value in sharded.full_gradients().items() if task.of_names in name}
    if task.is_reference:
        save_file({name: gradient.contiguous() for name, gradient in gradients.items()}, task.gradients)
    errors = errors_of(gradients, Path(task.gradients)) if context.rank == 0 else {}
    del gradients
    sharded.step()
    captured = None
    for step in range(1, task.steps):
        if step == STEPS_BEFORE_CAPTURE and task.cell.mode is Mode.CUDAGRAPH:
            captured = CapturedStep(sharded, batches[step])
        batch = batches[min(step, STEPS_BEFORE_CAPTURE) if task.stale else step]
        shares.append(train_step(sharded, batch) if captured is None else captured(batch))
    found = Training(
        shares=tuple(float(share) for share in shares),
        gradient_norm=norm,
        errors=errors,
        replays=captured.num_replays if captured else 0,
    )
    if captured is not None:
        captured.free()
    leave(context, found)


def hang_in_replay(payload: dict[str, Any], context: RankContext) -> None:
    """Entry point of the server: the last rank leaves its second replay out, and the others wait on their GPUs."""
    cell = jsonfile.convert(payload, Cell, source="cell")
    sharded, batches = begin(cell, context, STEPS_BEFORE_CAPTURE + 3)
    for batch in batches[:STEPS_BEFORE_CAPTURE]:
        train_step(sharded, batch)
    captured = CapturedStep(sharded, batches[0])
    captured(batches[-3])
    torch.cuda.synchronize()
    context.report("replayed")
    if context.rank == context.world_size - 1:
        time.sleep(3600)
    captured(batches[-2])
    torch.cuda.synchronize()


def watch(payload: dict[str, Any], context: RankContext) -> None:
    """Entry point of the server: a warm step under the ledger, the next one under the profiler."""
    cell = jsonfile.convert(payload, Cell, source="cell")
    sharded, batches = begin(cell, context, 4)
    for batch in batches[:2]:
        train_step(sharded, batch)
    ledger = Ledger(sharded.mesh, sharded.averaged)
    with ledger:
        train_step(sharded, batches[2])
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        train_step(sharded, batches[3])
        torch.cuda.synchronize()
    host, device = Counter[str](), Counter[str]()
    for event in profiler.events():
        on_gpu = event.device_type == torch.autograd.DeviceType.CUDA
        if "nccl" in event.name.lower():
            (device if on_gpu else host)[event.name] += 1
    leave(context, Watched(ledger=ledger.entries(), host=dict(host), device=dict(device)))


def blocks(payload: dict[str, Any], context: RankContext) -> None:
    """Entry point of the server: rank 1 of a ring of 3 by each kernel, beside float32 matrices; no process group."""
    torch.cuda.set_device(0)
    found = {}
    for kernel, passes in KERNELS.items():
        for length, strided, shift in itertools.product((256, 1024), (False, True), (0.0, 120.0)):
            case = f"{kernel}, {length} positions{', strided' * strided}{f', scores near -{shift:g}' * bool(shift)}"
            found[case] = block_errors(*passes, length=length, strided=strided, shift=shift)
    jsonfile.write(context.folder / f"record-{context.rank}.json", Blocks(errors=found))
    context.report("recorded")


def block_errors(
    forward: Callable[..., Any], backward: Callable[..., Any], *, length: int, strided: bool, shift: float
) -> dict[str, float]:
    """|a - b| / |b| in the L2 norm; of the log-sum-exp the largest |a - b|. Not finite where a tensor is not."""
    generator = torch.Generator("cuda").manual_seed(0)
    scale = 128**-0.5

    def draw(heads: int) -> Tensor:
        tensor = torch.randn(2, length, heads, 128, device="cuda", generator=generator).bfloat16().transpose(1, 2)
        return tensor if strided else tensor.contiguous()

    q, grad, kv = draw(8), draw(8), [(draw(2), draw(2)) for _ in range(3)]
    if shift:
        q[..., 0] = 1.0
        for k, _ in kv:
            k[..., 0] = -shift / scale
    whole, first, second = slice(0, length), slice(0, length // 2), slice(length // 2, length)
    parts = [
        (whole, *kv[0], True),
        (whole, kv[1][0][:, :, first], kv[1][1][:, :, first], False),
        (second, *kv[2], False),
    ]
    for index, (rows, k, v, causal) in enumerate(parts):
        block, log_sum_exp = forward(q[:, :, rows], k, v, scale, causal)
        if index == 0:
            output, total = block.float(), log_sum_exp.clone().contiguous()
        else:
            merge(output[:, :, rows], total[:, :, rows], block, log_sum_exp)
    grad_q, grad_k, grad_v = torch.zeros_like(q, dtype=torch.float32), [], []
    for rows, k, v, causal in parts:
        some = (grad[:, :, rows], q[:, :, rows], k, v, output.bfloat16()[:, :, rows], total[:, :, rows].contiguous())
        by_q, by_k, by_v = backward(*some, scale, causal)
        grad_q[:, :, rows] += by_q
        grad_k.append(by_k)
        grad_v.append(by_v)
    actual = {"output": output, "q": grad_q, "k": torch.cat(grad_k, 2), "v": torch.cat(grad_v, 2)}
    exact, exact_total = exact_blocks(q, grad, parts, scale)
    if shift:  # along the feature that makes scores negative the gradient is a difference of large numbers
        actual["q"], exact["q"] = actual["q"][..., 1:], exact["q"][..., 1:]
    found = {name: float((actual[name].float() - exact[name]).norm() / exact[name].norm()) for name in exact}
    return found | {"log-sum-exp": float((total - exact_total).abs().max())}


def exact_blocks(q: Tensor, grad: Tensor, parts: list[Any], scale: float) -> tuple[dict[str, Tensor], Tensor]:
    """The same over all keys at once, in float32, without a kernel."""
    length = q.shape[2]
    seen = []
    for rows, k, _, causal in parts:
        mask = torch.zeros(length, k.shape[2], dtype=torch.bool, device="cuda")
        mask[rows] = torch.ones_like(mask[rows]).tril() if causal else True
        seen.append(mask)
    k, v = (torch.cat([part[index] for part in parts], 2).float().requires_grad_() for index in (1, 2))
    q = q.float().detach().requires_grad_()
    scores = (q @ k.repeat_interleave(4, 1).mT * scale).masked_fill(~torch.cat(seen, 1), -torch.inf)
    output = scores.softmax(-1) @ v.repeat_interleave(4, 1)
    output.backward(grad.float())
    return {"output": output.detach(), "q": q.grad, "k": k.grad, "v": v.grad}, scores.detach().logsumexp(-1)


def begin(cell: Cell, context: RankContext, num_steps: int) -> tuple[Sharded, list[list[Batch]]]:
    """A rank of the cell with its model, and its micro-batches of the first steps."""
    torch.set_num_threads(1)
    device = device_of(cell.device_kind, context.rank)
    if device.type == "cuda":
        device = gpu_of(context)
        torch.cuda.set_device(device)
    if cell.mode is Mode.CUDAGRAPH:
        torch.cuda.set_stream(torch.cuda.Stream())
    dist.init_process_group(
        "gloo" if device.type == "cpu" else "nccl",
        store=FileStore(str(context.store), context.world_size),
        rank=context.rank,
        world_size=context.world_size,
        device_id=None if device.type == "cpu" else device,
    )
    sharded = build(BuildConfig(layout=cell.layout, device=device))
    batches = [
        sharded.micro_batches(synthetic_batch(cell.shape, cell.workload, step=step, device=device))
        for step in range(num_steps)
    ]
    return sharded, batches


def errors_of(gradients: dict[str, Tensor], file: Path) -> dict[str, float]:
    device = next(iter(gradients.values())).device
    exact = load_file(file, device=str(device))
    assert gradients.keys() == exact.keys()
    return {name: float((gradients[name].float() - exact[name]).norm() / exact[name].norm()) for name in exact}
