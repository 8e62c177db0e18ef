"""What a strategy could get wrong, planted into a built one; each must be found by the comparison."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate

from strategies.attention import causal_attention
from strategies.batch import Batch
from strategies.context_parallel import use_attention
from strategies.model import Qwen3
from strategies.sharded import Sharded


def twice_the_gradient(sharded: Sharded) -> None:
    sharded.gradient_scale *= 2


def norms_not_summed(sharded: Sharded, *names: str) -> None:
    """Each rank takes the gradient of its own heads or positions for the whole."""
    for name, module in sharded.unwrapped.named_modules():
        if name.endswith(names):
            cast("Any", module).gradient_placements = [Replicate()]


def tie_broken(sharded: Sharded) -> None:
    head = cast("Any", sharded.unwrapped.get_submodule("lm_head"))
    head.weight = nn.Parameter(head.weight.detach().clone())


def whole_embedding_gradient(sharded: Sharded) -> None:
    """As torch's RowwiseParallel leaves it. The optimizer, which would fail, does not see it."""
    embedding, step = cast("Any", sharded.unwrapped.get_submodule("model.embed_tokens")).weight, sharded.step

    def gather() -> None:
        type(sharded).finish_gradients(sharded)
        embedding.grad = embedding.grad.redistribute(placements=[Replicate()])

    def cut_and_step() -> None:
        embedding.grad = embedding.grad.redistribute(placements=embedding.placements)
        step()

    sharded.finish_gradients, sharded.step = gather, cut_and_step  # type: ignore[method-assign]


def loss_of_every_rank(sharded: Sharded) -> None:
    sharded.loss_copies = 1


def divided_gradients(sharded: Sharded) -> None:
    cast("Any", sharded).schedule.scale_grads = True


def unsummed_tie(sharded: Sharded) -> None:
    sharded.finish_gradients = lambda: None  # type: ignore[method-assign]


def dropped_layer(sharded: Sharded) -> None:
    stages = cast("Any", sharded).stages
    if stages[0].index == 0:
        layers = stages[0].part.model.layers
        layers.pop(list(layers)[-1])


def own_norm(sharded: Sharded) -> None:
    def clip(clip_norm: float) -> None:
        torch.nn.utils.clip_grad_norm_(sharded.module.parameters(), clip_norm)

    sharded.clip_gradients = clip  # type: ignore[method-assign]


def own_gradient(sharded: Sharded) -> None:
    """As if the wrapper's average over ranks were taken for the sum."""
    sharded.gradient_scale = 1.0


def own_attention(sharded: Sharded) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, documents: Tensor | None) -> Tensor:
        return causal_attention(q, k, v, scale)

    assert isinstance(sharded.unwrapped, Qwen3)
    use_attention(sharded.unwrapped, attend)


def own_positions(sharded: Sharded) -> None:
    _change_batches(
        sharded,
        lambda batch: replace(
            batch, positions_BS=torch.arange(batch.ids_BS.shape[1]).expand_as(batch.ids_BS).contiguous()
        ),
    )


def own_labels(sharded: Sharded) -> None:
    """Shifted after the cut: the last position of a shard gets the first token of the same shard."""
    _change_batches(sharded, lambda batch: replace(batch, labels_BS=batch.ids_BS.roll(-1, dims=1)))


def experts_averaged(sharded: Sharded) -> None:
    """As all other gradients are, though each expert has the tokens of all ranks already."""
    sharded.experts = []


def unweighted_experts(sharded: Sharded) -> None:
    _change_experts(sharded, lambda forward, hidden, chosen, weights: forward(hidden, chosen, torch.ones_like(weights)))


def router_without_gradient(sharded: Sharded) -> None:
    _change_experts(sharded, lambda forward, hidden, chosen, weights: forward(hidden, chosen, weights.detach()))


def experts_of_the_next_rank(sharded: Sharded) -> None:
    _change_experts(sharded, lambda forward, hidden, chosen, weights: forward(hidden, chosen.roll(1, 0), weights))


def _change_experts(sharded: Sharded, change: Callable[..., Tensor]) -> None:
    for module in sharded.experts:
        module._forward = partial(change, module._forward)  # type: ignore[method-assign]


def _change_batches(sharded: Sharded, change: Callable[[Batch], Batch]) -> None:
    whole = sharded.micro_batches
    sharded.micro_batches = lambda batch: [change(one) for one in whole(batch)]  # type: ignore[method-assign]


MISTAKES: dict[str, Callable[[Sharded], None]] = {
    "gradients twice too large": twice_the_gradient,
    "head norms not summed": lambda sharded: norms_not_summed(sharded, "q_norm", "k_norm"),
    "layer norms not summed": lambda sharded: norms_not_summed(sharded, "layernorm", "model.norm"),
    "tie broken": tie_broken,
    "gradient of the embedding left whole": whole_embedding_gradient,
    "loss counted by every rank": loss_of_every_rank,
    "gradients divided by the number of microbatches": divided_gradients,
    "a tied weight's gradients not summed": unsummed_tie,
    "a dropped layer": dropped_layer,
    "clipping by a rank's own norm": own_norm,
    "gradients of its own positions alone": own_gradient,
    "attends to its own positions alone": own_attention,
    "counts positions from its own first": own_positions,
    "labels of the next position it holds": own_labels,
    "experts' gradients averaged": experts_averaged,
    "experts not weighted": unweighted_experts,
    "the router's gradient lost": router_without_gradient,
    "the experts of another token": experts_of_the_next_rank,
}
