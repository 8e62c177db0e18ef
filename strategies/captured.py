"""The whole training step of a rank as one CUDA graph: captured once, then replayed with new data.

API: torch.cuda.CUDAGraph (Ng et al., "Accelerating PyTorch with CUDA Graphs", PyTorch blog, 2021). One launch replaces
the thousands of a step, so that the host no longer limits it. Collectives are captured with everything else.
"""

import gc
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from strategies.batch import Batch
from strategies.sharded import Sharded, train_step


class CapturedStep:
    """A replacement of `train_step`, made after `STEPS_BEFORE_CAPTURE` calls of that.

    All of them must run on one stream that is not the default one, from the building of the model on: autograd runs a
    backward on the streams of its forward, and what it would have to join from outside cannot be captured.
    """

    def __init__(self, sharded: Sharded, micro_batches: Sequence[Batch]) -> None:
        """Captures a step; nothing is computed. Every rank must do so at the same time.

        The gradients must be None, as a step leaves them: the captured one then makes them anew in the graph's memory.
        """
        self._inputs = [_cloned(batch) for batch in micro_batches]
        self._graph = torch.cuda.CUDAGraph()
        self.num_replays = 0
        gc.collect()  # what it would free in the middle of the capture may belong to streams outside of it
        # Other threads, such as the one that watches NCCL, go on with calls that a global capture would forbid.
        with torch.cuda.graph(self._graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
            self._loss = train_step(sharded, self._inputs)

    def __call__(self, micro_batches: Sequence[Batch]) -> Tensor:
        """One step on these micro-batches, which must have the shapes and the number of label tokens of the captured.

        Returns:
            This rank's share of the loss before the update (scalar).
        """
        for captured, batch in zip(self._inputs, micro_batches, strict=True):
            # A number of the host: it went into the graph as a constant.
            assert batch.num_label_tokens == captured.num_label_tokens
            for name, tensor in _tensors(captured).items():
                tensor.copy_(getattr(batch, name))
        self._graph.replay()
        self.num_replays += 1
        return self._loss.clone()

    def free(self) -> None:
        """Destroys the graph and its memory. Must come before the process group's end, which waits for it for ever."""
        torch.cuda.synchronize()
        del self._loss
        self._inputs = []
        self._graph.reset()


def _tensors(batch: Batch) -> dict[str, Tensor]:
    fields = {name: getattr(batch, name) for name in batch.__dataclass_fields__}
    return {name: value for name, value in fields.items() if isinstance(value, Tensor)}


def _cloned(batch: Batch) -> Batch:
    clones: dict[str, Any] = {name: tensor.clone() for name, tensor in _tensors(batch).items()}
    return replace(batch, **clones)
