"""What a rank does in an equivalence test: the strategy beside the unsharded model, in the same process."""

from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import FileStore
from transformers.models.qwen3 import modeling_qwen3

from perf import jsonfile
from perf.server import RankContext
from strategies import loss
from strategies.batch import IGNORE_INDEX, Batch, from_ids, synthetic_batch
from strategies.model import build_model, forward
from strategies.registry import shard
from strategies.sharded import BuildConfig, Sharded
from strategies.spec import ComputeDtype, Layout, LossKind, Mode, ModelShape, StrategyName, Value, Workload

CPU = torch.device("cpu")
SHAPE = ModelShape(
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=64,
    vocab_size=97,
    tied_embeddings=True,
)
UPDATES = 2


class Case(Value, frozen=True, kw_only=True):
    """One strategy to compare with the unsharded model."""

    strategy: StrategyName
    world_size: int
    mode: Mode = Mode.EAGER
    dtype: str = "float64"
    tied_embeddings: bool = True
    num_layers: int = SHAPE.num_layers
    loss: LossKind = LossKind.FULL
    masked_rank: int | None = None
    """A data rank whose labels do not count."""
    gradient_scale: float = 1.0
    """Planted: gradients this many times too large."""

    @property
    def layout(self) -> Layout:
        shape = msgspec.structs.replace(SHAPE, tied_embeddings=self.tied_embeddings, num_layers=self.num_layers)
        workload = Workload(
            sequences=8,
            sequence_length=16,
            micro_batch=2,
            compute_dtype=ComputeDtype.FLOAT32,
            learning_rate=1e-2,
            loss=self.loss,
        )
        return Layout(strategy=self.strategy, shape=shape, world_size=self.world_size, workload=workload)


class Distances(Value, frozen=True, kw_only=True):
    """Largest |a - b| / largest |b| of a tensor, worst tensor; names that only one side has."""

    rank: int
    logits: float
    loss: float
    gradients: float
    gradient_norm: float
    parameters: float
    worst_gradient: str
    odd_names: tuple[str, ...]
    num_gradients: int
    owned_numel: int


def compare(payload: dict[str, Any], context: RankContext) -> None:
    """Entry point of the server: both models make the same updates; their distances go into the record."""
    torch.set_num_threads(1)
    case = jsonfile.convert(payload, Case, source="case")
    store = FileStore(str(context.store), context.world_size)
    dist.init_process_group("gloo", store=store, rank=context.rank, world_size=context.world_size)
    keep_float64()
    loss.CHUNK_TOKENS = 7  # several chunks in a micro-batch of 32 tokens, and a short one
    distances = _distances(case, context.rank)
    jsonfile.write(context.folder / f"record-{context.rank}.json", distances)
    context.report("recorded")
    dist.destroy_process_group()


def keep_float64() -> None:
    """Takes the float32 detour out of Qwen3's RMSNorm: in float64 rounding then cannot hide or fake a difference."""

    def norm(self: nn.Module, hidden: Tensor) -> Tensor:
        wide = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * wide.to(hidden.dtype)

    modeling_qwen3.Qwen3RMSNorm.forward = norm


def sharpen(model: nn.Module) -> None:
    """Weights under which mistakes show: at HF's init many stay below any tolerance (norms all 1, logits near 0)."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            generator = torch.Generator().manual_seed(len(name) * 131 + parameter.numel())
            if "norm" in name:
                parameter.uniform_(0.5, 1.5, generator=generator)
            elif "proj" in name:
                parameter.mul_(4.0)


def _distances(case: Case, rank: int) -> Distances:
    dtype = getattr(torch, case.dtype)
    reference, sharded = _reference(case, dtype), _sharded(case, dtype)
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    found: dict[str, float] = {"logits": 0.0, "loss": 0.0, "gradients": 0.0, "gradient_norm": 0.0}
    worst, odd, num_gradients = "", set[str](), 0
    for step in range(UPDATES):
        batch = _batch(case, step)
        logits = forward(reference, batch)
        expected_loss = loss.loss_share(logits, batch)
        expected_loss.backward()
        mine = batch.micro_batches(data_rank=sharded.data_rank, data_degree=sharded.data_degree, size=2)
        found["logits"] = max(found["logits"], _logits_distance(sharded, mine, logits))
        share = sharded.forward_backward(mine)
        dist.all_reduce(share)
        found["loss"] = max(found["loss"], _distance(share, expected_loss.detach()))
        expected = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
        actual = sharded.full_gradients()
        odd |= expected.keys() ^ actual.keys()
        for name in expected.keys() & actual.keys():
            if (far := _distance(actual[name], expected[name])) > found["gradients"]:
                found["gradients"], worst = far, name
        num_gradients = len(actual)
        norm = torch.stack([gradient.double().pow(2).sum() for gradient in expected.values()]).sum().sqrt()
        found["gradient_norm"] = max(found["gradient_norm"], _distance(sharded.gradient_norm(), norm))
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
        **found,
    )


def _reference(case: Case, dtype: torch.dtype) -> nn.Module:
    model = build_model(case.layout.shape, device=CPU, seed=0)
    sharpen(model)
    return model.to(dtype)


def _sharded(case: Case, dtype: torch.dtype) -> Sharded:
    """Cut by the registry's own road, from a model that starts where the reference does."""
    model = _reference(case, dtype)
    model.loss_kind = case.loss
    sharded = shard(model, BuildConfig(layout=case.layout, mode=case.mode, device=CPU))
    sharded.gradient_scale *= case.gradient_scale
    return sharded


def _batch(case: Case, step: int) -> Batch:
    batch = synthetic_batch(case.layout.shape, case.layout.workload, step=step, device=CPU)
    if case.masked_rank is None:
        return batch
    share = batch.ids_BS.shape[0] // case.layout.data_degree
    batch.labels_BS[case.masked_rank * share : (case.masked_rank + 1) * share] = IGNORE_INDEX
    return from_ids(batch.ids_BS, batch.labels_BS)


def _logits_distance(sharded: Sharded, mine: list[Batch], logits: Tensor) -> float:
    share = logits.shape[0] // sharded.data_degree
    expected = logits[sharded.data_rank * share : (sharded.data_rank + 1) * share]
    with torch.no_grad():
        return _distance(torch.cat([forward(sharded.module, batch) for batch in mine]), expected)


def _distance(actual: Tensor, expected: Tensor) -> float:
    assert actual.shape == expected.shape
    assert torch.isfinite(actual).all()
    return float((actual - expected).abs().max() / expected.abs().max().clamp(min=1e-300))
