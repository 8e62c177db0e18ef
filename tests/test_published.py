"""Room perf/tell/published.py: the source's own figures, beside ours in a report of GPU cells and in no other."""

import pytest

from perf.measure.connection import ROOT
from perf.tell.published import published_tables
from perf.tell.report import write_report
from perf.tell.results import Manifest, Results
from strategies.layout import default_workload
from strategies.spec import LinkProfile
from tests.factory import PLAN, cell, run_record, write_text

GIB = 2**30


def report_of(folder, of, allocated_bytes) -> str:
    results = Results(folder)
    results.write_manifest(
        Manifest(run_id=folder.name, started_at="2026-11-29T02:00:00+00:00", matrix="x", plan=PLAN, cells=(of,))
    )
    for index in range(3):
        results.write_run(run_record(of, index=index, allocated_bytes=allocated_bytes))
    write_report(results)
    assert (folder / "report.html").read_text().count("not measured here") == (allocated_bytes is not None)
    return (folder / "report.md").read_text()


def test_checked_in_table_is_consistent_with_itself():
    """Tokens of a step / step time is the throughput, as far as the source's rounding lets it be."""
    (table,) = published_tables(ROOT / "baselines")
    tokens = default_workload("0.6b").tokens_per_step
    assert len(table.rows) == 12
    for row in table.rows:
        assert row.tokens_per_s == pytest.approx(tokens / row.step_time_s, rel=0.03), row


def test_report_of_gpu_cells_shows_it_apart(tmp_path):
    text = report_of(tmp_path / "gpu", cell(size="0.6b", link=LinkProfile.NATIVE), 30 * GIB)
    section = text.split("## Published elsewhere, not measured here")[1].split("\n## ")[0]
    assert "| PP | 0.6b | 69,900 tok/s | 469.0 ms | 14.70 GiB |" in section
    assert "69,900" not in text.replace(section, "")


def test_report_of_cpu_cells_does_not(tmp_path):
    assert "not measured here" not in report_of(tmp_path / "cpu", cell(), None)


def test_damaged_table_is_named(tmp_path):
    write_text(tmp_path / "published" / "a.json", "{}")
    with pytest.raises(ValueError, match=r"a\.json: schema_version None"):
        published_tables(tmp_path)
