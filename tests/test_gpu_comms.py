"""Room perf/measure/comms.py, on GPUs: the ledger of a step is what NCCL's kernels do in one, by torch's profiler."""

import re
from collections import Counter

import msgspec
import pytest

from perf.facts.gpus import visible_gpus
from perf.facts.matrix import node
from strategies.layout import default_workload
from strategies.shapes import SIZES
from strategies.spec import ComputeDtype, Mode
from tests.gpu_ranks import Watched

pytestmark = pytest.mark.skipif(len(visible_gpus(None)) < 2, reason="needs 2 GPUs")
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


CELLS = [
    tiny(cell) for cell in node() if cell.size == "0.6b" and cell.world_size == 2 and cell.mode is not Mode.CUDAGRAPH
]


def test_tiny_is_tiny():
    assert all(cell.shape is SIZES["tiny"] for cell in CELLS)


@pytest.mark.parametrize("cell", CELLS, ids=[cell.id for cell in CELLS])
def test_ledger_is_what_nccl_does(launcher, cell):
    records, teardown_hang = launcher.run("tests.gpu_ranks:watch", cell, world_size=2, record=Watched, deadline_s=120.0)
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
