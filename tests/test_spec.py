"""Room strategies/spec.py: the arithmetic of model shapes, and every reason to refuse a layout."""

import msgspec
import pytest

from strategies.layout import Layout, default_workload
from strategies.rules import refusal
from strategies.shapes import SIZES
from strategies.spec import StrategyName, Workload


def layout(strategy: StrategyName, world_size: int, size: str = "tiny", **changes: int) -> Layout:
    workload = msgspec.structs.replace(default_workload(size), **changes)
    return Layout(strategy=strategy, shape=SIZES[size], world_size=world_size, workload=workload)


def test_default_workloads():
    big, tiny = default_workload("0.6b"), default_workload("tiny")
    assert (big.tokens_per_step, big.compute_dtype) == (32_768, "bfloat16")
    assert (tiny.tokens_per_step, tiny.compute_dtype) == (512, "float32")


@pytest.mark.parametrize(
    ("strategy", "world_size", "data_degree", "num_micro_batches"),
    [
        (StrategyName.SINGLE, 1, 1, 4),
        (StrategyName.DDP, 2, 2, 2),
        (StrategyName.FSDP2, 2, 2, 2),
        (StrategyName.DDP, 4, 4, 1),
    ],
)
def test_data_degree_and_gradient_accumulation(strategy, world_size, data_degree, num_micro_batches):
    cut = layout(strategy, world_size)
    assert (cut.data_degree, cut.num_micro_batches) == (data_degree, num_micro_batches)
    assert refusal(cut) is None
    assert cut.data_degree * cut.num_micro_batches * cut.workload.micro_batch == cut.workload.sequences


def test_values_cannot_be_changed_and_refuse_unknown_keys_and_wrong_types():
    workload = default_workload("tiny")
    with pytest.raises(AttributeError):
        workload.seed = 1
    builtins = msgspec.to_builtins(workload)
    assert msgspec.convert(builtins, Workload) == workload
    for change in ({"sequence": 8}, {"sequences": "8"}, {"compute_dtype": "float16"}):
        with pytest.raises(msgspec.ValidationError, match=next(iter(change))):
            msgspec.convert(builtins | change, Workload)
