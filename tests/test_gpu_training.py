"""On GPUs: every cell of the node matrix's smallest size trains as the unsharded model does, whatever its mode.

The yardstick is measured: how far the unsharded model in bfloat16 is from itself in float32.
"""

import statistics

import msgspec
import pytest
from filelock import FileLock

from perf import jsonfile
from perf.gpus import visible_gpus
from perf.launch import LaunchError
from perf.matrix import node
from strategies.spec import ComputeDtype, Mode, StrategyName
from strategies.value import Value
from tests.gpu_ranks import STEPS, Task, Training

NUM_GPUS = len(visible_gpus(None))
pytestmark = [pytest.mark.skipif(NUM_GPUS < 2, reason="needs 2 GPUs"), pytest.mark.long]


def smaller(cell):
    micro_batch = cell.workload.micro_batch if "pp" in cell.strategy else max(1, cell.workload.micro_batch // 2)
    return msgspec.structs.replace(cell, workload=msgspec.structs.replace(cell.workload, micro_batch=micro_batch))


CELLS = [smaller(cell) for cell in node() if cell.size == "0.6b" and cell.world_size <= 2]
"""Three of them fit on one pair of GPUs, so that three workers can share it: their micro-batches are made smaller."""
SINGLE = next(cell for cell in CELLS if cell.strategy is StrategyName.SINGLE and cell.mode is Mode.EAGER)
WORST, MEDIAN = 2.5, 1.3
"""Errors of a strategy's gradients over those of the unsharded model: of the worst tensor, and of the median one."""


class Yardstick(Value, frozen=True, kw_only=True):
    """The unsharded model's training, exact and in the cells' dtype."""

    gradients: str
    exact: Training
    rounded: Training

    @property
    def loss_band(self) -> tuple[float, ...]:
        """Per step: what rounding does to the loss, and what has become of it so far."""
        gaps = [abs(a - b) for a, b in zip(self.exact.shares, self.rounded.shares, strict=True)]
        return tuple(max(gaps[: step + 1]) + 1e-3 for step in range(STEPS))


def train(launcher, task):
    records, teardown_hang = launcher.run(
        "tests.gpu_ranks:train", task, world_size=task.cell.world_size, record=Training, deadline_s=240.0
    )
    assert not teardown_hang
    return records


@pytest.fixture(scope="session")
def yardstick(launcher, tmp_path_factory, worker_id):
    """Measured once for all workers."""
    base = tmp_path_factory.getbasetemp()
    folder = base if worker_id == "master" else base.parent
    file = folder / "yardstick.json"
    with FileLock(folder / "yardstick.lock"):
        if not file.exists():
            gradients = str(folder / "gradients.safetensors")
            workload = msgspec.structs.replace(SINGLE.workload, compute_dtype=ComputeDtype.FLOAT32, micro_batch=2)
            single = msgspec.structs.replace(SINGLE, workload=workload, label="exact")
            (exact,) = train(launcher, Task(cell=single, gradients=gradients, is_reference=True))
            (rounded,) = train(launcher, Task(cell=SINGLE, gradients=gradients))
            jsonfile.write(file, Yardstick(gradients=gradients, exact=exact, rounded=rounded))
    return jsonfile.read(file, Yardstick)


@pytest.mark.parametrize("cell", CELLS, ids=[cell.id for cell in CELLS])
def test_cell_trains_as_the_unsharded_model(launcher, yardstick, record_property, cell):
    records = train(launcher, Task(cell=cell, gradients=yardstick.gradients))
    losses = losses_of(records)
    unsharded, errors = yardstick.rounded.errors, records[0].errors
    shares = {name: error / unsharded[name] for name, error in errors.items()}
    record_property("losses", losses)
    record_property("loss_band", yardstick.loss_band)
    record_property("gradients", [max(shares.values()), statistics.median(shares.values())])
    record_property("norms", [record.gradient_norm for record in records])
    assert abs(losses[0] - cell.shape.expected_start_loss) < 0.3
    assert not losses_off(records, yardstick)
    assert losses[-1] < losses[0] - 1
    assert max(shares.values()) <= WORST, max(shares, key=shares.__getitem__)
    assert statistics.median(shares.values()) <= MEDIAN
    assert {record.replays > 0 for record in records} == {cell.mode is Mode.CUDAGRAPH}


def losses_of(records):
    return [sum(shares) for shares in zip(*(record.shares for record in records), strict=True)]


def losses_off(records, yardstick):
    """Steps whose loss is outside of its band."""
    gaps = [abs(loss - right) for loss, right in zip(losses_of(records), yardstick.rounded.shares, strict=True)]
    return {step: gap for step, gap in enumerate(gaps) if not gap <= yardstick.loss_band[step]}


def test_replays_of_an_old_batch_are_found(launcher, yardstick):
    (cell,) = [of for of in CELLS if of.strategy is StrategyName.SINGLE and of.mode is Mode.CUDAGRAPH]
    records = train(launcher, Task(cell=cell, gradients=yardstick.gradients, stale=True))
    assert losses_off(records, yardstick)


def test_hang_in_a_replay_is_a_hang_with_stacks(launcher):
    (cell,) = [of for of in CELLS if of.strategy is StrategyName.DDP and of.mode is Mode.CUDAGRAPH]
    with pytest.raises(LaunchError, match=r"^HANG"):
        launcher.run("tests.gpu_ranks:hang_in_replay", cell, world_size=2, record=Training, deadline_s=60.0)
