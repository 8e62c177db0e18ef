"""Room perf/tell/conditions.py: what was in effect while a cell ran, as the report's tables say it."""

import msgspec

from perf.facts.measurement import measure
from perf.facts.provenance import Imported
from perf.facts.record import CompileState
from perf.tell.conditions import arms_table, mode_table, state_table
from strategies.spec import LinkProfile, Mode
from tests.factory import PLAN, cell, change_ranks, environment, gpu_use, measurement, run_record

ON_GPUS = cell(size="0.6b", mode=Mode.COMPILE, link=LinkProfile.NATIVE)


def test_mode_table_tells_what_ranks_and_runs_have_in_common_and_where_they_differ():
    state = CompileState(graphs=4, graph_breaks=1, recompiles_after_warmup=0)
    runs = [run_record(ON_GPUS), change_ranks(run_record(ON_GPUS, index=1), 1, compile=state, issue_time_s=0.07)]
    ((name, *told),) = mode_table([measure(ON_GPUS, PLAN, runs)]).rows
    assert name == ON_GPUS.id
    assert told == ["flash_attention", "1-4", "0-1", "0", "0", "-", "100.0 ms"]
    runs[0] = change_ranks(runs[0], issue_time_s=0.09, attention=("cudnn_attention",), replays=14)
    ((_, attention, *_, replays, issued, _),) = mode_table([measure(ON_GPUS, PLAN, runs)]).rows
    assert (attention, replays, issued) == ("cudnn_attention flash_attention", "0-14", "90.0 ms")


def test_state_table_is_over_all_gpus_and_runs_and_says_unknown_where_the_driver_was_silent():
    cool = msgspec.structs.replace(gpu_use("GPU-a", used_bytes=1), sm_clock_mhz=(1350, 1980), power_capped=True)
    hot = msgspec.structs.replace(gpu_use("GPU-b", used_bytes=1), temperature_c=70, throttled=("hardware slowdown",))
    of = measurement(ON_GPUS)
    whole = msgspec.structs.replace(of, runs=tuple(msgspec.structs.replace(run, gpus=(cool, hot)) for run in of.runs))
    ((_, *told),) = state_table([whole]).rows
    assert told == ["1350-1980 MHz", "3201 MHz", "50-70 C", "650 W", "3 of 6", "hardware slowdown", "0"]
    silent = msgspec.structs.replace(
        cool,
        sm_clock_mhz=None,
        memory_clock_mhz=None,
        temperature_c=None,
        power_w=None,
        power_capped=None,
        foreign_pids=None,
    )
    ((_, *told),) = state_table(
        [msgspec.structs.replace(of, runs=(msgspec.structs.replace(of.runs[0], gpus=(silent,)),))]
    ).rows
    assert told == ["unknown"] * 5 + ["none", "unknown"]
    assert state_table([of]).rows == ()


def test_arms_table_has_both_builds_of_a_cell_and_only_runs_that_were_neighbours():
    old = Imported(strategies="/other", torch="/torch", digest="0ld")
    new = Imported(strategies="/this", torch="/torch", digest="new")
    mine = [change_ranks(run_record(index=index, step_time_s=0.1 * (1 + index)), imported=new) for index in range(3)]
    other = [change_ranks(run_record(index=2, step_time_s=0.2, env=environment(dirty=True)), imported=old)]
    rows = arms_table([(measure(cell(), PLAN, mine), other), (measurement(), [])]).rows
    assert [row[1:7] for row in rows] == [
        ("reference", "c0ffee with changes", "2.13.0", "0ld", "1", "200.0 ms"),
        ("candidate", "c0ffee", "2.13.0", "new", "1", "300.0 ms"),
    ]
