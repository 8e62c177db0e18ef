"""Room strategies/pipeline_parallel.py: every schedule, its microbatches, its tie, its clipping, what it sends."""

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from perf.facts.record import LedgerEntry
from perf.measure.comms import Ledger
from strategies.pipeline_parallel import SCHEDULES, PipelineStage
from strategies.rules import refusal
from strategies.spec import STAGES_PER_RANK, ComputeDtype, LossKind, Mode, Options, StrategyName
from strategies.stages import V_SHAPED, stages_of_rank
from tests.equivalence import CPU, Case
from tests.pipeline_ranks import NORMS, Clipped, Gathered, Watched
from tests.test_equivalence import distances, faults, small_case

PIPELINES = tuple(STAGES_PER_RANK)
ITEM_BYTES = {ComputeDtype.FLOAT32: 4, ComputeDtype.BFLOAT16: 2}
NUM_MICRO_BATCHES = {
    StrategyName.PP_GPIPE: (1, 3, 6),
    StrategyName.PP_1F1B: (2, 3, 6),
    StrategyName.PP_INTERLEAVED: (1, 2, 3, 6),
    StrategyName.PP_INTERLEAVED_ZB: (1, 2, 3, 6),
    StrategyName.PP_ZBV: (1, 2, 3, 6),
    StrategyName.PP_DUALPIPEV: (5, 6),
}


@pytest.mark.parametrize(
    ("strategy", "count"), [(strategy, count) for strategy, counts in NUM_MICRO_BATCHES.items() for count in counts]
)
def test_number_of_microbatches_changes_nothing(launcher, strategy, count):
    case = small_case(strategy, sequences=count, micro_batch=1, loss=LossKind.CHUNKED)
    assert refusal(case.layout) is None
    assert not faults(distances(launcher, case), case)


@pytest.mark.parametrize(
    ("strategy", "world_size", "num_layers"),
    [
        (StrategyName.PP_1F1B, 2, 5),
        (StrategyName.PP_INTERLEAVED_ZB, 2, 7),
        (StrategyName.PP_ZBV, 2, 7),
        (StrategyName.PP_1F1B, 4, 5),
        (StrategyName.PP_ZBV, 4, 9),
    ],
)
def test_uneven_cut_of_layers_and_four_ranks_change_nothing(launcher, strategy, world_size, num_layers):
    case = Case(strategy=strategy, world_size=world_size, changes={"num_layers": num_layers})
    assert not faults(distances(launcher, case), case)


@pytest.mark.parametrize("strategy", [StrategyName.PP_GPIPE, StrategyName.PP_INTERLEAVED_ZB, StrategyName.PP_DUALPIPEV])
def test_microbatch_without_a_label_token_and_packed_documents_change_nothing(launcher, strategy):
    case = small_case(strategy, masked_sequences=(2, 3), masked_positions=(5,), packed=True, loss=LossKind.CHUNKED)
    assert not faults(distances(launcher, case), case)


def test_checkpointed_chunks_of_an_untied_model_change_nothing(launcher):
    options = Options(activation_checkpointing=True)
    case = small_case(StrategyName.PP_INTERLEAVED_ZB, tied=False, options=options, loss=LossKind.CHUNKED)
    assert not faults(distances(launcher, case), case)


@pytest.mark.parametrize(
    ("mistake", "fields"),
    {
        "gradients twice too large": ("gradients", "gradient_norm"),
        "gradients divided by the number of microbatches": ("gradients", "gradient_norm"),
        "a tied weight's gradients not summed": ("gradients", "gradient_norm"),
        "a dropped layer": ("logits", "on one side only", "the ranks own"),
        "clipping by a rank's own norm": ("parameters",),
    }.items(),
)
@pytest.mark.parametrize("strategy", [StrategyName.PP_1F1B, StrategyName.PP_ZBV])
def test_mistake_is_found(launcher, strategy, mistake, fields):
    case = small_case(strategy, mistake=mistake, options=Options(clip_norm=0.5))
    found = faults(distances(launcher, case), case)
    assert [field for field in fields if not any(field in fault for fault in found)] == []


def ledger_of(layout, rank):
    """Of one step: M x [b, S, H] over each border with another rank, and the tied weight's gradient once.

    Both directions have the same size: what a rank sends forward over a border comes back as a gradient.
    """
    degree, workload, shape = layout.degree("pp"), layout.workload, layout.shape
    mine = stages_of_rank(layout.strategy, rank, degree)
    borders = [{stage, other} for stage in mine for other in (stage - 1, stage + 1) if 0 <= other < layout.num_stages]
    count = layout.num_micro_batches * sum(not border <= set(mine) for border in borders)
    hidden_bytes = workload.micro_batch * workload.sequence_length * shape.hidden_size
    hidden_bytes *= ITEM_BYTES[workload.compute_dtype]
    sent = {str(workload.compute_dtype): [count, count * hidden_bytes]}
    if shape.tied_embeddings and layout.strategy not in V_SHAPED and rank in (0, degree - 1):
        calls = sent.setdefault("float32", [0, 0])
        calls[0] += 1
        calls[1] += 4 * shape.vocab_size * shape.hidden_size
    return tuple(
        LedgerEntry(op=op, axis="pp", dtype=dtype, count=count, bytes=num_bytes)
        for op in ("recv", "send")
        for dtype, (count, num_bytes) in sorted(sent.items())
    )


def watch(launcher, layout):
    return launcher.run(
        "tests.pipeline_ranks:two_steps", layout, world_size=layout.world_size, record=Watched, deadline_s=60.0
    )[0]


