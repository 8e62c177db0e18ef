"""Room perf/measure/comms.py, on GPUs: the ledger of a step is what NCCL's kernels do in one, by torch's profiler."""

import re
from collections import Counter

import msgspec
import pytest

from perf.facts.matrix import known_cells
from strategies.layout import default_workload
from strategies.rules import refusal
from strategies.shapes import SIZES
from strategies.spec import ComputeDtype, LinkProfile, Mode
from tests.gpu_ranks import Watched
from tests.shared_gpus import on_gpus

KERNELS = {
    "all_reduce": "AllReduce",
    "all_gather": "AllGather",
    "reduce_scatter": "ReduceScatter",
    "broadcast": "Broadcast",
    "all_to_all": "SendRecv",
}


def tiny(cell):
    """The cell at size `tiny`, in the dtype that the GPUs' kernels take."""
    workload = default_workload("tiny", cell.strategy, cell.world_size)
    workload = msgspec.structs.replace(workload, compute_dtype=ComputeDtype.BFLOAT16)
    return msgspec.structs.replace(cell, size="tiny", workload=workload)


LARGE = [cell for cell in known_cells().values() if (cell.size, cell.link) == ("0.6b", LinkProfile.NATIVE)]
CELLS = [
    cell
    for cell in map(tiny, LARGE)
    if cell.world_size > 1 and cell.mode is not Mode.CUDAGRAPH and refusal(cell.layout) is None
]
"""`tiny` has fewer layers than an interleaved pipeline of four ranks has stages."""


def test_tiny_is_tiny():
    assert all(cell.shape is SIZES["tiny"] for cell in CELLS)
    assert {cell.world_size for cell in CELLS} == {2, 4}


@pytest.mark.parametrize("cell", [pytest.param(cell, id=cell.id, marks=on_gpus(cell.world_size)) for cell in CELLS])
def test_ledger_is_what_nccl_does(launcher, cell):
    records, teardown_hang = launcher.run(
        "tests.gpu_ranks:watch", cell, world_size=cell.world_size, record=Watched, deadline_s=120.0
    )
    assert not teardown_hang
    for record in records:
        kernels = Counter()
        for name, count in record.device.items():
            if found := re.match(r"ncclDevKernel_([A-Za-z]+)", name):
                kernels[found[1]] += count
        calls = Counter()
        for entry in record.ledger:
            calls[KERNELS.get(entry.op, entry.op)] += entry.count
        # Sends and receives that are issued together are one kernel.
        one_way = calls.pop("send", 0), calls.pop("recv", 0)
        if any(one_way):
            assert max(one_way) / 2 <= kernels.pop("SendRecv") <= sum(one_way)
        assert kernels == calls
