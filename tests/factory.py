"""Records as a test needs them: whole and right unless a test says otherwise."""

from pathlib import Path

import msgspec

from perf.facts.cell import Cell, SamplingPlan
from perf.facts.gpus import GpuUse
from perf.facts.hardware import Machine
from perf.facts.measurement import Measurement, ledgers, measure
from perf.facts.record import (
    CompileState,
    Environment,
    LedgerEntry,
    Marks,
    MemoryPeaks,
    RankRecord,
    RunRecord,
    Software,
)
from perf.judge.baseline import Baseline, BaselineRun, Invariants, Night, Origin
from strategies.layout import default_workload
from strategies.spec import LinkProfile, Mode, StrategyName

PLAN = SamplingPlan()
CPU = Machine(device="Test CPU", count=2)
H200X2 = Machine(device="NVIDIA H200", count=2, memory_gib=140, power_limit_w=700)
SOFTWARE = Software(torch="2.13.0", transformers="5.24.0", python="3.11.7")


def cell(
    strategy: StrategyName = StrategyName.DDP,
    *,
    size: str = "",
    mode: Mode = Mode.EAGER,
    world_size: int = 2,
    link: LinkProfile = LinkProfile.GLOO,
    micro_batch: int | None = None,
) -> Cell:
    """A cell; by default ddp-tiny-eager-w2-gloo. On two ranks at least four where the strategy cuts along two axes."""
    size = size or ("tiny_moe" if strategy is StrategyName.EP else "tiny")
    workload = default_workload(size, strategy, world_size)
    if micro_batch is not None:
        workload = msgspec.structs.replace(workload, micro_batch=micro_batch)
    return Cell(strategy=strategy, size=size, mode=mode, world_size=world_size, link=link, workload=workload)


def environment(machine: Machine = CPU, **changes: object) -> Environment:
    whole = Environment(
        machine=machine,
        host="node1",
        cpu="Test CPU",
        cpu_cores=2,
        software=SOFTWARE,
        commit="c0ffee",
        dirty=False,
        variables={},
    )
    return msgspec.structs.replace(whole, **changes)


def gpu_use(uuid: str, *, used_bytes: int) -> GpuUse:
    """An undisturbed GPU of 140 GiB over one run."""
    return GpuUse(
        uuid=uuid,
        sm_clock_mhz=(1980, 1980),
        memory_clock_mhz=3201,
        temperature_c=50,
        power_w=650,
        throttled=(),
        power_capped=False,
        used_bytes=used_bytes,
        total_bytes=140 * 2**30,
        foreign_pids=(),
    )


def rank_record(of: Cell, rank: int, step_times_s: tuple[float, ...], *, allocated_bytes: int | None) -> RankRecord:
    """One rank's share of a right run of `of`: the loss starts where a fresh model starts, and falls."""
    num_warmup_steps = of.plan(PLAN).warmup_steps
    num_steps = num_warmup_steps + len(step_times_s)
    share = of.shape.expected_start_loss / of.world_size
    graphs = 1 if of.layout.compiled else 0
    peaks = MemoryPeaks(
        allocated_bytes=allocated_bytes,
        reserved_bytes=None if allocated_bytes is None else allocated_bytes + 2**30,
        resident_bytes=400 * 2**20,
        allocator_retries=None if allocated_bytes is None else 0,
    )
    return RankRecord(
        rank=rank,
        device="cpu" if allocated_bytes is None else "NVIDIA H200",
        num_threads=1,
        marks=Marks(
            entered_s=0.02, group_ready_s=0.03, built_s=0.1, first_step_s=0.2, warm_s=0.4, timed_s=1.4, finished_s=1.5
        ),
        warmup_times_s=(0.1,) * num_warmup_steps,
        step_times_s=step_times_s,
        losses=tuple(share * (1 - 0.01 * step) for step in range(num_steps)),
        start_gradient_norm=2.5,
        end_gradient_norm=2.6,
        tokens_per_step=of.workload.tokens_per_step // of.layout.data_degree,
        num_parameters=of.shape.num_parameters if rank == 0 else 0,
        memory=peaks,
        ledger=(LedgerEntry(op="all_reduce", axis="dp", dtype="float32", count=1, bytes=1_117_440),),
        arrivals_s=(100.0,),
        compile=CompileState(graphs=graphs, graph_breaks=0, recompiles_after_warmup=0),
        attention=("flash_attention",),
    )


