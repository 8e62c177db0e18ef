"""Room perf/facts/measurement.py: one value per run and metric, ledgers, the straggler, and what is missing."""

import math

import msgspec
import pytest

from perf.facts import stats
from perf.facts.measurement import (
    METRICS,
    PEAK_ALLOCATED,
    PEAK_RESERVED,
    PEAK_RESIDENT,
    STEP_TIME,
    THROUGHPUT,
    gaps,
    is_host_bound,
    ledgers,
    measure,
    straggler,
)
from perf.facts.record import LedgerEntry
from strategies.spec import LinkProfile
from tests.factory import PLAN, cell, change_ranks, measurement, run_record

GPU_CELL = cell(link=LinkProfile.NATIVE)


def of_runs(*runs, plan=PLAN):
    return measure(runs[0].cell, plan, list(runs))


def one_run(of_run):
    """The measurement of a plan with one run."""
    return of_runs(of_run, plan=msgspec.structs.replace(PLAN, runs=1))


def test_warm_up_is_not_counted():
    """Steps of 40, 3 and 8 x 1 s at 1000 tokens: 1000 tok/s, where the mean with the warm-up would say 196."""
    of = cell()
    of = msgspec.structs.replace(of, workload=msgspec.structs.replace(of.workload, sequences=10, sequence_length=100))
    run = change_ranks(run_record(of, step_times_s=(1.0,) * 8), warmup_times_s=(40.0, 3.0))
    assert of_runs(run).values(THROUGHPUT) == (1000.0,)
    assert of_runs(run).values(STEP_TIME) == (1.0,)


def test_records_of_an_earlier_version_keep_the_warm_up_that_they_had():
    """Told as today's, five steps more, they would count as runs of today's recipe."""
    of = cell(size="0.6b", link=LinkProfile.NATIVE)
    run = run_record(of)
    earlier = msgspec.structs.replace(run, plan=msgspec.structs.replace(run.plan, warmup_steps=5))
    assert of.plan(PLAN).warmup_steps == 10
    assert of_runs(earlier).recipe.warmup_steps == 5
    assert of_runs(run).recipe == of.recipe(of.plan(PLAN))


def test_step_time_of_a_run_is_what_the_verdict_compares():
    times = (1.0, 1.1, 1.2, 1.3, 1.9, 2.0, 2.1, 2.2, 2.3, 9.0)
    run = run_record(step_times_s=times)
    assert of_runs(run).values(STEP_TIME) == pytest.approx([sum(times[1:-1]) / 8])
    assert of_runs(run).values(STEP_TIME) == pytest.approx([math.exp(stats.run_level(times))])


def test_outlier_does_not_move_the_step_time_and_is_counted():
    times = (1.0, 1.0, 1.0, 1.0, 12.0, 1.0, 1.0, 1.0)
    run = run_record(step_times_s=times)
    assert of_runs(run).values(STEP_TIME) == (1.0,)
    assert stats.outlier_count(run.step_times_s) == 1


def test_no_measured_step_is_a_gap_and_no_number():
    run = run_record(step_times_s=())
    assert of_runs(run).values(STEP_TIME) == (None,)
    assert of_runs(run).values(THROUGHPUT) == (None,)
    assert of_runs(run).median(STEP_TIME) is None
    assert "run 0 rank 0 has 0 of 10 measured steps" in gaps(one_run(run))


def test_plan_without_timed_steps_measures_nothing():
    plan = msgspec.structs.replace(PLAN, timed_steps=0, runs=1)
    assert "run 0 rank 1 has 0 of 0 measured steps" in gaps(of_runs(run_record(step_times_s=()), plan=plan))


@pytest.mark.parametrize("slow", [0, 1])
def test_step_time_is_the_slowest_ranks(slow):
    run = change_ranks(run_record(step_time_s=0.1), slow, step_times_s=(0.3,) * 10)
    assert of_runs(run).values(STEP_TIME) == (0.3,)


def test_step_time_takes_the_slowest_rank_of_each_step():
    run = change_ranks(run_record(step_time_s=0.1), 0, step_times_s=(0.1, 0.4) * 5)
    run = change_ranks(run, 1, step_times_s=(0.3, 0.2) * 5)
    assert run.step_times_s == (0.3, 0.4) * 5


