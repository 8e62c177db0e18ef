"""Room perf/judge/correctness.py: the first gate; each wrong number is found and said, old -> new."""

import msgspec
import pytest

from perf.facts.measurement import RankLedger, measure
from perf.facts.record import CompileState, LedgerEntry
from perf.judge.correctness import BANDS, differences, intrinsic_errors, unlike_unsharded
from strategies.spec import ComputeDtype, LinkProfile, Mode, Options, StrategyName
from tests.factory import PLAN, cell, change_ranks, invariants, measurement, run_record

CELLS = [
    cell(),
    cell(StrategyName.SINGLE, world_size=1),
    cell(StrategyName.FSDP2, mode=Mode.COMPILE),
    cell(size="0.6b", link=LinkProfile.NATIVE),
    cell(size="1.7b", link=LinkProfile.NATIVE, world_size=4),
]
START = cell().shape.expected_start_loss


def of_run(run, plan=PLAN):
    return measure(run.cell, plan, [run])


def with_rank(*ranks, of=None, **changes):
    return of_run(change_ranks(run_record(of), *ranks, **changes))


def with_losses(losses):
    """One run whose global losses are these, each rank holding half of them."""
    return with_rank(losses=tuple(None if loss is None else loss / 2 for loss in losses))


@pytest.mark.parametrize("of", CELLS, ids=lambda of: of.id)
def test_right_measurement_has_no_error_and_no_difference(of):
    whole = measurement(of)
    assert intrinsic_errors(whole) == []
    assert differences(whole, invariants(of)) == []


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("step", [0, 7, 14])
def test_loss_that_is_not_finite_is_wrong_from_its_step_on(rank, step):
    losses = list(run_record().ranks[0].losses)
    losses[step:] = [None] * (len(losses) - step)
    assert intrinsic_errors(with_rank(rank, losses=tuple(losses))) == [
        f"run 0: the loss is not finite from step {step} on"
    ]


@pytest.mark.parametrize(
    ("start", "is_wrong"),
    [
        (START, False),
        (START + 0.299, False),
        (START - 0.299, False),
        (START + 0.301, True),
        (START - 0.301, True),
        (4 * START, True),
    ],
)
def test_start_loss_lies_within_3_tenths_of_a_fresh_models(start, is_wrong):
    errors = intrinsic_errors(with_losses((start,) + (START,) * 14))
    assert (errors != []) is is_wrong
    if is_wrong:
        assert f"the loss starts at {start:.4f}" in errors[0]
        assert f"ln 512 + 64 x 0.02^2 / 2 = {START:.4f}" in errors[0]


def test_start_loss_of_a_checkpoint_is_its_own():
    plan = msgspec.structs.replace(PLAN, checkpoint="/models/trained")
    trained = with_losses((2.0,) * 15)
    assert intrinsic_errors(msgspec.structs.replace(trained, plan=plan)) == []
    assert len(intrinsic_errors(trained)) == 1


def test_parameters_are_counted_once_over_all_ranks():
    assert intrinsic_errors(with_rank(num_parameters=279_360)) == [
        "run 0: the ranks hold 558,720 parameters together, the model has 279,360"
    ]
    assert len(intrinsic_errors(with_rank(0, num_parameters=279_359))) == 1
    split = run_record()
    for rank in (0, 1):
        split = change_ranks(split, rank, num_parameters=139_680)
    assert intrinsic_errors(of_run(split)) == []


def test_tokens_are_counted_once_though_ranks_share_a_batch():
    """As when tensor-parallel ranks, which see the same tokens, each count all of them."""
    assert intrinsic_errors(with_rank(tokens_per_step=512)) == [
        "run 0: 1,024 tokens a step, the workload has 8 x 64 = 512"
    ]
    assert len(intrinsic_errors(with_rank(1, tokens_per_step=0))) == 1


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("norm", [None, 0.0, -1.0, float("nan")], ids=str)
@pytest.mark.parametrize("name", ["start_gradient_norm", "end_gradient_norm"])
def test_gradient_norm_is_a_positive_number_on_every_rank(rank, norm, name):
    (error,) = intrinsic_errors(with_rank(rank, **{name: norm}))
    assert error.startswith(f"run 0: the {name.replace('_', ' ')}")
    assert error.endswith("is not a positive number")


