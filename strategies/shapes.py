"""The shapes of the models, as their configs state them, and what follows from them by arithmetic. No torch."""

import math

from strategies.value import Value


class ModelShape(Value, frozen=True, kw_only=True):
    """A Qwen3 model as its config states it, dense or, with experts, Qwen3-MoE."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    """Of the feed-forward part; with experts, of each."""
    vocab_size: int
    tied_embeddings: bool
    num_experts: int = 0
    """0: every token takes the one feed-forward part."""
    experts_per_token: int = 0

    @property
    def has_experts(self) -> bool:
        return self.num_experts > 0

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole model; a tied embedding is counted once."""
        query, key_value = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        attention = 2 * self.hidden_size * query + 2 * self.hidden_size * key_value + 2 * self.head_dim
        mlp = 3 * self.hidden_size * self.intermediate_size * max(1, self.num_experts)
        mlp += self.num_experts * self.hidden_size  # the router
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
    "tiny_moe": ModelShape(
        hidden_size=64,
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        intermediate_size=48,
        vocab_size=512,
        tied_embeddings=False,
        num_experts=8,
        experts_per_token=2,
    ),
    # Not a released model: 8 of the 48 layers of Qwen3-30B-A3B, with its embedding and head, 5.6 B parameters: what one
    # GPU of 140 GB can train alone, so that expert parallelism has something to be compared with.
    "a3b": ModelShape(
        hidden_size=2048,
        num_layers=8,
        num_heads=32,
        num_kv_heads=4,
        head_dim=128,
        intermediate_size=768,
        vocab_size=151_936,
        tied_embeddings=False,
        num_experts=128,
        experts_per_token=8,
    ),
}
