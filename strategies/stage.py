"""A pipeline stage: a part of the model, and how it is taken out of the whole."""

import copy
from typing import cast

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from strategies.batch import Batch
from strategies.layout import Layout
from strategies.model import Qwen3
from strategies.stages import cut, stages_of_rank


class Stage(nn.Module):
    """A part of the model, as a schedule calls it: from ids [B, S] or hidden states [B, S, H] to those or the loss.

    The last stage ends in the microbatch's share of the loss, so logits are neither kept by the schedule nor sent.
    """

    def __init__(self, part: Qwen3, index: int) -> None:
        super().__init__()
        self.part = part
        self.index = index
        """Of all stages, over all ranks."""
        self.num_label_tokens = 0
        """Of the global batch: set before every step, for it is no tensor that could be cut into microbatches."""
        self.with_loss = True

    def forward(
        self, ids_or_hidden: Tensor, *, labels_BS: Tensor, positions_BS: Tensor, documents_BS: Tensor | None = None
    ) -> Tensor:
        batch = Batch(
            ids_BS=ids_or_hidden,  # hidden states on all stages but the first, where nobody asks for ids
            labels_BS=labels_BS,
            positions_BS=positions_BS,
            num_label_tokens=self.num_label_tokens,
            documents_BS=documents_BS,
        )
        return self.part.run(ids_or_hidden, batch, with_loss=self.with_loss)

    def logits(self, ids_or_hidden: Tensor, batch: Batch) -> Tensor:
        """As `forward`, but the last stage ends in the logits."""
        self.with_loss = False
        try:
            # Through the module's call: what wraps this stage gathers its parameters there.
            output: Tensor = self(
                ids_or_hidden,
                labels_BS=batch.labels_BS,
                positions_BS=batch.positions_BS,
                documents_BS=batch.documents_BS,
            )
        finally:
            self.with_loss = True
        return output


def take_stages(model: nn.Module, pipeline: DeviceMesh, layout: Layout) -> list[Stage]:
    """This rank's stages, cut out of a whole model, which is left without layers, embedding, norm and head.

    Parameters keep their Hugging Face names, with the layers' numbers in the whole model. Tied ends become two
    parameters with equal values.

    Args:
        pipeline: the axis `pp` alone.
    """
    assert isinstance(model, Qwen3)
    layers = list(cast("nn.ModuleList", model.model.layers))
    embedding, norm, head = model.model.embed_tokens, model.model.norm, model.lm_head
    for owner, names in ((model.model, ("layers", "embed_tokens", "norm")), (model, ("lm_head",))):
        for name in names:
            setattr(owner, name, None)
    borders = cut(layout.shape, layout.num_stages, sequence_length=layout.workload.sequence_length)
    stages = []
    schedule = layout.part("pipeline")
    assert schedule is not None
    for index in stages_of_rank(schedule, pipeline.get_local_rank(), pipeline.size()):
        part = copy.deepcopy(model)  # of what every stage has: the rotary frequencies
        part.model.layers = nn.ModuleDict({str(layer): layers[layer] for layer in borders[index]})
        if index == 0:
            part.model.embed_tokens = embedding
        if index == layout.num_stages - 1:
            part.model.norm, part.lm_head = norm, head
        stages.append(Stage(part, index))
    if stages[0].index == 0 and stages[-1].index == layout.num_stages - 1 and layout.shape.tied_embeddings:
        head.weight = nn.Parameter(head.weight.detach().clone())
    return stages
