"""The ledger of collectives: which op on which axis, in which dtype, how often and with how many bytes, in one step.

Counted where torch dispatches the ops, so the same on every backend, in eager and in compiled code. A payload is what
this rank passes in: a shard for all_gather, the whole tensor for reduce_scatter and all_reduce.
"""

import time
from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from perf.facts.record import LedgerEntry

# Op as the dispatcher names it -> (name in the ledger, position of the argument that holds this rank's payload).
_C10D = {
    "allreduce_": ("all_reduce", 0),
    "allreduce_coalesced_": ("all_reduce", 0),
    "allgather_": ("all_gather", 1),
    "_allgather_base_": ("all_gather", 1),
    "allgather_coalesced_": ("all_gather", 1),
    "allgather_into_tensor_coalesced_": ("all_gather", 1),
    "reduce_scatter_": ("reduce_scatter", 1),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "alltoall_": ("all_to_all", 1),
    "alltoall_base_": ("all_to_all", 1),
    "broadcast_": ("broadcast", 0),
    "reduce_": ("reduce", 0),
    "gather_": ("gather", 1),
    "scatter_": ("scatter", 1),
    "send": ("send", 0),
    "recv_": ("recv", 0),
    "recv_any_source_": ("recv", 0),
    "barrier": ("barrier", 0),
}
_FUNCTIONAL = {
    "all_reduce": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "broadcast": "broadcast",
    "isend": "send",
    "irecv": "recv",
}
"""Point to point only in code that torch 2.13 or newer has traced; eager calls are c10d's on every version."""
_NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
_SILENT = ("wait_tensor", "_wrap_tensor_autograd")


class Ledger(TorchDispatchMode):
    """While entered, notes every collective of this rank. A step under it is not a step to time."""

    def __init__(self, *meshes: DeviceMesh | None) -> None:
        """Names the groups of these meshes by their axes, where meshes share one by the first; all others `world`."""
        super().__init__()
        self._axes: dict[str, str] = {}
        for mesh in filter(None, meshes):
            for name in mesh.mesh_dim_names or ():
                self._axes.setdefault(mesh.get_group(name).group_name, name)
        self._counts: Counter[tuple[str, str, str]] = Counter()
        self._bytes: Counter[tuple[str, str, str]] = Counter()
        self.attention: set[str] = set()
        """Fused attention kernels that were dispatched, such as `flash_attention`."""
        self.arrivals_s: list[float] = []
        """System-wide monotonic time of each collective, in order."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Lets compiled code run compiled under this mode; else torch falls back to eager, and that is counted."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # the collectives inside of a DTensor op come through here again, on plain tensors
        if func.namespace in _NAMESPACES:
            self._note(func, args)
        elif "scaled_dot_product" in func._schema.name and "backward" not in func._schema.name:
            self.attention.add(func._schema.name.partition("::_scaled_dot_product_")[2])
        return func(*args, **(kwargs or {}))

    def entries(self) -> tuple[LedgerEntry, ...]:
        """Sorted, so that equal steps give equal ledgers."""
        return tuple(
            LedgerEntry(op=op, axis=axis, dtype=dtype, count=count, bytes=self._bytes[op, axis, dtype])
            for (op, axis, dtype), count in sorted(self._counts.items())
        )

    def _note(self, func: Any, args: tuple[Any, ...]) -> None:
        name = func._schema.name.partition("::")[2]
        if name in _SILENT:
            return
        if func.namespace == "c10d":
            op, position = _C10D.get(name, (name, 0))
        else:
            base = name.rstrip("_").removesuffix("_coalesced").removesuffix("_out")
            op, position = _FUNCTIONAL.get(base, base), 0
        if op == "batch_p2p_ops":
            for call, tensor in zip(args[0], args[3], strict=True):
                self._count(_FUNCTIONAL[call], self._axis(args), [tensor])
        else:
            self._count(op, self._axis(args), _tensors(args[position]))

    def _count(self, op: str, axis: str, payload: list[Tensor]) -> None:
        dtype = str(payload[0].dtype).removeprefix("torch.") if payload else "none"
        key = (op, axis, dtype)
        self._counts[key] += 1
        self._bytes[key] += sum(tensor.numel() * tensor.element_size() for tensor in payload)
        self.arrivals_s.append(time.monotonic())

    def _axis(self, args: tuple[Any, ...]) -> str:
        for argument in args:
            if isinstance(argument, torch.ScriptObject):
                try:
                    argument = ProcessGroup.unbox(argument)
                except (RuntimeError, TypeError):
                    continue
            if isinstance(argument, ProcessGroup):
                argument = argument.group_name
            if isinstance(argument, str) and argument in self._axes:
                return self._axes[argument]
        return "world"


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in _tensors(item)]
    return []
