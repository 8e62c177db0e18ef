"""What a rank does in an equivalence test: the strategy beside the unsharded model, in the same process."""

from dataclasses import replace
from typing import Any

import msgspec
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import FileStore
from transformers.models.qwen3 import modeling_qwen3
from transformers.models.qwen3_moe import modeling_qwen3_moe

from perf.facts import jsonfile
from perf.measure.server import RankContext
from strategies import loss
from strategies.batch import IGNORE_INDEX, Batch, from_ids, synthetic_batch
from strategies.layout import Layout
from strategies.loss import Head
from strategies.model import build_model, forward
from strategies.optimizer import adamw
from strategies.registry import shard
from strategies.shapes import ModelShape
from strategies.sharded import BuildConfig, Sharded
from strategies.spec import ComputeDtype, LossKind, Mode, Options, Workload
from strategies.value import Value
from tests.mistakes import MISTAKES

CPU = torch.device("cpu")
SHAPE = ModelShape(
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=64,
    vocab_size=98,
    tied_embeddings=True,
)
EXPERTS = {"num_experts": 8, "experts_per_token": 2, "intermediate_size": 24}
"""What makes the shape one of Qwen3-MoE."""
UPDATES = 2


class Case(Value, frozen=True, kw_only=True):
    """One strategy to compare with the unsharded model."""

    strategy: str
    world_size: int
    degrees: tuple[int, ...] = ()
    mode: Mode = Mode.EAGER
    dtype: str = "float64"
    changes: dict[str, int | bool] = msgspec.field(default_factory=dict)
    """Of the shape."""
    sequences: int = 8
    sequence_length: int = 16
    micro_batch: int = 2
    compute_dtype: ComputeDtype = ComputeDtype.FLOAT32
    loss: LossKind = LossKind.FULL
    options: Options = Options()
    masked_sequences: tuple[int, ...] = ()
    """Sequences whose labels do not count."""
    masked_positions: tuple[int, ...] = ()
    """Positions of every sequence whose labels do not count."""
    packed: bool = False
    """Two documents in each sequence, the border at another place in each."""
    mistake: str = ""
    """Planted: a name of `tests.mistakes`."""

    def __post_init__(self) -> None:
        if "ep" in self.strategy and "num_experts" not in self.changes:
            msgspec.structs.force_setattr(self, "changes", self.changes | EXPERTS)

    @property
    def layout(self) -> Layout:
        workload = Workload(
            sequences=self.sequences,
            sequence_length=self.sequence_length,
            micro_batch=self.micro_batch,
            compute_dtype=self.compute_dtype,
            learning_rate=1e-2,
            loss=self.loss,
        )
        return Layout(
            strategy=self.strategy,
            shape=msgspec.structs.replace(SHAPE, **self.changes),
            world_size=self.world_size,
            workload=workload,
            mode=self.mode,
            options=self.options,
            degrees=self.degrees,
        )


class Probe(Value, frozen=True, kw_only=True):
    """Positions of the last sequence, among those that this rank holds, whose logits moved."""

    moved: tuple[int, ...]


class Distances(Value, frozen=True, kw_only=True):
    """Largest |a - b| / largest |b| of a tensor, worst tensor, in the first step; names that only one side has."""

    rank: int
    logits: float
    loss: float
    gradients: float
    gradient_norm: float
    later: float
    """Of all of these in the steps after the first, which start from the updated parameters of either side."""
    parameters: float
    worst_gradient: str
    odd_names: tuple[str, ...]
    num_gradients: int
    owned_numel: int


def compare(payload: dict[str, Any], context: RankContext) -> None:
    """Entry point of the server: both models make the same updates; their distances go into the record."""
    case = jsonfile.convert(payload, Case, source="case")
    join(context)
    loss.CHUNK_TOKENS = 7  # several chunks in a micro-batch of 32 tokens, and a short one
    leave(context, _distances(case, context.rank))


def perturb(payload: dict[str, Any], context: RankContext) -> None:
    """Entry point of the server: one token of the last sequence changes; which logits do?"""
    case = jsonfile.convert(payload["case"], Case, source="case")
    join(context)
    sharded, batch = sharded_of(case, torch.float64), batch_of(case, 0)
    with torch.no_grad():
        before = _last_logits(sharded, batch)
        batch.ids_BS[-1, payload["changed"]] += 1
        moved_S = (_last_logits(sharded, batch) - before).abs().amax(-1) > 1e-9
    held_S = sharded.share.positions_S
    held_S = torch.arange(case.sequence_length) if held_S is None else held_S
    leave(context, Probe(moved=tuple(held_S[moved_S].tolist())))


def join(context: RankContext) -> None:
    """Into a process group, one thread, with norms that keep float64."""
    torch.set_num_threads(1)
    store = FileStore(str(context.store), context.world_size)
    dist.init_process_group("gloo", store=store, rank=context.rank, world_size=context.world_size)
    keep_float64()


def leave(context: RankContext, record: Value) -> None:
    jsonfile.write(context.folder / f"record-{context.rank}.json", record)
    context.report("recorded")
    dist.destroy_process_group()


def _last_logits(sharded: Sharded, batch: Batch) -> Tensor:
    """[S, V] of the last sequence of the batch, the positions that this rank holds."""
    return [sharded.logits(micro_batch) for micro_batch in sharded.micro_batches(batch)][-1][-1]