def with_dtype(layout, dtype):
    workload = msgspec.structs.replace(layout.workload, compute_dtype=dtype, loss=LossKind.CHUNKED)
    return msgspec.structs.replace(layout, workload=workload)


@pytest.mark.parametrize(("strategy", "world_size"), [*((s, 2) for s in PIPELINES), (StrategyName.PP_1F1B, 4)])
@pytest.mark.parametrize("dtype", ComputeDtype)
def test_step_sends_hidden_states_and_gradients_and_keeps_tied_copies_equal(launcher, strategy, world_size, dtype):
    layout = with_dtype(Case(strategy=strategy, world_size=world_size, changes={"num_layers": 5}).layout, dtype)
    records = watch(launcher, layout)
    for rank, record in enumerate(records):
        assert record.ledger == ledger_of(layout, rank)
        assert (record.num_copies_of_tied, record.copies_are_equal) == (2, True)
        assert record.holds_loss == (layout.num_stages - 1 in stages_of_rank(strategy, rank, world_size))


def test_ledger_by_hand():
    """4 microbatches of 2 x 16 x 32 float32 values: 16,384 bytes; the tied gradient: 98 x 32 of them, 12,544 bytes."""
    borders = {"pp_gpipe": 1, "pp_1f1b": 1, "pp_interleaved": 3, "pp_interleaved_zb": 3, "pp_zbv": 2, "pp_dualpipev": 2}
    for strategy in PIPELINES:
        layout = small_case(strategy).layout
        tie = strategy not in V_SHAPED
        count, num_bytes = 4 * borders[strategy] + tie, 16_384 * borders[strategy] + 12_544 * tie
        assert {(call.count, call.bytes) for call in ledger_of(layout, 0)} == {(count, num_bytes)}


@pytest.mark.parametrize("strategy", [StrategyName.PP_1F1B, StrategyName.PP_ZBV])
def test_clipping_uses_the_norm_over_all_stages_and_counts_a_tied_weight_once(launcher, strategy):
    layout = small_case(strategy).layout
    records = launcher.run("tests.pipeline_ranks:clipped", layout, world_size=2, record=Clipped, deadline_s=60.0)[0]
    first, last, tied = NORMS
    for record, own in zip(records, (first, last), strict=True):
        assert record.norm == pytest.approx(13.0, rel=1e-6)
        assert record.own == pytest.approx(own / 13, rel=1e-6)
    copies = [copy for record in records for copy in record.tied]
    assert copies == pytest.approx([tied / 13] * 2, rel=1e-6)


def test_tensors_of_all_stages_are_gathered_without_the_buckets_that_they_are_views_of(launcher):
    layout = small_case(StrategyName.PP_1F1B).layout
    records = launcher.run("tests.pipeline_ranks:gathered", layout, world_size=2, record=Gathered, deadline_s=60.0)[0]
    values = {
        f"{rank}.{index}": [1000 * rank + index + step for step in (0, 2, 1, 3)]
        for rank in range(2)
        for index in range(8)
    }
    for record in records:
        assert record.values == values | {"both": [1000], "scalar.0": [0], "scalar.1": [1]}
        assert (record.shapes["1.7"], record.shapes["both"], record.shapes["scalar.1"]) == ([2, 2], [1], [])
        assert (record.dtypes["0.0"], record.dtypes["scalar.0"]) == ("torch.float64", "torch.bfloat16")
        assert 16 * 4 * 8 < record.num_bytes < 2**14


@pytest.mark.skipif(not hasattr(torch.ops._c10d_functional, "isend"), reason="torch traces no point to point")
def test_traced_sends_are_counted_as_the_eager_ones():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh, traced = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",)), torch.ops._c10d_functional
        group, six = mesh.get_group("pp").group_name, torch.ones(6)
        with Ledger(mesh) as ledger:
            traced.isend(six, 1, 0, group)
            traced.irecv(six, 1, 0, group)
            traced.batch_p2p_ops(["isend", "irecv"], [1, 1], [0, 0], [six, six], group)
    finally:
        dist.destroy_process_group()
    assert ledger.entries() == tuple(
        LedgerEntry(op=op, axis="pp", dtype="float32", count=2, bytes=48) for op in ("recv", "send")
    )


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("strategy", PIPELINES)
def test_rules_refuse_the_numbers_of_microbatches_that_torch_refuses(strategy, degree):
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=degree)
    try:
        for count in range(1, 13):
            case = Case(
                strategy=strategy, world_size=degree, sequences=count, micro_batch=1, changes={"num_layers": 2 * degree}
            )
            assert (refusal(case.layout) is None) == accepts(strategy, degree, count), count
    finally:
        dist.destroy_process_group()


def accepts(strategy, degree, count):
    num_stages = degree * STAGES_PER_RANK[strategy]
    mine = stages_of_rank(strategy, 0, degree)
    stages = [PipelineStage(nn.Linear(1, 1), stage, num_stages, CPU) for stage in mine]
    try:
        SCHEDULES[strategy](stages if len(stages) > 1 else stages[0], count, loss_fn=lambda *_: None)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("strategy", [StrategyName.PP_INTERLEAVED_ZB, StrategyName.PP_ZBV, StrategyName.PP_DUALPIPEV])
def test_compiled_zero_bubble_is_refused(strategy):
    layout = msgspec.structs.replace(small_case(strategy).layout, mode=Mode.COMPILE)
    assert "use eager, or `pp_interleaved`" in (refusal(layout) or "")