def run_record(
    of: Cell | None = None,
    *,
    index: int = 0,
    step_time_s: float = 0.1,
    step_times_s: tuple[float, ...] | None = None,
    allocated_bytes: int | None = None,
    env: Environment | None = None,
) -> RunRecord:
    """One run whose ranks all took `step_times_s`, or ten times `step_time_s`."""
    of = of or cell()
    times = step_times_s if step_times_s is not None else (step_time_s,) * PLAN.timed_steps
    return RunRecord(
        cell=of,
        plan=of.plan(PLAN),
        index=index,
        started_at=f"2026-11-29T14:00:{index:02d}+00:00",
        wall_s=2.0,
        environment=env or environment(),
        ranks=tuple(rank_record(of, rank, times, allocated_bytes=allocated_bytes) for rank in range(of.world_size)),
    )


def measurement(
    of: Cell | None = None,
    *,
    step_times_s: tuple[float, ...] = (0.1, 0.1, 0.1),
    allocated_bytes: tuple[int | None, ...] = (None, None, None),
    env: Environment | None = None,
) -> Measurement:
    """Three runs; one step time and one peak for each."""
    of = of or cell()
    pairs = zip(step_times_s, allocated_bytes, strict=True)
    runs = [
        run_record(of, index=index, step_time_s=seconds, allocated_bytes=peak, env=env)
        for index, (seconds, peak) in enumerate(pairs)
    ]
    return measure(of, PLAN, runs)


def change_ranks(run: RunRecord, *ranks: int, **changes: object) -> RunRecord:
    """The run with fields of some ranks (none named: of all) replaced."""
    chosen = ranks or tuple(rank.rank for rank in run.ranks)
    return msgspec.structs.replace(
        run,
        ranks=tuple(msgspec.structs.replace(rank, **changes) if rank.rank in chosen else rank for rank in run.ranks),
    )


def origin(run_id: str = "2026-11-28T02-00-00", **changes: object) -> Origin:
    whole = Origin(
        run_id=run_id,
        date="2026-11-28",
        commit="c0ffee",
        dirty=False,
        host="node1",
        cpu="Test CPU",
        software=SOFTWARE,
        variables={},
    )
    return msgspec.structs.replace(whole, **changes)


def baseline(
    of: Cell | None = None,
    *,
    nights: tuple[tuple[float, ...], ...] = ((0.1, 0.1, 0.1),),
    allocated_bytes: int | None = None,
    machine: Machine = CPU,
) -> Baseline:
    """Nights of runs, one step time for each run."""
    of = of or cell()
    return Baseline(
        cell_id=of.id,
        machine=machine,
        recipe=of.recipe(of.plan(PLAN)),
        nights=tuple(
            Night(
                origin=origin(f"2026-11-{20 + number:02d}T02-00-00"),
                attention=("flash_attention",),
                runs=tuple(
                    BaselineRun(
                        step_times_s=(seconds,) * PLAN.timed_steps,
                        peak_allocated_bytes=allocated_bytes,
                        peak_reserved_bytes=None if allocated_bytes is None else allocated_bytes + 2**30,
                        peak_resident_bytes=400 * 2**20,
                    )
                    for seconds in times
                ),
            )
            for number, times in enumerate(nights)
        ),
    ).sealed()


def invariants(of: Cell | None = None) -> Invariants:
    """What `run_record` of the same cell computes."""
    run = run_record(of)
    return Invariants(
        cell_id=run.cell.id,
        recipe=run.cell.recipe(run.plan),
        origin=origin(),
        num_parameters=run.cell.shape.num_parameters,
        tokens_per_step=run.cell.workload.tokens_per_step,
        start_gradient_norm=2.5,
        end_gradient_norm=2.6,
        losses=tuple(loss for loss in run.losses if loss is not None),
        ledger=ledgers(run),
    ).sealed()


def write_text(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path
