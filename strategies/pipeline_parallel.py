"""`pp_*`: the layers are cut into stages, and microbatches travel through them, under six schedules.

`pp_gpipe`: Huang et al., "GPipe", NeurIPS 2019. `pp_1f1b`: PipeDream-flush of Narayanan et al., "Memory-Efficient
Pipeline-Parallel DNN Training", ICML 2021. `pp_interleaved`: Narayanan et al., "Efficient Large-Scale Language Model
Training on GPU Clusters Using Megatron-LM", SC 2021. `pp_interleaved_zb` (ZB1P) and `pp_zbv`: Qi et al., "Zero Bubble
Pipeline Parallelism", ICLR 2024. `pp_dualpipev`: DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, in the V form of
github.com/deepseek-ai/DualPipe. API: torch.distributed.pipelining.

One step of one rank, M microbatches of b sequences: over each border between two of its stages and stages of other
ranks travel M hidden states and M gradients, each [b, S, H]. So a rank sends, and receives, M tensors for each such
border. Tied embeddings add one exchange of the whole gradient [V, H] between the first and the last rank, unless one
rank holds both ends (`pp_zbv`, `pp_dualpipev`). Checkpointed layers are right under zero bubble too, but slow: torch
computes them again for each group of weights, some ten times a microbatch.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.tensor import DTensor

from strategies.batch import Batch
from strategies.layout import Layout
from strategies.sharded import Sharded, compute_dtype
from strategies.spec import STAGES_PER_RANK, StrategyName
from strategies.stage import Stage
from strategies.stages import stages_of_rank

TIED = "model.embed_tokens.weight"
"""The one name of a tied weight, which the first stage holds as its embedding and the last as its head."""
SCHEDULES: dict[StrategyName, Any] = {
    StrategyName.PP_GPIPE: ScheduleGPipe,
    StrategyName.PP_1F1B: Schedule1F1B,
    StrategyName.PP_INTERLEAVED: ScheduleInterleaved1F1B,
    StrategyName.PP_INTERLEAVED_ZB: ScheduleInterleavedZeroBubble,
    StrategyName.PP_ZBV: ScheduleZBVZeroBubble,
    StrategyName.PP_DUALPIPEV: ScheduleDualPipeV,
}


class _PipelineStage(PipelineStage):
    """torch 2.11 warms up links to all neighbours, in a V also one from a rank to itself, which gloo does not have."""

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.group_peer != self.group_rank]


@dataclass(kw_only=True)
class Pipelined(Sharded):
    """This rank's stages, and the schedule that runs them.

    A tied weight stands on both ends, as two parameters: each gets its own half of the gradient in backward and the
    other half in `finish_gradients`, so that equal updates keep the two bit-equal.
    """

    stages: list[Stage]
    """This rank's, ascending."""
    pipeline: DeviceMesh
    """The axis `pp` alone."""
    schedule: Any = field(init=False)
    embedding: nn.Parameter | None = field(init=False, default=None)
    """The tied weight, where this rank holds the first stage."""
    head: nn.Parameter | None = field(init=False, default=None)
    """Its copy, where this rank holds the last stage."""

    def __post_init__(self) -> None:
        layout = self.layout
        if layout.shape.tied_embeddings:
            for stage in self.stages:
                if stage.index == 0:
                    self.embedding = stage.part.get_parameter(TIED)
                if stage.index == layout.num_stages - 1:
                    self.head = stage.part.get_parameter("lm_head.weight")
        kind, stages = _kind(layout), [self._pipeline_stage(stage) for stage in self.stages]
        self.schedule = SCHEDULES[kind](
            stages if STAGES_PER_RANK[kind] > 1 else stages[0],
            layout.num_micro_batches,
            loss_fn=self._scaled,
            # By default torch divides all gradients by the number of microbatches: ours are shares that add up.
            scale_grads=False,
        )

    def forward_backward(self, micro_batches: Sequence[Batch]) -> Tensor:
        """As the schedule orders them; every rank passes all micro-batches. Ranks without the last stage return 0."""
        whole, losses = _whole(micro_batches), list[Tensor]()
        ids_BS = whole.pop("ids_BS")
        for stage in self.stages:
            stage.num_label_tokens = micro_batches[0].num_label_tokens
        # One context around the whole step: autocast then casts each weight once, not once a microbatch, and the
        # microbatches in flight share that copy.
        with self.autocast(self.device.type):
            self.schedule.step(
                *([ids_BS] if self.stages[0].index == 0 else []),
                target=whole["labels_BS"],
                losses=losses,
                return_outputs=False,
                **whole,
            )
        self.finish_gradients()
        if not losses:
            return torch.zeros((), dtype=self.dtype, device=self.device)
        return torch.stack(losses).detach().sum() / self.gradient_scale / self.loss_copies

    def finish_gradients(self) -> None:
        """As the base's; then sums the two halves of a tied weight's gradient."""
        super().finish_gradients()
        if self.embedding is not None and self.head is not None:
            _gradient(self.embedding).add_(_gradient(self.head))
            _gradient(self.head).copy_(_gradient(self.embedding))
        elif self.embedding is not None:
            self._add_gradient_of(self.pipeline.size() - 1, _gradient(self.embedding))
        elif self.head is not None:
            self._add_gradient_of(0, _gradient(self.head))

    def _add_gradient_of(self, peer: int, mine: Tensor) -> None:
        """Both ranks add the same two numbers, so their sums are bit-equal."""
        group, theirs = self.pipeline.get_group(), torch.empty_like(mine)
        send = dist.P2POp(dist.isend, mine, group=group, group_peer=peer)
        receive = dist.P2POp(dist.irecv, theirs, group=group, group_peer=peer)
        for work in dist.batch_isend_irecv([send, receive]):
            work.wait()
        mine.add_(theirs)

    @torch.no_grad()
    def logits(self, batch: Batch) -> Tensor:
        """Stage by stage; what each puts out is broadcast to all ranks."""
        layout, hidden = self.layout, batch.ids_BS
        mine = {stage.index: stage for stage in self.stages}
        kind = self.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else self._sent_dtype
        for index in range(layout.num_stages):
            shape = self._hidden_shape(hidden.shape[0])
            if index == layout.num_stages - 1:
                shape = (*batch.ids_BS.shape, layout.shape.vocab_size)
            if index in mine:
                hidden = mine[index].logits(hidden, batch).contiguous()
            else:
                hidden = torch.empty(shape, dtype=dtype, device=self.device)
            dist.broadcast(hidden, group=self.pipeline.get_group(), group_src=_rank_of_stage(index, layout))
        return hidden

    def named_parameters(self) -> Iterable[tuple[str, nn.Parameter]]:
        """Under their Hugging Face names; the copy of a tied weight under that of the weight."""
        for name, parameter in chain.from_iterable(stage.part.named_parameters() for stage in self.stages):
            yield (TIED if parameter is self.head else name), parameter

    def copies(self, name: str, parameter: nn.Parameter) -> tuple[int, bool]:
        """Twice as many of a tied weight; the embedding is the first of them."""
        count, first = super().copies(name, parameter)
        if parameter is self.embedding or parameter is self.head:
            return 2 * count, first and parameter is self.embedding
        return count, first

    def gather(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The union over the stages of all ranks: names and shapes at first, then each tensor from its rank.

        Pickled, a gradient that is a view of a bucket would carry the whole bucket, and so would all others in it.
        """
        group, mine = self.pipeline.get_group(), self.pipeline.get_local_rank()
        forms: list[dict[str, tuple[torch.Size, torch.dtype]]] = [{}] * self.pipeline.size()
        own = {name: (value.shape, value.dtype) for name, value in tensors.items()}
        dist.all_gather_object(forms, own, group=group)
        whole = dict[str, Tensor]()
        for rank, held in enumerate(forms):
            for name, (shape, dtype) in held.items():
                is_mine = rank == mine
                value = tensors[name].contiguous() if is_mine else torch.empty(shape, dtype=dtype, device=self.device)
                dist.broadcast(value, group=group, group_src=rank)
                whole[name] = value
        return whole

    @property
    def device(self) -> torch.device:
        return next(self.unwrapped.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """Of the parameters, and so of the loss."""
        return next(self.unwrapped.parameters()).dtype

    def _scaled(self, share: Tensor, target: Tensor) -> Tensor:  # noqa: ARG002 - the last stage has used its labels
        return share * self.gradient_scale

    @property
    def _sent_dtype(self) -> torch.dtype:
        """Of the hidden states between stages."""
        return compute_dtype(self.layout) or self.dtype

    @property
    def _num_positions(self) -> int:
        """Of each sequence, on this rank."""
        layout = self.layout
        return layout.workload.sequence_length // (layout.degree("ring") * layout.degree("ulysses"))

    def _hidden_shape(self, num_sequences: int) -> tuple[int, int, int]:
        """[B, S, H] of the hidden states between stages, which sequence parallelism cuts further than the ids."""
        cut = self.layout.degree("tp") if self.layout.part("tensor") is StrategyName.TP_SP else 1
        return num_sequences, self._num_positions // cut, self.layout.shape.hidden_size

    def _pipeline_stage(self, stage: Stage) -> _PipelineStage:
        """With the shapes of what it takes and gives.

        Else torch finds them in the first step by running the stage: 2.11 without gradients, and autocast would keep
        the weights that it has cast there for the whole step, without their gradients.
        """
        micro_batch, num_stages = self.layout.workload.micro_batch, self.layout.num_stages
        hidden_BSH = torch.empty(
            self._hidden_shape(micro_batch), dtype=self._sent_dtype, device="meta", requires_grad=True
        )
        ids_BS = torch.empty((micro_batch, self._num_positions), dtype=torch.int64, device="meta")
        share = torch.empty((), dtype=self.dtype, device="meta", requires_grad=True)
        return _PipelineStage(
            stage,
            stage.index,
            num_stages,
            self.device,
            input_args=ids_BS if stage.index == 0 else hidden_BSH,
            output_args=share if stage.index == num_stages - 1 else hidden_BSH,
            group=self.pipeline.get_group(),
        )


def _rank_of_stage(index: int, layout: Layout) -> int:
    degree = layout.degree("pp")
    return next(rank for rank in range(degree) if index in stages_of_rank(_kind(layout), rank, degree))


def _kind(layout: Layout) -> StrategyName:
    kind = layout.part("pipeline")
    assert kind is not None
    return kind


def _whole(micro_batches: Sequence[Batch]) -> dict[str, Tensor]:
    """The tensors of all micro-batches, one after the other along the batch: the schedule cuts them again."""
    names = ["ids_BS", "labels_BS", "positions_BS"]
    names += ["documents_BS"] * (micro_batches[0].documents_BS is not None)
    return {name: torch.cat([getattr(batch, name) for batch in micro_batches]) for name in names}


def _gradient(parameter: nn.Parameter) -> Tensor:
    """This rank's part of it."""
    assert parameter.grad is not None
    return parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
