"""On GPUs: cells of the node matrix train as the unsharded model does, whatever their mode.

The yardstick is measured: how far the unsharded model in bfloat16 is from itself in float32. Losses of later steps say
less than gradients: the first steps at the full learning rate blow rounding up, and the more so where it moves tokens
to other experts. So what rounding does to them is seen several times, each with its operations in another order.
"""

import itertools
import statistics

import msgspec
import pytest
from filelock import FileLock

from perf.facts import jsonfile
from perf.facts.matrix import known_cells
from perf.measure.launch import LaunchError
from strategies.spec import ComputeDtype, LinkProfile, Mode, StrategyName
from strategies.value import Value
from tests.gpu_ranks import STEPS, Task, Training
from tests.shared_gpus import NUM_GPUS, lack_of_gpus, on_gpus

pytestmark = [on_gpus(1), pytest.mark.long]
if NUM_GPUS < 4 and not lack_of_gpus(4):  # Two cells at once would want more memory than a shared GPU has.
    pytestmark.append(pytest.mark.xdist_group("shared GPUs"))


def smaller(cell):
    part, workload = 4 if cell.size == "a3b" else 2, cell.workload
    micro_batch = max(1, workload.micro_batch // part)
    workload = msgspec.structs.replace(workload, sequences=workload.sequences // part, micro_batch=micro_batch)
    return msgspec.structs.replace(cell, workload=workload)


CELLS = [
    smaller(cell) for cell in known_cells().values() if cell.size in ("0.6b", "a3b") and cell.link is LinkProfile.NATIVE
]
"""Of smaller batches: a GPU holds all four ranks of a dense one."""
WORST, MEDIAN = 2.5, 1.3
"""Errors of a strategy's gradients over those of the unsharded model: of the worst tensor, and of the median one."""
SPREADS = 5.0
"""Of the losses in bfloat16 around the exact one: Student's t of 4 degrees of freedom is beyond this once in 130."""


class Yardstick(Value, frozen=True, kw_only=True):
    """The unsharded model's training, exact and in the cells' dtype."""

    task: Task
    """Without a cell of its own: what all compared cells do."""
    exact: Training
    rounded: tuple[Training, ...]
    """Eager as the cells are first, then by other orders of the same operations."""

    @property
    def loss_band(self) -> tuple[float, ...]:
        """Per step: what rounding may do to the loss, by the most that it did in any step so far."""
        spreads = [
            statistics.fmean((way - exact) ** 2 for way in ways) ** 0.5
            for exact, *ways in zip(self.exact.shares, *(way.shares for way in self.rounded), strict=True)
        ]
        return tuple(SPREADS * spread + 1e-3 for spread in itertools.accumulate(spreads, max))


def single(size, mode=Mode.EAGER):
    return next(of for of in CELLS if (of.strategy, of.size, of.mode) == (StrategyName.SINGLE, size, mode))


def train(launcher, task):
    records, teardown_hang = launcher.run(
        "tests.gpu_ranks:train", task, world_size=task.cell.world_size, record=Training, deadline_s=300.0
    )
    assert not teardown_hang
    return records


def roundings(size):
    """The unsharded model in the cells' dtype, eager and compiled, each in micro-batches of two sizes."""
    cells = [single(size), single(size, Mode.COMPILE)]
    for cell in list(cells):
        assert cell.workload.micro_batch != 2
        workload = msgspec.structs.replace(cell.workload, micro_batch=2)
        cells.append(msgspec.structs.replace(cell, workload=workload, label="pairs"))
    return cells


@pytest.fixture
def yardstick(launcher, tmp_path_factory, worker_id, request):
    """Of the size of the test's cell, measured once for all workers. 5.6 B parameters: few steps, and two layers."""
    cell = request.node.callspec.params["cell"] if hasattr(request.node, "callspec") else single("0.6b")
    base = tmp_path_factory.getbasetemp()
    folder = base if worker_id == "master" else base.parent
    file = folder / f"yardstick-{cell.size}.json"
    with FileLock(file.with_suffix(".lock")):
        if not file.exists():
            gradients = str(folder / f"gradients-{cell.size}.safetensors")
            own, *others = roundings(cell.size)
            few = {"steps": 4, "of_names": "layers.0."} if cell.size == "a3b" else {}
            workload = msgspec.structs.replace(own.workload, compute_dtype=ComputeDtype.FLOAT32, micro_batch=1)
            exact = msgspec.structs.replace(own, workload=workload, label="exact")
            task = Task(cell=own, gradients=gradients, **few)
            (best,) = train(launcher, msgspec.structs.replace(task, cell=exact, is_reference=True))
            tasks = [task, *(msgspec.structs.replace(task, cell=other) for other in others)]
            rounded = tuple(train(launcher, way)[0] for way in tasks)
            jsonfile.write(file, Yardstick(task=task, exact=best, rounded=rounded))
    return jsonfile.read(file, Yardstick)


def losses_of(records):
    return [sum(shares) for shares in zip(*(record.shares for record in records), strict=True)]


def losses_off(records, yardstick):
    """Steps whose loss is outside of its band."""
    gaps = [abs(loss - right) for loss, right in zip(losses_of(records), yardstick.exact.shares, strict=True)]
    return {step: gap for step, gap in enumerate(gaps) if not gap <= yardstick.loss_band[step]}


def marks(cell):
    if NUM_GPUS and cell.size == "a3b":
        return pytest.mark.skipif(cell.world_size > NUM_GPUS, reason="two ranks of a3b want more memory than a GPU has")
    return on_gpus(cell.world_size)


@pytest.mark.parametrize("cell", [pytest.param(cell, id=cell.id, marks=marks(cell)) for cell in CELLS])
def test_cell_trains_as_the_unsharded_model(launcher, yardstick, record_property, cell):
    task = msgspec.structs.replace(yardstick.task, cell=cell)
    if cell.mode is Mode.CUDAGRAPH and task.steps < STEPS:
        pytest.skip("too few steps for a capture")
    records = train(launcher, task)
    losses = losses_of(records)
    unsharded, errors = yardstick.rounded[0].errors, records[0].errors
    shares = {name: error / unsharded[name] for name, error in errors.items()}
    record_property("loss_gaps", [loss - exact for loss, exact in zip(losses, yardstick.exact.shares, strict=True)])
    record_property("loss_band", yardstick.loss_band)
    record_property("gradients", [max(shares.values()), statistics.median(shares.values())])
    record_property("norms", [record.gradient_norm for record in records])
    assert abs(losses[0] - cell.shape.expected_start_loss) < 0.3
    assert not losses_off(records, yardstick)
    assert max(shares.values()) <= WORST, max(shares, key=shares.__getitem__)
    assert statistics.median(shares.values()) <= MEDIAN
    assert {record.replays > 0 for record in records} == {cell.mode is Mode.CUDAGRAPH}


def test_replays_of_an_old_batch_are_found(launcher, yardstick):
    task = msgspec.structs.replace(yardstick.task, cell=single("0.6b", Mode.CUDAGRAPH), stale=True)
    assert losses_off(train(launcher, task), yardstick)


@on_gpus(2)
def test_hang_in_a_replay_is_a_hang_with_stacks(launcher):
    (cell,) = [of for of in CELLS if of.strategy is StrategyName.DDP and of.mode is Mode.CUDAGRAPH]
    with pytest.raises(LaunchError, match=r"^HANG") as caught:
        launcher.run("tests.gpu_ranks:hang_in_replay", cell, world_size=2, record=Training, deadline_s=60.0)
    assert "synchronize" in str(caught.value)
