"""Rooms timeline, trace_events and intervals of perf: the parts of a step add up to it, none is negative,
and each moment is in the part that a docstring names.
"""

import gzip
import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perf.measure.evidence import RankTrace
from perf.measure.intervals import length, subtract, union, within
from perf.measure.timeline import innermost, timeline
from perf.measure.trace_events import WAIT_MARK, Event, Kind, read_trace

steady = settings(deadline=None, derandomize=True)
thorough = settings(steady, max_examples=300)
MOMENTS = st.integers(0, 9)
INTERVALS = st.lists(st.tuples(MOMENTS, MOMENTS), max_size=12)
MS = 10**6


def moments(intervals):
    """The same as a set of whole moments."""
    return {moment for start, end in intervals for moment in range(start, end)}


@given(INTERVALS)
@steady
def test_union_covers_what_any_covers_in_disjoint_parts_that_do_not_touch(intervals):
    merged = union(intervals)
    assert moments(merged) == moments(intervals)
    assert length(merged) == len(moments(intervals))
    assert all(start < end for start, end in merged)
    assert all(first[1] < second[0] for first, second in pairwise(merged))


@given(INTERVALS, INTERVALS)
@steady
def test_difference_is_what_only_the_first_covers(first, second):
    left = subtract(union(first), union(second))
    assert moments(left) == moments(first) - moments(second)
    assert length(left) == len(moments(left))


@given(INTERVALS, st.tuples(MOMENTS, MOMENTS))
@steady
def test_part_within_a_window_is_what_both_cover(intervals, window):
    part = within(union(intervals), window)
    assert moments(part) == moments(intervals) & moments([window])
    assert length(part) == len(moments(part))


def event(name, kind, start_ms, duration_ms, stream=1, correlation=None):
    return Event(
        name=name,
        kind=kind,
        stream=stream,
        start_ns=round(start_ms * MS),
        duration_ns=round(duration_ms * MS),
        correlation=correlation,
    )


def steps(*starts_ms, duration_ms=10.0):
    """Marks of steps of the host's main thread, which is 1; each ends with an optimizer that launches nothing."""
    marks = [event("step", Kind.STEP, start, duration_ms) for start in starts_ms]
    return marks + [event("optimizer", Kind.OPTIMIZER, mark.end_ns / MS - 0.1, 0.1) for mark in marks]


def launched(name, at_ms, start_ms, duration_ms, *, stream=7, correlation, by="cudaLaunchKernel"):
    """A kernel with its launch by the host."""
    return [
        event(by, Kind.LAUNCH, at_ms, 0.01, correlation=correlation),
        event(name, Kind.KERNEL, start_ms, duration_ms, stream, correlation),
    ]


def milliseconds(split):
    parts = (split.compute_s, split.exposed_communication_s, split.optimizer_s, split.idle_s)
    return tuple(None if part is None else round(part * 1e3, 6) for part in parts)


NCCL, ADAM, GEMM = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)", "multi_tensor_apply_kernel<Adam>", "sm90_gemm"


def test_opening_step_is_left_out_and_a_step_on_the_device_ends_with_what_was_launched_in_it():
    events = [
        *steps(0, 10, 20),
        *launched(GEMM, 1, 5, 10, correlation=1),  # of the opening step, until 15
        *launched(GEMM, 11, 16, 3, correlation=2),  # of the first one, until 19
        *launched(GEMM, 21, 22, 8, correlation=3),  # of the second one, until 30
    ]
    found = timeline(events, on_gpu=True, opening_steps=1)
    assert [milliseconds(split) for split in found.steps] == [(3, 0, 0, 1), (8, 0, 0, 3)]
    assert [split.step_time_s for split in found.steps] == pytest.approx([4e-3, 11e-3])
    assert [(op.count, op.time_s) for op in found.ops] == [(1, 3e-3)], "of the shortest step"