@pytest.mark.parametrize(
    ("state", "errors"),
    [
        ({"graphs": 0}, ["run 0: mode not in effect: rank 1 compiled no graph"]),
        ({"recompiles_after_warmup": 3}, ["run 0: mode not in effect: rank 1 compiled 3 more graphs after warm-up"]),
        ({"graph_breaks": 5}, []),
    ],
    ids=str,
)
def test_compile_cell_that_did_not_run_compiled_is_wrong(state, errors):
    whole = CompileState(graphs=1, graph_breaks=0, recompiles_after_warmup=0)
    found = intrinsic_errors(with_rank(1, of=CELLS[2], compile=msgspec.structs.replace(whole, **state)))
    assert len(found) == len(errors)
    assert all(text.startswith(error) for text, error in zip(found, errors, strict=True))


@pytest.mark.parametrize(("replays", "is_wrong"), [(0, True), (9, True), (10, False), (14, False)])
def test_captured_cell_that_did_not_replay_every_timed_step_is_wrong(replays, is_wrong):
    of = cell(mode=Mode.CUDAGRAPH, link=LinkProfile.NATIVE)
    errors = intrinsic_errors(measure(of, PLAN, [change_ranks(run_record(of), replays=replays)]))
    assert any("replayed its CUDA graph" in error for error in errors) is is_wrong


def test_cell_without_a_fused_attention_kernel_is_wrong():
    (error,) = intrinsic_errors(with_rank(1, attention=()))
    assert error.startswith("run 0: mode not in effect: rank 1 met no fused attention kernel (head dim 32, float32); ")


def test_more_graph_breaks_than_recorded_are_a_difference_and_fewer_are_none():
    of = CELLS[2]
    state = CompileState(graphs=3, graph_breaks=2, recompiles_after_warmup=0)
    broken = with_rank(1, of=of, compile=state)
    assert differences(broken, invariants(of)) == ["run 0: mode not in effect: graph breaks 0 -> 2"]
    assert differences(broken, msgspec.structs.replace(invariants(of), graph_breaks=2)) == []
    assert differences(of_run(run_record(of)), msgspec.structs.replace(invariants(of), graph_breaks=2)) == []


def test_eager_cell_needs_no_graph():
    state = CompileState(graphs=0, graph_breaks=0, recompiles_after_warmup=2)
    assert intrinsic_errors(with_rank(compile=state)) == []


@pytest.mark.parametrize(
    "incomplete",
    [
        of_run(msgspec.structs.replace(run_record(), ranks=run_record().ranks[:1])),
        with_rank(1, losses=()),
        with_rank(losses=()),
        with_rank(0, losses=(None, 3.0)),
    ],
    ids=["missing rank", "losses of one rank missing", "all losses missing", "losses of one rank cut"],
)
def test_what_is_missing_is_not_called_wrong(incomplete):
    assert intrinsic_errors(incomplete) == []


def test_every_error_of_every_run_is_said_and_a_shared_one_once():
    runs = [change_ranks(run_record(index=index), tokens_per_step=1) for index in range(3)]
    runs[1:] = [change_ranks(run, num_parameters=1) for run in runs[1:]]
    runs[2] = change_ranks(runs[2], start_gradient_norm=0.0)
    errors = intrinsic_errors(measure(cell(), PLAN, runs))
    assert [error.partition(": ")[0] for error in errors] == ["every run", "runs 1, 2", "run 2"]


