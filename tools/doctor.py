"""`python -m tools.doctor`: is this node fit to measure? What it reaches, how it is, and which cells it can run.

Writes nothing but what it is asked for: `--json FILE`, or `--results DIR` for `preflight.json` beside a test run.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from perf.facts import jsonfile
from perf.facts.cell import Cell
from perf.facts.environment import Source
from perf.facts.findings import SHARED_MEMORY
from perf.facts.gpu_health import GpuHealth
from perf.facts.gpus import GpuUse
from perf.facts.hardware import Node, this_node
from perf.facts.matrix import NAMED, cells_of, obstacle
from perf.facts.rates import KINDS, Ceilings, Kind
from perf.judge.baseline import RecordedCeilings, Store
from perf.judge.preflight import Preflight, compare, invalid
from perf.measure.connection import ROOT
from perf.measure.examination import examine
from perf.measure.launch import Launcher
from perf.measure.lease import Lease
from perf.settings import BASELINES, LOCAL_BASELINES
from perf.tell.progress import terminal_console
from perf.tell.results import Results
from perf.tell.sections import Section, show

FIT, UNFIT, UNUSABLE, NOTHING = 0, 1, 2, 8


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0: fit to measure; 1: something is wrong; 2: a file or option is; 8: nothing could be measured."""
    options = _parser().parse_args(arguments)
    begun = time.monotonic()
    try:
        node = this_node()
        cells = cells_of(options.matrix) if options.matrix else ()
        recorded = Store(options.baselines, LOCAL_BASELINES).load_ceilings(node.machine)
        with Launcher() as launcher, Lease("tools.doctor: the ceilings of the node", Waiting()):
            preflight = examine(launcher, node, source=Source(ROOT, options.commit))
        if options.json:
            jsonfile.write(options.json, preflight)
        if options.results:
            Results(options.results).write_preflight(preflight)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return UNUSABLE
    reasons = [] if recorded is None else compare(preflight, recorded)
    sections = [*page(preflight, recorded), *_cells(cells, node, options.matrix)]
    show(sections, terminal_console())
    print(conclusion(preflight, recorded, reasons))
    print(
        f"took {time.monotonic() - begun:.1f} s: {preflight.server_start_up_s:.1f} s for the server of ranks, "
        f"{preflight.took_s:.1f} s for the preflight"
    )
    return exit_code(preflight, reasons)


def exit_code(preflight: Preflight, reasons: Sequence[str]) -> int:
    """`reasons`: why the node is not comparable with its record. What is wrong is told before what is missing."""
    if preflight.faults:
        return UNFIT
    if preflight.ceilings is None:
        return NOTHING
    return UNFIT if reasons or invalid(preflight) else FIT


class Waiting:
    """Says once who is waited for."""

    def __init__(self) -> None:
        self._told = False

    def __call__(self, text: str) -> None:
        if not self._told:
            self._told = True
            print(text, file=sys.stderr)


def page(preflight: Preflight, recorded: RecordedCeilings | None) -> list[Section]:
    """Node, ceilings, GPUs and findings; what there is none of is left out."""
    sections = [_node(preflight)]
    if preflight.ceilings is not None:
        sections.append(_ceilings(preflight.ceilings, recorded, gated=preflight.machine.is_gpu))
    if preflight.gpus:
        sections.append(_gpus(preflight))
    if preflight.findings:
        rows = tuple((finding.severity.value, finding.text) for finding in preflight.findings)
        sections.append(Section(title="findings", header=("", "what"), rows=rows))
    return sections


def conclusion(preflight: Preflight, recorded: RecordedCeilings | None, reasons: Sequence[str]) -> str:
    """The verdict in one line and a line for each reason."""
    if preflight.ceilings is None:
        return "\n".join([f"NOTHING MEASURED: {preflight.failure}", *preflight.faults])
    if wrong := [*preflight.faults, *(() if reasons else invalid(preflight))]:
        return "\n".join(["NOT FIT to measure", *(f"  {text}" for text in [*wrong, *reasons])])
    if reasons:
        return "\n".join([f"NOT COMPARABLE with the ceilings of {preflight.machine.key}", *(f"  {r}" for r in reasons)])
    if not preflight.machine.is_gpu:
        return "FIT to measure; ceilings of a CPU are shown, not compared: its cores are shared"
    if recorded is None:
        return (
            f"FIT as far as it tells: no ceilings of {preflight.machine.key} are recorded; to record these:\n"
            "  python -m tools.doctor --json preflight.json && python -m tools.approve --ceilings preflight.json"
        )
    return f"FIT to measure: reaches the ceilings recorded on {recorded.origin.date}"