def test_steps_that_one_rank_lacks_leave_the_rest_readable_and_a_gap():
    run = change_ranks(run_record(step_time_s=0.1), 1, step_times_s=(0.3,) * 4, losses=(3.0,) * 9)
    assert (run.step_times_s, len(run.losses)) == ((0.3,) * 4, 9)
    assert gaps(one_run(run)) == [
        "run 0 rank 1 has 4 of 10 measured steps",
        "run 0 rank 1 has losses of 9 of 15 steps",
    ]


def test_throughput_counts_each_token_of_the_global_batch_once():
    assert measurement(step_times_s=(0.5, 0.25, 1.0)).values(THROUGHPUT) == (1024.0, 2048.0, 512.0)


@pytest.mark.parametrize("largest", [0, 1])
def test_peaks_are_the_largest_over_ranks(largest):
    run = run_record(GPU_CELL, allocated_bytes=1000)
    memory = msgspec.structs.replace(
        run.ranks[0].memory, allocated_bytes=2000, reserved_bytes=2**40, resident_bytes=2**41
    )
    whole = of_runs(change_ranks(run, largest, memory=memory))
    assert whole.values(PEAK_ALLOCATED) == (2000.0,)
    assert whole.values(PEAK_RESERVED) == (float(2**40),)
    assert whole.values(PEAK_RESIDENT) == (float(2**41),)


def test_cpu_has_no_allocator_peaks():
    assert measurement().values(PEAK_ALLOCATED) == (None, None, None)
    assert measurement().median(PEAK_ALLOCATED) is None
    assert measurement().median(PEAK_RESIDENT) == 400 * 2**20


def test_median_over_runs():
    assert measurement(step_times_s=(0.1, 0.9, 0.2)).median(STEP_TIME) == 0.2


def test_median_is_unknown_when_one_run_lacks_the_metric():
    assert measurement(GPU_CELL, allocated_bytes=(1000, None, 1000)).median(PEAK_ALLOCATED) is None


def test_metric_table_names_units_and_the_better_direction():
    assert {name: (metric.name, metric.unit, metric.better) for name, (metric, _) in METRICS.items()} == {
        "step_time_s": ("step_time_s", "s", "lower"),
        "tokens_per_s": ("tokens_per_s", "tok/s", "higher"),
        "peak_allocated_bytes": ("peak_allocated_bytes", "bytes", "lower"),
        "peak_reserved_bytes": ("peak_reserved_bytes", "bytes", "lower"),
        "peak_resident_bytes": ("peak_resident_bytes", "bytes", "lower"),
    }


def test_runs_of_another_cell_are_not_taken():
    with pytest.raises(ValueError, match="run 0 of ddp-tiny-eager-w4-gloo is a record of"):
        measure(cell(world_size=4), PLAN, [run_record(cell())])


def test_equal_ledgers_are_told_once_and_others_apart():
    run = run_record(cell(world_size=4))
    entry = LedgerEntry(op="send", axis="pp", dtype="float32", count=2, bytes=64)
    run = change_ranks(run, 2, ledger=(entry,))
    assert [(ledger.ranks, ledger.entries) for ledger in ledgers(run)] == [
        ((0, 1, 3), run.ranks[0].ledger),
        ((2,), (entry,)),
    ]


@pytest.mark.parametrize(
    ("arrivals_s", "late"),
    [
        (((100.0,), (100.2,)), (1, 0.2)),
        (((100.3,), (100.0,)), (0, 0.3)),
        (((1.0, 2.0), (1.1, 2.7)), (1, 0.7)),
        (((1.0, 2.5), (1.1, 2.0)), (0, 0.5)),
    ],
)
def test_straggler_is_named_by_the_collective_it_reached_last(arrivals_s, late):
    run = run_record()
    for rank, times in enumerate(arrivals_s):
        run = change_ranks(run, rank, arrivals_s=times)
    assert straggler(run) == pytest.approx(late)