@pytest.mark.parametrize("step", [0, 14])
@pytest.mark.parametrize(
    ("factor", "is_wrong"), [(1 + 0.9e-4, False), (1 - 0.9e-4, False), (1 + 1.1e-4, True), (1 - 1.1e-4, True)]
)
def test_loss_curve_of_tiny_repeats_within_1e_4(step, factor, is_wrong):
    losses = list(run_record().losses)
    old, losses[step] = losses[step], losses[step] * factor
    found = differences(with_losses(losses), invariants())
    assert found == [f"run 0: loss of step {step}: {old:.6f} -> {losses[step]:.6f} (band 0.0001)"] * is_wrong


@pytest.mark.parametrize(
    ("name", "band", "allowed"),
    [("start_gradient_norm", 1e-4, "band 0.0001"), ("end_gradient_norm", 1e-2, "more than a factor of 1.01 apart")],
)
@pytest.mark.parametrize(("share", "is_wrong"), [(0.9, False), (-0.9, False), (1.1, True), (-1.1, True)])
def test_gradient_norm_of_tiny_repeats_within_its_band(name, band, allowed, share, is_wrong):
    old = getattr(invariants(), name)
    new = old * (1 + share * band)
    text = f"run 0: {name.replace('_', ' ')} {old:.6g} -> {new:.6g} ({allowed})"
    assert differences(with_rank(**{name: new}), invariants()) == [text] * is_wrong


@pytest.mark.parametrize(
    ("old", "new", "is_wrong"),
    [
        (0.58035, 1.24922, False),  # tp_sp-0.6b-cudagraph, 29 steps, one run of six
        (1.87533, 2.52989, False),  # fsdp2-0.6b-compile beside its reference, one run of 97
        (1.902, 1.3126, False),  # ddp-0.6b-compile, the least of 89 runs, and what is usual
        (0.364, 1.035, False),  # the unsharded model on one GPU, step 28
        (16.6, 95.5, True),  # a race for a buffer
        (1.9, 1.9 / 5.001, True),
        (1.9, None, True),
    ],
)
def test_last_gradient_norm_of_bfloat16_on_gpus_may_be_what_equal_runs_were(old, new, is_wrong):
    of = cell(size="0.6b", link=LinkProfile.NATIVE)
    recorded = msgspec.structs.replace(invariants(of), end_gradient_norm=old)
    found = differences(with_rank(of=of, end_gradient_norm=new), recorded)
    assert [error.startswith(f"run 0: end gradient norm {old:.6g} -> ") for error in found] == [True] * is_wrong


def test_bfloat16_has_wider_bands_than_float32():
    assert set(BANDS) == set(ComputeDtype)
    wide, narrow = BANDS[ComputeDtype.BFLOAT16], BANDS[ComputeDtype.FLOAT32]
    assert all(getattr(wide, name) > getattr(narrow, name) for name in narrow.__struct_fields__)
    of = cell(size="0.6b", link=LinkProfile.NATIVE)
    slightly_off = tuple(loss * 1.01 for loss in run_record(of).ranks[0].losses)
    assert differences(with_rank(of=of, losses=slightly_off), invariants(of)) == []
    assert len(differences(with_rank(of=of, losses=tuple(1.02 * loss for loss in slightly_off)), invariants(of))) == 1


def test_another_number_of_losses_says_both_counts():
    found = differences(with_losses((START,) * 4), invariants())
    assert "run 0: 4 losses, 15 recorded" in found


ALL_REDUCE = run_record().ranks[0].ledger[0]
CALL = "1 calls, 1,117,440 bytes"
GATHER = LedgerEntry(op="all_gather", axis="dp", dtype="float32", count=4, bytes=2048)


