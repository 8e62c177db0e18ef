"""The words and the arithmetic of a strategy, without torch: names, model shapes, workloads, and what is refused.

Everything here is a plain value, so that a pytest process can collect the whole matrix and refuse what cannot
be cut before any process starts and without importing torch.
"""

import math
from collections.abc import Callable
from enum import StrEnum

import msgspec


class Value(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of what crosses a door: immutable, keyword-only; reading one refuses unknown keys and wrong types."""


class StrategyName(StrEnum):
    """How the ranks share one training step."""

    SINGLE = "single"
    """The unsharded model on one rank: the reference of every equivalence test."""
    DDP = "ddp"
    """Every rank holds the whole model; gradients are all-reduced in buckets (torch DistributedDataParallel)."""
    FSDP2 = "fsdp2"
    """Parameters, gradients and optimizer state are sharded per layer (torch fully_shard; ZeRO stage 3)."""


class Mode(StrEnum):
    """How the forward and backward are executed."""

    EAGER = "eager"
    COMPILE = "compile"
    """torch.compile, one graph per decoder layer."""


class LinkProfile(StrEnum):
    """What the ranks talk over. The profile also decides the device: gloo cells run on CPUs, the others on GPUs."""

    GLOO = "gloo"
    """CPU ranks over the loopback interface."""
    NATIVE = "native"
    """NCCL over whatever the node has (NVLink, PCIe)."""
    NO_P2P = "no_p2p"
    """NCCL with peer-to-peer copies switched off: the same node with a slow, PCIe-like link."""


class ComputeDtype(StrEnum):
    """The dtype of matrix products; parameters, gradients and optimizer state stay in float32."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class LossKind(StrEnum):
    """How the head and the cross-entropy are computed."""

    FULL = "full"
    """All logits at once."""
    CHUNKED = "chunked"
    """A few thousand tokens at a time, gradients with the loss: the logits of a batch never exist."""


class ModelShape(Value, frozen=True, kw_only=True):
    """A dense Qwen3 model as its config states it."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    tied_embeddings: bool

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole model; a tied embedding is counted once."""
        query, key_value = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        attention = 2 * self.hidden_size * query + 2 * self.hidden_size * key_value + 2 * self.head_dim
        mlp = 3 * self.hidden_size * self.intermediate_size
        layer = attention + mlp + 2 * self.hidden_size
        embedding = self.vocab_size * self.hidden_size
        return self.num_layers * layer + self.hidden_size + embedding * (1 if self.tied_embeddings else 2)

    @property
    def expected_start_loss(self) -> float:
        """Cross-entropy in nats of a freshly initialised model on unrelated labels.

        With weights of std 0.02 behind a unit-RMS norm the logits are normal with variance hidden_size * 0.02^2, so the
        mean of the log-partition is ln V + variance / 2.
        """
        return math.log(self.vocab_size) + self.hidden_size * 0.02**2 / 2


def _qwen3(hidden: int, layers: int, heads: int, intermediate: int, *, tied: bool) -> ModelShape:
    return ModelShape(
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=8,
        head_dim=128,
        intermediate_size=intermediate,
        vocab_size=151_936,
        tied_embeddings=tied,
    )


SIZES: dict[str, ModelShape] = {
    # For CPUs. heads * head_dim is twice hidden_size, as in 0.6b, so that code which takes them for equal fails here.
    "tiny": ModelShape(
        hidden_size=64,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        intermediate_size=192,
        vocab_size=512,
        tied_embeddings=True,
    ),
    "0.6b": _qwen3(1024, 28, 16, 3072, tied=True),
    "1.7b": _qwen3(2048, 28, 16, 6144, tied=True),
    "4b": _qwen3(2560, 36, 32, 9728, tied=True),
    # Not a released model: no dense Qwen3 has 7 B parameters. This is Qwen3-8B's width with 32 layers and tied
    # embeddings, 6.8 B parameters: float32 parameters, gradients and two AdamW moments are 16 bytes x 6.8 B = 108 GB.
    "7b": _qwen3(4096, 32, 32, 12_288, tied=True),
    "8b": _qwen3(4096, 36, 32, 12_288, tied=False),
}


class Workload(Value, frozen=True, kw_only=True):
    """What one optimizer step computes, the same for every strategy."""

    sequences: int
    """Global batch: sequences per step over all ranks."""
    sequence_length: int
    micro_batch: int
    """Sequences that one forward sees on one rank; the rest of a rank's share is accumulated."""
    compute_dtype: ComputeDtype
    learning_rate: float
    seed: int = 0
    loss: LossKind = LossKind.FULL

    @property
    def tokens_per_step(self) -> int:
        return self.sequences * self.sequence_length


MICRO_BATCHES = {"0.6b": 8, "1.7b": 8, "4b": 4, "7b": 2, "8b": 2}
"""Sequences of 2048 that one forward sees. Small models want large ones: their step is bound by kernel launches."""


def default_workload(size: str) -> Workload:
    """The workload of a size: 16 x 2048 = 32,768 tokens in bfloat16 on GPUs, a small float32 one for `tiny`.

    Raises:
        ValueError: no such size.
    """
    if size not in SIZES:
        raise ValueError(f"unknown size {size!r}; known: {', '.join(SIZES)}")
    if size == "tiny":
        return Workload(
            sequences=8,
            sequence_length=64,
            micro_batch=2,
            compute_dtype=ComputeDtype.FLOAT32,
            learning_rate=1e-3,
        )
    return Workload(
        sequences=16,
        sequence_length=2048,
        micro_batch=MICRO_BATCHES[size],
        compute_dtype=ComputeDtype.BFLOAT16,
        learning_rate=1e-4,
        loss=LossKind.CHUNKED,
    )


class Layout(Value, frozen=True, kw_only=True):
    """One strategy on one number of ranks: everything that decides whether the step can be cut."""

    strategy: StrategyName
    shape: ModelShape
    world_size: int
    workload: Workload

    @property
    def data_degree(self) -> int:
        """Ranks that hold different sequences."""
        return 1 if self.strategy is StrategyName.SINGLE else self.world_size

    @property
    def num_micro_batches(self) -> int:
        """Forwards that one rank makes per step (gradient accumulation)."""
        return self.workload.sequences // (self.data_degree * self.workload.micro_batch)


def _positive(layout: Layout) -> str | None:
    workload = layout.workload
    numbers = {
        "world size": layout.world_size,
        "sequences": workload.sequences,
        "sequence length": workload.sequence_length,
        "micro-batch": workload.micro_batch,
    }
    bad = [f"{name} {number}" for name, number in numbers.items() if number < 1]
    return f"must be at least 1: {', '.join(bad)}" if bad else None


def _single_rank(layout: Layout) -> str | None:
    if layout.strategy is StrategyName.SINGLE and layout.world_size != 1:
        return f"`single` is the unsharded model on 1 rank, not {layout.world_size}; use `ddp` to replicate it"
    return None


def _more_than_one_rank(layout: Layout) -> str | None:
    if layout.strategy is not StrategyName.SINGLE and layout.world_size < 2:
        return f"`{layout.strategy}` over {layout.world_size} rank cuts nothing; use `single` or at least 2 ranks"
    return None


def _batch_divides(layout: Layout) -> str | None:
    workload = layout.workload
    per_forward = layout.data_degree * workload.micro_batch
    if workload.sequences % per_forward:
        per_rank, rest = divmod(workload.sequences, layout.data_degree)
        even = f"choose a micro-batch that divides {workload.sequences} / {layout.data_degree} = {per_rank}"
        uneven = f"choose a number of sequences that data degree {layout.data_degree} divides"
        return (
            f"{workload.sequences} sequences a step do not divide into data degree {layout.data_degree} x micro-batch "
            f"{workload.micro_batch} = {per_forward}; {uneven if rest else even}"
        )
    return None


RULES: tuple[Callable[[Layout], str | None], ...] = (_positive, _single_rank, _more_than_one_rank, _batch_divides)
"""Every reason to refuse a layout, in the order in which they are said; each returns a message or None."""


def refusal(layout: Layout) -> str | None:
    """Why this layout cannot be run, with the numbers and the cure, or None when it can."""
    return next((message for rule in RULES if (message := rule(layout))), None)