def test_step_whose_kernels_the_profiler_lost_is_not_the_shortest():
    events = [
        *steps(0, 10, 20, 30),
        *launched(GEMM, 1, 5, 10, correlation=1),
        *launched(GEMM, 11, 16, 3, correlation=2),
        *launched(ADAM, 31, 32, 8, correlation=3),
    ]
    found = timeline(events, on_gpu=True, opening_steps=1)
    assert [split.step_time_s for split in found.steps] == pytest.approx([4e-3, 0, 21e-3])
    assert [(op.name, op.count) for op in found.ops] == [(GEMM, 1)]
    told = {"rank": 0, "device": "cuda", "plain_step_times_s": (), "trace": "", "trace_bytes": 0}
    assert RankTrace(steps=found.steps, ops=found.ops, **told).shortest == found.steps[0]


def test_communication_is_exposed_where_no_stream_computes():
    events = [
        *steps(0, 10),
        *launched(GEMM, 1, 2, 3, correlation=1),  # the opening step ends at 5
        *launched(GEMM, 11, 12, 4, correlation=2),  # 12-16
        *launched(GEMM, 11, 18, 2, stream=8, correlation=3),  # 18-20, on another stream
        *launched(NCCL, 12, 14, 9, stream=9, correlation=4),  # 14-23: covered 14-16 and 18-20
    ]
    (split,) = timeline(events, on_gpu=True, opening_steps=1).steps
    assert milliseconds(split) == (6, 2 + 3, 0, 7)


def test_kernels_that_run_at_the_same_time_count_once_in_the_split_and_each_in_the_table():
    events = [
        *steps(0, 10),
        *launched(GEMM, 1, 2, 3, correlation=1),
        *launched(GEMM, 11, 5, 4, correlation=2),
        *launched(GEMM, 12, 6, 4, stream=8, correlation=3),
        *launched(NCCL, 13, 5, 5, stream=9, correlation=4),
    ]
    found = timeline(events, on_gpu=True, opening_steps=1)
    assert milliseconds(found.steps[0]) == (5, 0, 0, 0)
    assert [(op.name, op.count, op.time_s) for op in found.ops] == [(GEMM, 2, 8e-3), (NCCL, 1, 5e-3)]


def test_optimizers_kernels_are_those_launched_inside_of_its_mark_whenever_they_run():
    events = [
        *steps(0, 10),
        *launched(GEMM, 1, 2, 3, correlation=1),
        event("optimizer", Kind.OPTIMIZER, 15, 2),
        *launched(GEMM, 14, 5, 13, correlation=2),  # launched before the mark, runs through it and beyond: 5-18
        *launched(ADAM, 15.5, 18, 4, correlation=3),  # runs long after the mark: 18-22
        *launched(ADAM, 16, 20, 3, stream=8, correlation=4),  # 20-23, at the same time
        *launched(GEMM, 18, 22, 2, stream=9, correlation=5),  # launched after the mark: only 23-24 is compute
        *launched(NCCL, 16.5, 17, 10, stream=10, correlation=6),  # the optimizer's own collective stays communication
    ]
    (split,) = timeline(events, on_gpu=True, opening_steps=1).steps
    assert milliseconds(split) == (13 + 1, 3, 5, 0)


def test_optimizer_of_a_replayed_graph_is_not_guessed():
    graph = event("cudaGraphLaunch", Kind.LAUNCH, 11, 0.1, correlation=2)
    replayed = [event(name, Kind.KERNEL, 5 + at, 2, 7, 2) for at, name in enumerate((GEMM, ADAM), start=1)]
    events = [*steps(0, 10), *launched(GEMM, 1, 2, 3, correlation=1), graph, *replayed]
    # A copy of the inputs is launched as ever, even inside of a mark.
    events += [event("optimizer", Kind.OPTIMIZER, 10, 1), *launched("Memcpy", 10.5, 5, 1, correlation=3)]
    (split,) = timeline(events, on_gpu=True, opening_steps=1).steps
    assert milliseconds(split) == (4, 0, None, 0)
    assert split.step_time_s == pytest.approx(4e-3)