@pytest.mark.parametrize("arrivals_s", [((), ()), ((1.0, 2.0), (1.0,))], ids=["no collective", "uneven"])
def test_straggler_is_unknown_without_common_collectives(arrivals_s):
    run = run_record()
    for rank, times in enumerate(arrivals_s):
        run = change_ranks(run, rank, arrivals_s=times)
    assert straggler(run) is None


def test_one_rank_has_no_straggler():
    run = run_record(cell(world_size=2))
    assert straggler(msgspec.structs.replace(run, ranks=run.ranks[:1])) is None


def test_whole_measurements_have_no_gap():
    assert gaps(measurement()) == []
    assert gaps(measurement(GPU_CELL, allocated_bytes=(1000, 1000, 1000))) == []


def changed(**changes):
    return one_run(change_ranks(run_record(), 1, **changes))


GAPS = {
    "fewer runs": (of_runs(run_record(), run_record(index=1)), "2 of 3 runs"),
    "truncated run": (changed(step_times_s=(0.1,) * 4), "run 0 rank 1 has 4 of 10 measured steps"),
    "too many steps": (changed(step_times_s=(0.1,) * 11), "run 0 rank 1 has 11 of 10 measured steps"),
    "a step of no time": (changed(step_times_s=(0.1,) * 9 + (0.0,)), "run 0 rank 1 has a step time of 0.0 s"),
    "a negative step": (changed(step_times_s=(0.1,) * 9 + (-1.0,)), "run 0 rank 1 has a step time of -1.0 s"),
    "missing losses": (changed(losses=()), "run 0 rank 1 has losses of 0 of 15 steps"),
    "missing rank": (
        one_run(msgspec.structs.replace(run_record(), ranks=run_record().ranks[:1])),
        "run 0 has records of ranks [0], not of 2 ranks",
    ),
    "no rank": (one_run(msgspec.structs.replace(run_record(), ranks=())), "run 0 has records of ranks []"),
    "one rank twice": (changed(rank=0), "run 0 has records of ranks [0, 0], not of 2 ranks"),
    "teardown hang": (
        one_run(msgspec.structs.replace(run_record(), teardown_hang=True)),
        "run 0: teardown hang, its processes had to be killed after measuring",
    ),
    "GPU without allocator statistics": (one_run(run_record(GPU_CELL)), "a run has no allocator statistics"),
}


@pytest.mark.parametrize("case", GAPS)
def test_what_is_missing_is_said(case):
    incomplete, message = GAPS[case]
    (gap,) = gaps(incomplete)
    assert gap.startswith(message)


def test_all_gaps_are_said():
    run = change_ranks(run_record(index=4), step_times_s=(), losses=())
    found = gaps(of_runs(msgspec.structs.replace(run, teardown_hang=True)))
    assert len(found) == 6
    assert {text.partition(" has")[0] for text in found} >= {"run 4 rank 0", "run 4 rank 1", "1 of 3 runs"}


def issued(*issue_times_s):
    """One run of 100 ms steps for each time that the host took to issue one."""
    runs = [run_record(GPU_CELL, index=index, step_time_s=0.1) for index in range(len(issue_times_s))]
    return of_runs(*(change_ranks(run, issue_time_s=s) for run, s in zip(runs, issue_times_s, strict=True)))


@pytest.mark.parametrize(
    ("issue_times_s", "bound"),
    [
        ((0.05, 0.06, 0.0969), False),
        ((0.0936, 0.0936, 0.0936), False),  # as eager `single`
        ((0.05, 0.09, 0.114), False),  # as cp_ring: one of seven
        ((0.05, 0.0971, 0.0971), True),
        ((0.099, 0.099), True),
        ((0.05, 0.05, None), True),
    ],
)
def test_host_bound_is_a_cell_whose_steps_are_hardly_issued_in_time(issue_times_s, bound):
    assert is_host_bound(issued(*issue_times_s)) is bound


def test_run_without_a_step_is_host_bound_for_all_that_is_known():
    run = change_ranks(run_record(GPU_CELL, step_times_s=()), issue_time_s=0.05)
    assert is_host_bound(of_runs(run))