@pytest.mark.parametrize(
    ("ledger", "text"),
    [
        (
            (msgspec.structs.replace(ALL_REDUCE, bytes=ALL_REDUCE.bytes + 4),),
            "all_reduce/dp/float32: 1 calls, 1,117,440 bytes -> 1 calls, 1,117,444 bytes",
        ),
        (
            (msgspec.structs.replace(ALL_REDUCE, count=2),),
            "all_reduce/dp/float32: 1 calls, 1,117,440 bytes -> 2 calls, 1,117,440 bytes",
        ),
        ((), "all_reduce/dp/float32: 1 calls, 1,117,440 bytes -> none"),
        ((GATHER, ALL_REDUCE), "all_gather/dp/float32: none -> 4 calls, 2,048 bytes"),
        (
            (msgspec.structs.replace(ALL_REDUCE, dtype="bfloat16"),),
            f"all_reduce/dp/bfloat16: none -> {CALL}; all_reduce/dp/float32: {CALL} -> none",
        ),
        (
            (msgspec.structs.replace(ALL_REDUCE, axis="tp"),),
            f"all_reduce/dp/float32: {CALL} -> none; all_reduce/tp/float32: none -> {CALL}",
        ),
    ],
    ids=["bytes", "count", "lost", "added", "dtype", "axis"],
)
def test_ledger_difference_is_named_with_its_rank_old_to_new(ledger, text):
    assert differences(with_rank(1, ledger=ledger), invariants()) == [f"run 0: collectives of rank 1: {text}"]


def test_collectives_of_a_rank_without_record_are_a_difference():
    recorded = msgspec.structs.replace(invariants(), ledger=(RankLedger(ranks=(0,), entries=(ALL_REDUCE,)),))
    (found,) = differences(with_rank(), recorded)
    assert "collectives of rank 1: all_reduce/dp/float32: none -> 1 calls" in found


UNSHARDED = cell(StrategyName.SINGLE, world_size=1)


def test_cell_of_which_nothing_is_recorded_is_held_to_the_unsharded_model():
    """The test's cells differ in how they are cut alone, and the recorded run may have had fewer steps."""
    recorded = invariants(UNSHARDED)
    recorded = msgspec.structs.replace(recorded, losses=recorded.losses[:12])
    assert unlike_unsharded(measurement(), recorded) == []
    assert unlike_unsharded(measurement(cell(micro_batch=1)), recorded) == [], "another order of the sums"
    right = run_record().ranks[0].losses
    off = with_rank(losses=(*right[:6], *(1.001 * loss for loss in right[6:])))
    (error,) = unlike_unsharded(off, recorded)
    assert "unlike the unsharded model, loss of step 6" in error
    (error,) = unlike_unsharded(with_rank(start_gradient_norm=2.51), recorded)
    assert "start gradient norm 2.5 -> 2.51" in error


def test_norm_of_bfloat16_cells_is_held_closer_to_the_unsharded_models_than_to_that_of_other_machines():
    of = {"size": "0.6b", "link": LinkProfile.NATIVE}
    recorded = invariants(cell(StrategyName.SINGLE, world_size=1, **of))
    off = with_rank(of=cell(**of), start_gradient_norm=2.5 * 1.02)
    assert len(unlike_unsharded(off, recorded)) == 1
    assert differences(off, invariants(cell(**of))) == []


def test_what_is_not_the_same_computation_is_not_compared():
    recorded = invariants(UNSHARDED)
    wrong = {"start_gradient_norm": 7.0}
    reseeded = msgspec.structs.replace(cell(), workload=msgspec.structs.replace(cell().workload, seed=1))
    assert unlike_unsharded(with_rank(of=reseeded, **wrong), recorded) == []
    other = msgspec.structs.replace(cell(), options=Options(optimizer_state=ComputeDtype.BFLOAT16))
    right = run_record().ranks[0].losses
    later = with_rank(of=other, losses=(right[0], *(1.1 * loss for loss in right[1:])))
    assert unlike_unsharded(later, recorded) == [], "other options: the first step alone"
    assert unlike_unsharded(with_rank(of=other, **wrong), recorded) != []