def test_optimizer_without_a_mark_is_not_guessed():
    marks = [event("step", Kind.STEP, start, 10) for start in (0, 10)]
    events = [*launched(GEMM, 1, 2, 3, correlation=1), *launched(ADAM, 11, 5, 4, correlation=2)]
    (split,) = timeline([*marks, *events], on_gpu=True, opening_steps=1).steps
    assert milliseconds(split) == (4, 0, None, 0)


def test_trace_of_a_gpu_without_kernels_is_refused():
    with pytest.raises(ValueError, match="no kernel on the GPU"):
        timeline([*steps(0, 10), event("cudaLaunchKernel", Kind.LAUNCH, 11, 1)], on_gpu=True, opening_steps=1)


def test_on_a_cpu_the_innermost_op_decides():
    events = [
        *steps(0, 10),
        event("aten::linear", Kind.OP, 11, 4),
        event("aten::mm", Kind.OP, 12, 2),
        event("Backward", Kind.OP, 15, 3),  # holds a wait: only 15-16 is compute
        event(WAIT_MARK, Kind.OP, 16, 2),
        event("optimizer", Kind.OPTIMIZER, 18, 1.5),
        event("aten::adam", Kind.OP, 18, 1),
    ]
    found = timeline(events, on_gpu=False, opening_steps=1)
    assert milliseconds(found.steps[0]) == (5, 2, 1, 2)
    table = {op.name: (op.count, round(op.time_s * 1e3, 6)) for op in found.ops}
    assert table == {
        "aten::linear": (1, 2),
        "aten::mm": (1, 2),
        WAIT_MARK: (1, 2),
        "Backward": (1, 1),
        "aten::adam": (1, 1),
    }


def test_on_a_cpu_too_the_ops_are_those_of_the_shortest_step():
    marks = [event("step", Kind.STEP, start, duration) for start, duration in ((0, 10), (10, 30), (40, 8), (50, 10))]
    ops = [event(f"op{start}", Kind.OP, start, 2) for start in (11, 41, 51)]
    assert [op.name for op in timeline([*marks, *ops], on_gpu=False, opening_steps=1).ops] == ["op41"]


def test_on_a_cpu_gloo_at_work_is_exposed_only_where_the_thread_is_in_no_op():
    events = [
        *steps(0, 10),
        event("c10d::allreduce_", Kind.OP, 11, 1),
        event("gloo:all_reduce", Kind.TRANSFER, 11.5, 6, stream=2),
        event("aten::mm", Kind.OP, 13, 2),
        event("aten::copy_", Kind.OP, 16, 1, stream=2),  # gloo's own thread does not compute the model
    ]
    (split,) = timeline(events, on_gpu=False, opening_steps=1).steps
    assert milliseconds(split) == (2, (11.5 - 11) + 6 - 2, 0, 10 - 2 - 4.5)


SPANS = st.tuples(st.integers(0, 40), st.integers(0, 12))
NAMES = st.sampled_from((GEMM, ADAM, NCCL, "aten::mm", "c10d::allreduce_", WAIT_MARK))
MARKS = st.lists(SPANS, min_size=0, max_size=3)


def parts_add_up(found, wholes_ns):
    for split, whole in zip(found.steps, wholes_ns, strict=True):
        parts = (split.compute_s, split.exposed_communication_s, split.optimizer_s or 0.0, split.idle_s)
        assert min(parts) >= 0
        assert sum(parts) == pytest.approx(whole / 1e9, abs=1e-15)


def raw(name, kind, span, stream=1, correlation=None):
    return Event(name=name, kind=kind, stream=stream, start_ns=span[0], duration_ns=span[1], correlation=correlation)


STEPS = [raw("step", Kind.STEP, (start, 10)) for start in (0, 10, 20, 30)]


@given(st.lists(st.tuples(NAMES, SPANS, st.booleans()), max_size=20), MARKS)
@thorough
def test_parts_of_a_step_on_a_cpu_add_up_and_none_is_negative(ops, marks):
    events = [raw(name, Kind.TRANSFER if gloo else Kind.OP, span) for name, span, gloo in ops]
    events += [raw("optimizer", Kind.OPTIMIZER, mark) for mark in marks]
    found = timeline([*STEPS, *events], on_gpu=False, opening_steps=1)
    parts_add_up(found, [10, 10, 10])
    assert sum(op.time_s for op in found.ops) * 1e9 == pytest.approx(
        length(within(union(event.span for event in events if event.kind is Kind.OP), (10, 20))), abs=1e-6
    ), "of the first of the shortest steps"