def _node(preflight: Preflight) -> Section:
    software, shared = preflight.software, preflight.shared_memory_free_bytes
    versions = {name: getattr(software, name) for name in software.__struct_fields__} if software else {}
    if preflight.driver:
        versions["driver"] = preflight.driver
    rows = (
        ("machine", preflight.machine.key),
        ("host", f"{preflight.host}, {preflight.cpu_cores} cores of {preflight.cpu}"),
        ("software", ", ".join(f"{name} {version}" for name, version in versions.items() if version) or "unknown"),
        (SHARED_MEMORY, "unknown" if shared is None else f"{shared / 2**30:.1f} GiB free"),
    )
    return Section(title="node", header=("", ""), rows=rows)


def _ceilings(now: Ceilings, recorded: RecordedCeilings | None, *, gated: bool) -> Section:
    rows = tuple(_row(kind, now, recorded, gated=gated) for kind in KINDS if now.rate(kind.name) is not None)
    gemm = f"GEMM: {now.protocol.gemm_dtype}, {now.protocol.gemm_side} cubed"
    ranks = f"{now.num_ranks} rank{'s' * (now.num_ranks > 1)} at once"
    header = ("ceiling", "measured", "spread", "n", "recorded", "of it", "tolerance")
    return Section(title=f"ceilings ({ranks}; {gemm})", header=header, rows=rows)


def _row(kind: Kind, now: Ceilings, recorded: RecordedCeilings | None, *, gated: bool) -> tuple[str, ...]:
    rate, old = now.rate(kind.name), recorded.ceilings.rate(kind.name) if recorded else None
    assert rate is not None
    new_text, old_text, share = "not measured", "none", ""
    if rate.median is not None:
        new_text = kind.text(rate.median)
    if old is not None and old.median is not None:
        old_text = kind.text(old.median)
        if rate.median is not None:
            share = f"{rate.median / old.median * 100:.1f} %"
    spread = "" if rate.spread is None else f"{rate.spread * 100:.1f} %"
    tolerance = f"{kind.tolerance * 100:g} %" if gated else "not gated"
    return (kind.titled(now.protocol), new_text, spread, str(rate.n), old_text, share, tolerance)


def _gpus(preflight: Preflight) -> Section:
    uses = {use.uuid: use for use in preflight.uses}
    rows = tuple(_gpu(index, gpu, uses.get(gpu.uuid)) for index, gpu in enumerate(preflight.gpus))
    header = (
        "GPU",
        "highest SM clock",
        "highest power",
        "hottest",
        "clocks at rest held by",
        "ECC errors",
        "lost rows",
    )
    return Section(title="GPUs", header=header, rows=rows)


def _gpu(index: int, gpu: GpuHealth, use: GpuUse | None) -> tuple[str, ...]:
    clock_mhz = use.sm_clock_mhz[1] if use is not None and use.sm_clock_mhz is not None else None
    power_w, hottest_c = (use.power_w, use.temperature_c) if use is not None else (None, None)
    return (
        f"{index} {gpu.uuid}",
        f"{_told(clock_mhz)} of {_told(gpu.max_sm_clock_mhz)} MHz",
        f"{_told(power_w)} of {_told(gpu.power_limit_w)} W, default {_told(gpu.default_power_limit_w)}",
        f"{_told(hottest_c)} C",
        _told(None if gpu.clock_reasons is None else ", ".join(gpu.clock_reasons) or "nothing"),
        _told(gpu.uncorrected_ecc_errors),
        _told(gpu.remapped_rows),
    )


def _cells(cells: Sequence[Cell], node: Node, matrix: str) -> list[Section]:
    """Which cells can run here; none: nothing was asked."""
    if not cells:
        return []
    obstacles = {cell.id: obstacle(cell, node, matrix) for cell in cells}
    rows = tuple(("skipped" if reason else "runs", name, reason or "") for name, reason in obstacles.items())
    num_skipped = sum(reason is not None for reason in obstacles.values())
    title = f"cells of {matrix}: {len(cells) - num_skipped} can run here, {num_skipped} cannot"
    return [Section(title=title, header=("", "cell", "because"), rows=rows)]


def _told(value: object) -> str:
    return "unknown" if value is None else str(value)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.doctor", description="Is this node fit to measure?")
    parser.add_argument("--matrix", metavar="NAME", help=f"list its cells: {', '.join(NAMED)} or a TOML file")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the record there")
    parser.add_argument("--results", type=Path, metavar="DIR", help="write the record there, as preflight.json")
    parser.add_argument("--baselines", type=Path, default=BASELINES, metavar="DIR", help="the checked-in baselines")
    parser.add_argument("--commit", metavar="SHA", help="commit of this tree, where there is no git")
    return parser


if __name__ == "__main__":
    sys.exit(main())