def keep_float64() -> None:
    """Takes the float32 detour out of RMSNorm and router: in float64 rounding then cannot hide or fake a difference."""

    def norm(self: nn.Module, hidden: Tensor) -> Tensor:
        wide = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * wide.to(hidden.dtype)

    def route(self: nn.Module, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = F.linear(hidden.reshape(-1, self.hidden_dim), self.weight)
        wide = torch.promote_types(logits.dtype, torch.float32)
        weights, chosen = logits.softmax(-1, dtype=wide).topk(self.top_k, dim=-1)
        return logits, (weights / weights.sum(-1, keepdim=True)).to(logits.dtype), chosen

    modeling_qwen3.Qwen3RMSNorm.forward = norm
    modeling_qwen3_moe.Qwen3MoeRMSNorm.forward = norm
    modeling_qwen3_moe.Qwen3MoeTopKRouter.forward = route


def sharpen(model: nn.Module) -> None:
    """Weights under which mistakes show: at HF's init many stay below any tolerance (norms all 1, logits near 0)."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            generator = torch.Generator().manual_seed(len(name) * 131 + parameter.numel())
            if "norm" in name:
                parameter.uniform_(0.5, 1.5, generator=generator)
            elif "proj" in name or "mlp.gate" in name:
                parameter.mul_(4.0)


def _distances(case: Case, rank: int) -> Distances:
    dtype = getattr(torch, case.dtype)
    reference, sharded = reference_of(case, dtype), sharded_of(case, dtype)
    optimizer = adamw(reference.parameters(), case.layout)
    first, later = dict[str, float](), 0.0
    worst, odd, num_gradients = "", set[str](), 0
    # AdamW's first updates are g / (|g| + eps), which turns float32 rounding into real differences of the weights.
    for step in range(UPDATES if dtype is torch.float64 else 1):
        batch = batch_of(case, step)
        logits = forward(reference, batch)
        expected_loss = loss.loss_share(logits, batch)
        expected_loss.backward()
        mine = sharded.micro_batches(batch)
        found = {"logits": _logits_distance(sharded, mine, logits.detach()), "gradients": 0.0}
        share = sharded.forward_backward(mine)
        dist.all_reduce(share)
        found["loss"] = _distance(share, expected_loss.detach())
        expected = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
        actual = sharded.full_gradients()
        odd |= expected.keys() ^ actual.keys()
        for name in expected.keys() & actual.keys():
            if (far := _distance(actual[name], expected[name])) > found["gradients"]:
                found["gradients"], worst = far, name if step == 0 else worst
        num_gradients = len(actual)
        norm = torch.stack([gradient.double().pow(2).sum() for gradient in expected.values()]).sum().sqrt()
        found["gradient_norm"] = _distance(sharded.gradient_norm(), norm)
        if (clip_norm := case.options.clip_norm) is not None:
            # Compared themselves: AdamW's updates hardly depend on the scale of the gradients.
            torch.nn.utils.clip_grad_norm_(reference.parameters(), clip_norm)
            sharded.clip_gradients(clip_norm)
            clipped = [_distance(value, expected[name]) for name, value in sharded.full_gradients().items()]
            found["gradients"] = max(found["gradients"], *clipped)
            torch.nn.utils.clip_grad_norm_(reference.parameters(), clip_norm)  # as `step` will clip again
        first = first or found
        later = max(later, *found.values()) if step else later
        optimizer.step()
        optimizer.zero_grad()
        sharded.step()
    full, expected_parameters = sharded.full_parameters(), dict(reference.named_parameters())
    odd |= full.keys() ^ expected_parameters.keys()
    parameters = max(_distance(full[name], p.detach()) for name, p in expected_parameters.items() if name in full)
    return Distances(
        rank=rank,
        parameters=parameters,
        worst_gradient=worst,
        odd_names=tuple(sorted(odd)),
        num_gradients=num_gradients,
        owned_numel=sharded.owned_numel(),
        later=later,
        **first,
    )


def reference_of(case: Case, dtype: torch.dtype) -> nn.Module:
    model = build_model(case.layout.shape, device=CPU, seed=0)
    sharpen(model)
    return model.to(dtype)


def sharded_of(case: Case, dtype: torch.dtype) -> Sharded:
    """Cut by the registry's own road, from a model that starts where the reference does."""
    model = reference_of(case, dtype)
    model.head = Head(kind=case.loss)
    sharded = shard(model, BuildConfig(layout=case.layout, device=CPU))
    if case.mistake:
        MISTAKES[case.mistake](sharded)
    return sharded


def batch_of(case: Case, step: int) -> Batch:
    batch = synthetic_batch(case.layout.shape, case.layout.workload, step=step, device=CPU)
    batch.labels_BS[list(case.masked_sequences)] = IGNORE_INDEX
    batch.labels_BS[:, list(case.masked_positions)] = IGNORE_INDEX
    batch = from_ids(batch.ids_BS, batch.labels_BS)
    return packed(batch) if case.packed else batch


def packed(batch: Batch) -> Batch:
    """Each sequence as two documents; the second begins at another place in each."""
    num_sequences, length = batch.ids_BS.shape
    borders_B1 = (3 + 2 * torch.arange(num_sequences)).remainder(length - 1).clamp(min=1).unsqueeze(1)
    documents_BS = (batch.positions_BS >= borders_B1).long()
    return replace(batch, positions_BS=batch.positions_BS - borders_B1 * documents_BS, documents_BS=documents_BS)


def _logits_distance(sharded: Sharded, mine: list[Batch], logits_BSV: Tensor) -> float:
    with torch.no_grad():
        return _distance(torch.cat([sharded.logits(batch) for batch in mine]), sharded.share.of(logits_BSV))


def _distance(actual: Tensor, expected: Tensor) -> float:
    assert actual.shape == expected.shape
    assert torch.isfinite(actual).all()
    return float((actual - expected).abs().max() / expected.abs().max().clamp(min=1e-300))