@given(st.lists(st.tuples(NAMES, SPANS, st.integers(0, 39), st.integers(0, 3)), min_size=1, max_size=20), MARKS)
@thorough
def test_parts_of_a_step_on_a_gpu_add_up_and_none_is_negative(kernels, marks):
    events = [raw("optimizer", Kind.OPTIMIZER, mark) for mark in marks]
    ends = {}
    for number, (name, (after, duration), launched_ns, stream) in enumerate(kernels):
        events.append(raw("cudaLaunchKernel", Kind.LAUNCH, (launched_ns, 0), correlation=number))
        events.append(raw(name, Kind.KERNEL, (launched_ns + after, duration), stream, number))
        for border in (10, 20, 30, 40):
            if launched_ns < border:
                ends[border] = max(ends.get(border, 0), launched_ns + after + duration)
    borders = [ends.get(border, border) for border in (10, 20, 30, 40)]
    found = timeline([*STEPS, *events], on_gpu=True, opening_steps=1)
    parts_add_up(found, [second - first for first, second in pairwise(borders)])


@given(st.lists(SPANS, max_size=15))
@steady
def test_pieces_of_the_innermost_ops_are_disjoint_and_cover_what_the_ops_cover(spans):
    ops = [raw("op", Kind.OP, span) for span in spans]
    pieces = [piece for _, piece in innermost(ops)]
    assert sum(end - start for start, end in pieces) == length(union(pieces))
    assert union(pieces) == union(op.span for op in ops)
    assert all(op.start_ns <= start and end <= op.end_ns for op, (start, end) in innermost(ops))


def test_trace_is_read_with_its_streams_threads_and_correlations(tmp_path):
    kernel = {"ph": "X", "cat": "kernel", "name": GEMM, "pid": 0, "tid": 7, "ts": 5163870153046.891, "dur": 2.5}
    kernel["args"] = {"stream": 9, "correlation": 4, "grid": [1, 1, 1], "blocks per SM": 0.5}
    launch = {"ph": "X", "cat": "cuda_driver", "name": "cuLaunchKernel", "pid": 5, "tid": 11, "ts": 5163870153040.001}
    launch |= {"dur": 1.0, "args": {"correlation": 4}}
    others = [
        {"ph": "M", "name": "process_labels", "pid": "Spans", "tid": "x", "ts": 0.0, "args": {"labels": "PyTorch"}},
        {"ph": "X", "cat": "gpu_user_annotation", "name": "optimizer", "ts": 5163870153041.0, "dur": 1, "tid": 7},
        {"ph": "X", "cat": "user_annotation", "name": "Optimizer.step#AdamW.step", "ts": 5163870153041.0, "tid": 11},
        {"ph": "X", "cat": "Trace", "name": "PyTorch Profiler (0)", "ts": 1.0, "dur": 9, "tid": "PyTorch Profiler"},
        {"ph": "s", "cat": "ac2g", "name": "ac2g", "id": 4, "ts": 5163870153040.001, "tid": 11},
    ]
    marks = [
        {"ph": "X", "cat": "user_annotation", "name": name, "ts": 5163870153041.0, "dur": 1, "tid": 11}
        for name in ("step", "optimizer", "gloo:all_reduce", WAIT_MARK)
    ]
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": [kernel, launch, *others, *marks]}).encode()))
    found = read_trace(path)
    assert found[:2] == [
        raw(GEMM, Kind.KERNEL, (6890, 2500), 9, 4),
        raw("cuLaunchKernel", Kind.LAUNCH, (0, 1000), 11, 4),
    ]
    kinds = [Kind.STEP, Kind.OPTIMIZER, Kind.TRANSFER, Kind.OP]
    assert [(event.kind, event.stream, event.start_ns) for event in found[2:]] == [(kind, 11, 999) for kind in kinds]
