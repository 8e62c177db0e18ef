"""The unsharded reference: Hugging Face's Qwen3 from a config, initialised by parameter name, and its loss."""

import zlib
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedConfig, Qwen3Config, Qwen3MoeConfig
from transformers.models.qwen3.modeling_qwen3 import Qwen3ForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeForCausalLM

from strategies.attention import causal_attention, register
from strategies.batch import Batch
from strategies.experts import GROUPED
from strategies.layout import Layout
from strategies.loss import Head
from strategies.shapes import ModelShape
from strategies.spec import LossKind

INIT_STD = 0.02
ATTENTION = "causal_attention"
"""Registered name of the attention of whole sequences."""
register(ATTENTION, causal_attention)


class Qwen3(nn.Module):
    """What is ours of both models: Hugging Face's modules with a forward that ends in the loss.

    The loss stands inside of the forward because only there is a sharded head whole. A pipeline stage is the same
    model without the parts of other stages: `embed_tokens`, `norm` and `lm_head` may be None, `layers` fewer.
    """

    model: Any
    lm_head: Any
    head: Head
    set_attn_implementation: Any

    def forward(self, batch: Batch, *, with_loss: bool) -> Tensor:
        """Logits [B, S, V], or the batch's share of the loss."""
        return self.run(batch.ids_BS, batch, with_loss=with_loss)

    def run(self, ids_or_hidden: Tensor, batch: Batch, *, with_loss: bool) -> Tensor:
        """As far as this part of the model goes: from ids [B, S] or hidden states [B, S, H] to any of those or more."""
        hidden_BSH = ids_or_hidden if self.model.embed_tokens is None else self._embed(ids_or_hidden)
        angles = self.model.rotary_emb(hidden_BSH, batch.positions_BS)
        for layer in self.model.layers.children():
            hidden_BSH = layer(
                hidden_BSH,
                position_ids=batch.positions_BS,
                position_embeddings=angles,
                documents_BS=batch.documents_BS,
            )
        if self.lm_head is None:
            return hidden_BSH
        hidden_BSH = self.model.norm(hidden_BSH)
        if with_loss:
            return self.head.loss_share(hidden_BSH, self.lm_head, batch)
        logits_BSV: Tensor = self.lm_head(hidden_BSH)
        return logits_BSV

    def _embed(self, ids_BS: Tensor) -> Tensor:
        hidden_BSH: Tensor = self.model.embed_tokens(ids_BS)
        device_type = ids_BS.device.type
        if torch.is_autocast_enabled(device_type):
            # Autocast leaves the embedding in float32, and with it every sum of the residual stream.
            hidden_BSH = hidden_BSH.to(torch.get_autocast_dtype(device_type))
        return hidden_BSH


class DenseQwen3(Qwen3, Qwen3ForCausalLM):
    """Every token takes the one feed-forward part of a layer."""


class MoeQwen3(Qwen3, Qwen3MoeForCausalLM):
    """A router chooses some experts of a layer for each token."""


def build_model(
    shape: ModelShape,
    *,
    device: torch.device,
    seed: int,
    loss: LossKind = LossKind.FULL,
    checkpoint: Path | None = None,
) -> nn.Module:
    """The whole model in float32 on `device`, with seeded weights or those of local safetensors.

    Args:
        checkpoint: a folder with Hugging Face `*.safetensors` files of this shape; nothing is ever downloaded.

    Raises:
        ValueError: the checkpoint has no files, or its names or shapes are not this model's.
    """
    kind = MoeQwen3 if shape.has_experts else DenseQwen3
    with device:
        model = kind._from_config(_config(shape, device), attn_implementation=ATTENTION, dtype=torch.float32)
    assert isinstance(model, Qwen3)
    model.head = Head(kind=loss)
    model.train()
    if checkpoint is None:
        initialise(model, seed=seed)
    else:
        load_checkpoint(model, checkpoint)
    return model


def _config(shape: ModelShape, device: torch.device) -> PreTrainedConfig:
    common: dict[str, Any] = {
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "tie_word_embeddings": shape.tied_embeddings,
        "max_position_embeddings": 40_960,
        "use_cache": False,
    }
    if not shape.has_experts:
        return Qwen3Config(intermediate_size=shape.intermediate_size, **common)
    config = Qwen3MoeConfig(
        moe_intermediate_size=shape.intermediate_size,
        num_experts=shape.num_experts,
        num_experts_per_tok=shape.experts_per_token,
        norm_topk_prob=True,  # as in Qwen3-30B-A3B: the weights of a token's experts add up to 1
        **common,
    )
    # On CPUs, where what is ours is compared with it, Hugging Face's own: one expert after the other.
    config._experts_implementation = "eager" if device.type == "cpu" else GROUPED
    return config


@torch.no_grad()
def initialise(model: nn.Module, *, seed: int) -> None:
    """Sets every parameter from (seed, its name): normal(0, 0.02), norm weights 1.

    The draw does not depend on the order of creation, so every layout of a model starts from the same weights.
    """
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.fill_(1.0)
        else:
            generator = torch.Generator(device=parameter.device)
            generator.manual_seed(zlib.crc32(f"{seed}:{name}".encode()))
            parameter.normal_(0.0, INIT_STD, generator=generator)


def load_checkpoint(model: nn.Module, folder: Path) -> None:
    """Loads all `*.safetensors` of a local folder by Hugging Face names. Raises ValueError when they do not fit."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"no *.safetensors in {folder}; pass a folder that holds a downloaded Hugging Face model")
    weights = {name: tensor for file in files for name, tensor in load_file(file).items()}
    parameters = dict(model.named_parameters())
    missing = sorted(parameters.keys() - weights.keys())
    wrong = [
        f"{name} {tuple(weights[name].shape)} is not {tuple(parameter.shape)}"
        for name, parameter in parameters.items()
        if name in weights and weights[name].shape != parameter.shape
    ]
    if missing or wrong:
        raise ValueError(f"{folder} is not a checkpoint of this shape: missing {missing[:3]}, shapes {wrong[:3]}")
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(weights[name])


def forward(model: nn.Module, batch: Batch) -> Tensor:
    """Logits [B, S, V] of a batch."""
    logits: Tensor = model(batch, with_loss=False)
    return logits


def forward_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The batch's share of the global mean loss, a scalar."""
    share: Tensor = model(batch, with_loss=True)
    return share


def prepare_layers(model: nn.Module, layout: Layout) -> None:
    """Activation checkpointing and compiling, as the layout asks for: after the layers' own cuts, before any wrapper.

    torch.compile takes each decoder layer alone: one graph serves them all, and compiling takes seconds, not minutes.
    The elementwise part of a chunked loss is compiled too.
    """
    assert isinstance(model, Qwen3)
    compiled = layout.compiled
    model.head.compiled = compiled
    for layer in model.get_submodule("model.layers").children():
        if layout.options.activation_checkpointing:
            _checkpoint(layer, compiled=compiled)
        elif compiled:
            layer.compile(dynamic=False)


def _checkpoint(layer: nn.Module, *, compiled: bool) -> None:
    """Has a layer compute its forward again in backward, the compiled graph as a whole.

    Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016. Hugging Face's own flag checkpoints around the
    compiled layer in transformers 5.17 and inside of its graph in 5.24, where torch 2.13 on CPUs confuses the state of
    the random generator, kept for the attention, with the mesh of the layer's DTensors.
    """
    forward = torch.compile(layer.forward, dynamic=False) if compiled else layer.forward
    # Nothing here is random, and the generator's state cannot be read while a CUDA graph is captured.
    layer.forward = partial(checkpoint, forward, use_reentrant=False, preserve_rng_state=False)
