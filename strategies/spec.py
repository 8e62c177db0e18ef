"""The words of a strategy, without torch: names, axes, modes, workloads, options.

Everything here is a plain value, so that a pytest process can collect the whole matrix and refuse what cannot
be cut before any process starts and without importing torch.
"""

from enum import StrEnum

from strategies.value import Value


class StrategyName(StrEnum):
    """How the ranks share one training step."""

    SINGLE = "single"
    """The unsharded model on one rank: the reference of every equivalence test."""
    DDP = "ddp"
    """Every rank holds the whole model; gradients are all-reduced in buckets (torch DistributedDataParallel)."""
    ZERO1 = "zero1"
    """As ddp, with the optimizer state cut over the ranks (torch ZeroRedundancyOptimizer; ZeRO stage 1)."""
    ZERO2 = "zero2"
    """Gradients and optimizer state are sharded, parameters gathered once a step (torch fully_shard; ZeRO stage 2)."""
    FSDP2 = "fsdp2"
    """Parameters, gradients and optimizer state are sharded (torch fully_shard; ZeRO stage 3)."""
    HSDP = "hsdp"
    """Sharded as fsdp2 within a group of ranks, replicated over the groups (torch fully_shard on two axes)."""
    TP = "tp"
    """Every matrix is cut, the vocabulary too; activations are whole on every rank (Megatron-LM)."""
    TP_SP = "tp_sp"
    """As tp, with the activations between the matrices cut along the sequence (Megatron-LM's sequence parallelism)."""
    PP_GPIPE = "pp_gpipe"
    """Layers are cut into stages; all forwards, then all backwards (GPipe)."""
    PP_1F1B = "pp_1f1b"
    """Stages alternate one forward and one backward (PipeDream-flush)."""
    PP_INTERLEAVED = "pp_interleaved"
    """1F1B with several stages a rank (Megatron-LM's interleaved schedule)."""
    PP_INTERLEAVED_ZB = "pp_interleaved_zb"
    """Interleaved, with the weights' gradients filling the bubble (zero bubble, ZB1P)."""
    PP_ZBV = "pp_zbv"
    """Zero bubble with two stages a rank in a V: the first rank holds the first and the last stage."""
    PP_DUALPIPEV = "pp_dualpipev"
    """The V of DeepSeek's DualPipe: forwards and backwards of two directions overlap."""
    CP_ULYSSES = "cp_ulysses"
    """The sequence is cut; attention exchanges it for heads by all-to-all (DeepSpeed-Ulysses)."""
    CP_RING = "cp_ring"
    """The sequence is cut in a zigzag; keys and values travel round the ranks (ring attention)."""
    CP_USP = "cp_usp"
    """Ulysses within rings: both cuts of the sequence at once (USP)."""
    EP = "ep"
    """Each rank holds some of the experts of every layer, and tokens travel to theirs and back (GShard)."""


AXES: dict[StrategyName, tuple[str, ...]] = {
    StrategyName.SINGLE: ("dp",),
    StrategyName.DDP: ("dp",),
    StrategyName.ZERO1: ("dp",),
    StrategyName.ZERO2: ("dp",),
    StrategyName.FSDP2: ("dp",),
    StrategyName.HSDP: ("dp_replicate", "dp_shard"),
    StrategyName.TP: ("tp",),
    StrategyName.TP_SP: ("tp",),
    StrategyName.PP_GPIPE: ("pp",),
    StrategyName.PP_1F1B: ("pp",),
    StrategyName.PP_INTERLEAVED: ("pp",),
    StrategyName.PP_INTERLEAVED_ZB: ("pp",),
    StrategyName.PP_ZBV: ("pp",),
    StrategyName.PP_DUALPIPEV: ("pp",),
    StrategyName.CP_ULYSSES: ("ulysses",),
    StrategyName.CP_RING: ("ring",),
    StrategyName.CP_USP: ("ring", "ulysses"),
    StrategyName.EP: ("ep",),
}
"""The axes of a strategy's device mesh, outermost first."""
DATA_AXES = frozenset({"dp", "dp_replicate", "dp_shard", "ep"})
"""Axes over which ranks see different sequences."""
CONTEXT_AXES = frozenset({"ring", "ulysses"})
"""Axes over which ranks see different parts of each sequence."""
STAGES_PER_RANK = {
    StrategyName.PP_GPIPE: 1,
    StrategyName.PP_1F1B: 1,
    StrategyName.PP_INTERLEAVED: 2,
    StrategyName.PP_INTERLEAVED_ZB: 2,
    StrategyName.PP_ZBV: 2,
    StrategyName.PP_DUALPIPEV: 2,
}
ZERO_BUBBLE = frozenset({StrategyName.PP_INTERLEAVED_ZB, StrategyName.PP_ZBV, StrategyName.PP_DUALPIPEV})
"""Schedules that compute the gradients of the inputs and those of the weights at different times."""


class Mode(StrEnum):
    """How the forward and backward are executed."""

    EAGER = "eager"
    COMPILE = "compile"
    """torch.compile, one graph per decoder layer."""
    CUDAGRAPH = "cudagraph"
    """As compile, and the whole step, its update too, captured once as a CUDA graph and replayed."""


STEPS_BEFORE_CAPTURE = 11
"""Ordinary steps before a step is captured: DistributedDataParallel reads timers in its first ten, and rebuilds its
buckets, neither of which can be captured (torch's notes on CUDA graphs); the optimizer's state must exist too."""


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


class Options(Value, frozen=True, kw_only=True):
    """What a user may switch on beside the strategy."""

    activation_checkpointing: bool = False
    """Keep only the inputs of every decoder layer; compute the rest again in backward."""
    optimizer_state: ComputeDtype = ComputeDtype.FLOAT32
    """Dtype in which AdamW's two moments are stored."""
    clip_norm: float | None = None
    """Scale the gradients down to this global L2 norm before the update."""
    async_tp: bool = False
    """`tp_sp`: split matrix products and exchange their pieces while others are computed."""

    @property
    def label(self) -> str:
        """Of what differs from the defaults, such as `ac+bf16state`; empty when nothing does."""
        parts = {
            "ac": self.activation_checkpointing,
            "bf16state": self.optimizer_state is ComputeDtype.BFLOAT16,
            f"clip{self.clip_norm or 0:g}": self.clip_norm is not None,
            "async": self.async_tp,
        }
        return "+".join(part for part, is_on in parts.items() if is_on)
