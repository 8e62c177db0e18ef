"""Folders of made-up test runs, as a history finds them in results/."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec

from perf.facts.fault import Fault
from perf.facts.measurement import STEP_TIME, Metric
from perf.facts.outcome import Outcome
from perf.facts.record import RunRecord
from perf.judge.verdict import Verdict
from perf.tell.history import Point, Series
from perf.tell.results import Manifest, Results
from tests import factory

FIRST = datetime(2026, 9, 1, 2, 0, tzinfo=UTC)


def keep(
    root: Path,
    day: int,
    *step_times_s: float,
    of=None,
    allocated_bytes: int | None = None,
    env=None,
    timed_steps: int = 10,
    fault: str | None = None,
    outcome: Outcome | None = Outcome.PASS,
    name: str | None = None,
) -> Results:
    """One test run, `day` days after the first, with a run for each step time."""
    of = of or factory.cell()
    start = FIRST + timedelta(days=day)
    plan = msgspec.structs.replace(factory.PLAN, timed_steps=timed_steps)
    results = Results(root / (name or start.strftime("%Y-%m-%dT%H-%M-%S")))
    results.write_manifest(
        Manifest(run_id=results.folder.name, started_at=start.isoformat(), matrix="auto", plan=plan, cells=(of,))
    )
    for index, step_time_s in enumerate(step_times_s):
        times = (step_time_s,) * timed_steps
        run = factory.run_record(of, index=index, step_times_s=times, allocated_bytes=allocated_bytes, env=env)
        results.write_run(_dated(run, start + timedelta(minutes=index), plan, fault))
    if outcome is not None:
        results.write_verdict(Verdict(cell_id=of.id, outcome=outcome))
    return results


def _dated(run: RunRecord, start: datetime, plan, fault: str | None) -> RunRecord:
    return msgspec.structs.replace(
        run,
        started_at=start.isoformat(),
        plan=plan,
        fault=Fault.parse(fault) if fault else None,
    )


def line(
    values, *, metric: Metric = STEP_TIME, of=None, environments=None, timed_steps: int = 10, first_day=0
) -> Series:
    """A series with a test run a day, three runs each."""
    of = of or factory.cell()
    plan = msgspec.structs.replace(factory.PLAN, timed_steps=timed_steps)
    starts = [FIRST + timedelta(days=first_day + day) for day in range(len(values))]
    return Series(
        cell=of,
        machine=factory.CPU if of.device_kind == "cpu" else factory.H200X2,
        recipe=of.recipe(plan),
        metric=metric,
        points=tuple(
            Point(
                run_id=start.strftime("%Y-%m-%dT%H-%M-%S"),
                started_at=start.isoformat(),
                median=float(value),
                low=0.99 * float(value),
                high=1.01 * float(value),
                num_runs=3,
                environment=environments[day] if environments else {"torch": "2.13.0"},
            )
            for day, (start, value) in enumerate(zip(starts, values, strict=True))
        ),
    )
