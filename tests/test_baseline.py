"""Room perf/judge/baseline.py: stored values are found, whole, and of this cell and machine; git merges them safely."""

import itertools
import json
import re
import statistics
import subprocess

import msgspec
import pytest

from perf.facts import jsonfile
from perf.judge import baseline as room
from perf.judge.baseline import Baseline, Invariants, Store
from strategies.spec import LinkProfile, StrategyName
from tests.factory import CPU, H200X2, baseline, cell, invariants, origin, write_text

CELL = cell()
GPU_CELL = cell(link=LinkProfile.NATIVE)
OTHER = cell(StrategyName.FSDP2)
PATH = f"{CPU.key}/{CELL.id}.json"


def changed(text: str, old: str, new: str) -> str:
    assert old in text
    return text.replace(old, new, 1)


@pytest.fixture
def stored(tmp_path):
    """The path and the text of a stored baseline of two nights."""
    record = baseline(nights=((0.1, 0.11, 0.12), (0.13, 0.14, 0.15)))
    path = room.write(tmp_path, record)
    return path, path.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "record",
    [baseline(), baseline(GPU_CELL, machine=H200X2, allocated_bytes=2**34, nights=((0.1,), (0.2,)))],
    ids=["cpu", "gpu"],
)
def test_stored_baseline_is_found_again(tmp_path, record):
    path = room.write(tmp_path, record)
    assert path == tmp_path / record.machine.key / f"{record.cell_id}.json"
    assert Store(tmp_path).load(GPU_CELL if record.machine == H200X2 else CELL, record.machine) == record


def test_stored_invariants_are_found_on_every_machine(tmp_path):
    assert room.write(tmp_path, invariants()) == tmp_path / "invariants" / f"{CELL.id}.json"
    assert Store(tmp_path).load_invariants(CELL) == invariants()
    assert Store(tmp_path).load_invariants(OTHER) is None


def test_absence_is_none_and_never_the_nearest_record(tmp_path):
    room.write(tmp_path, baseline())
    store = Store(tmp_path)
    assert store.load(OTHER, CPU) is None
    assert store.load(cell(world_size=4), CPU) is None
    assert store.load(CELL, msgspec.structs.replace(CPU, count=4)) is None
    assert Store(tmp_path / "missing").load(CELL, CPU) is None


def test_first_folder_that_has_a_record_wins(tmp_path):
    room.write(tmp_path / "a", baseline(nights=((0.5,),)))
    room.write(tmp_path / "b", baseline(nights=((0.9,),)))
    room.write(tmp_path / "b", baseline(OTHER, nights=((0.7,),)))
    store = Store(tmp_path / "a", tmp_path / "b")
    assert [store.load(of, CPU).runs[0].step_times_s[0] for of in (CELL, OTHER)] == [0.5, 0.7]
    assert store.ids(CPU) == {CELL.id, OTHER.id}
    assert store.ids(H200X2) == set()


EDITS = {
    "value": ('"peak_resident_bytes": 419430400', '"peak_resident_bytes": 419430399'),
    "step time": ("0.11,", "0.109,"),
    "date": ("2026-11-28", "2026-11-27"),
    "recipe": ('"micro_batch": 2', '"micro_batch": 4'),
    "machine": ('"count": 2', '"count": 4'),
    "name": (CELL.id, OTHER.id),
    "checksum": ('"checksum": "', '"checksum": "0'),
}


@pytest.mark.parametrize("edit", EDITS)
def test_record_edited_by_hand_is_refused(stored, edit):
    path, text = stored
    write_text(path, changed(text, *EDITS[edit]))
    with pytest.raises(ValueError, match=re.escape(PATH)) as caught:
        room.read(path, Baseline)
    assert "checksum" in str(caught.value)
    assert "restore the file from git, or remove it and record it again with tools.approve" in str(caught.value)


def test_record_with_the_next_ones_numbers_is_refused(tmp_path):
    """A merge that pairs each name with its neighbour's numbers gives valid JSON."""
    cells = [CELL, OTHER, cell(StrategyName.SINGLE, world_size=1)]
    paths = [room.write(tmp_path, baseline(of, nights=((0.1 * (number + 1),),))) for number, of in enumerate(cells)]
    records = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    for path, record, following in zip(paths[:2], records, records[1:], strict=False):
        write_text(path, json.dumps(record | {"nights": following["nights"]}, indent=2))
    store = Store(tmp_path)
    for of in cells[:2]:
        with pytest.raises(ValueError, match=rf"{re.escape(of.id)}\.json: checksum"):
            store.load(of, CPU)
    assert store.load(cells[2], CPU) is not None


def test_record_under_another_name_is_refused(stored):
    path, text = stored
    wrong = write_text(path.with_name(f"{OTHER.id}.json"), text)
    with pytest.raises(ValueError, match=rf"{re.escape(OTHER.id)}\.json: holds the record of {re.escape(CELL.id)}"):
        room.read(wrong, Baseline)


def test_record_of_another_machine_is_refused(tmp_path, stored):
    _, text = stored
    other = msgspec.structs.replace(CPU, count=4)
    write_text(tmp_path / other.key / f"{CELL.id}.json", text)
    with pytest.raises(ValueError, match=f"{CELL.id}: recorded on {CPU.key}, stored under {other.key}"):
        Store(tmp_path).load(CELL, other)


def test_damaged_file_is_refused_with_its_path(stored):
    path, text = stored
    write_text(path, text[:400])
    with pytest.raises(ValueError, match=re.escape(PATH)):
        Store(path.parent.parent).load(CELL, CPU)


@pytest.mark.parametrize("number", [0.0, -1.0])
@pytest.mark.parametrize(
    "field", ["step_times_s", "peak_allocated_bytes", "peak_reserved_bytes", "peak_resident_bytes"]
)
def test_value_that_cannot_be_measured_is_refused_though_sealed(tmp_path, field, number):
    record = baseline(GPU_CELL, machine=H200X2, allocated_bytes=2**34, nights=((0.1, 0.1),))
    bad = (0.1, number) if field == "step_times_s" else int(number)
    runs = (record.runs[0], msgspec.structs.replace(record.runs[1], **{field: bad}))
    record = msgspec.structs.replace(record, nights=(msgspec.structs.replace(record.nights[0], runs=runs),))
    path = room.write(tmp_path, record)
    with pytest.raises(ValueError, match=rf"{re.escape(path.name)}: {number:g}(\.0)? cannot be a measured value"):
        room.read(path, Baseline)


@pytest.mark.parametrize(
    ("nights", "message"), [((), "holds no runs"), (((),), "holds no runs")], ids=["no night", "empty night"]
)
def test_baseline_without_runs_is_refused(tmp_path, nights, message):
    path = room.write(tmp_path, baseline(nights=nights))
    with pytest.raises(ValueError, match=message):
        room.read(path, Baseline)


def test_run_without_steps_is_refused(tmp_path):
    record = baseline()
    run = msgspec.structs.replace(record.runs[0], step_times_s=())
    record = msgspec.structs.replace(record, nights=(msgspec.structs.replace(record.nights[0], runs=(run,)),))
    with pytest.raises(ValueError, match="no step times cannot be a measured value"):
        room.read(room.write(tmp_path, record), Baseline)


@pytest.mark.parametrize(
    "record", [baseline(nights=((0.1, 1 / 3, 1e-7),)), invariants()], ids=["baseline", "invariants"]
)
def test_saving_again_changes_no_byte(tmp_path, record):
    path = room.write(tmp_path, record)
    before = path.read_bytes()
    room.write(tmp_path, room.read(path, type(record)))
    assert path.read_bytes() == before


def test_seal_covers_every_field():
    whole = invariants()
    assert whole.is_whole()
    assert not msgspec.structs.replace(whole, checksum="").is_whole()
    for name, value in {"start_gradient_norm": 2.4, "losses": (1.0,), "ledger": (), "cell_id": "x"}.items():
        assert not msgspec.structs.replace(whole, **{name: value}).is_whole(), name
    assert whole.sealed() == whole


@pytest.mark.parametrize(
    ("runs_of_nights", "provisional"),
    [
        ((3,), True),
        ((9,), True),
        ((5, 5), True),
        ((3, 3, 2), True),
        ((3, 3, 3), False),
        ((3,) * 5, False),
        ((1,) * 8, True),
    ],
)
def test_fewer_than_3_nights_or_9_runs_are_provisional(runs_of_nights, provisional):
    record = baseline(nights=tuple((0.1,) * number for number in runs_of_nights))
    assert record.is_provisional is provisional
    assert len(record.runs) == len(record.levels) == sum(runs_of_nights)


def test_medians_are_over_all_runs_and_unknown_when_one_was_not_measured():
    record = baseline(GPU_CELL, allocated_bytes=100, nights=((0.1,), (0.1, 0.1)))
    assert record.median("peak_allocated_bytes") == 100
    assert record.median("peak_reserved_bytes") == 100 + 2**30
    runs = (msgspec.structs.replace(record.runs[0], peak_allocated_bytes=None),)
    partly = msgspec.structs.replace(
        record, nights=(msgspec.structs.replace(record.nights[0], runs=runs), record.nights[1])
    )
    assert partly.median("peak_allocated_bytes") is None


STRATEGIES = (StrategyName.DDP, StrategyName.FSDP2)
MANY = [cell(strategy, world_size=ranks) for strategy, ranks in itertools.product(STRATEGIES, (2, 4))]
NEWER = {"software": msgspec.structs.replace(origin().software, torch="2.15.0")}


def store_of(folder, spreads):
    for of, spread in zip(MANY, spreads, strict=False):
        room.write(folder, baseline(of, nights=((1.0, 1.0 + spread, 1.0 - spread),) * 3))
    return Store(folder)


def test_prior_sd_is_the_machines_typical_spread(tmp_path):
    spreads = (0.01, 0.03, 0.02)
    store = store_of(tmp_path, spreads)
    sds = [statistics.stdev(store.load(of, CPU).levels) for of in MANY[:3]]
    assert store.prior_sd(CPU, default=0.5) == pytest.approx(sorted(sds)[1])


@pytest.mark.parametrize("spreads", [(), (0.01, 0.02)], ids=["no cell", "2 cells"])
def test_prior_sd_is_the_default_while_fewer_than_3_cells_are_known(tmp_path, spreads):
    assert store_of(tmp_path, spreads).prior_sd(CPU, default=0.5) == 0.5
    assert store_of(tmp_path, spreads).prior_sd(H200X2, default=0.5) == 0.5


def test_prior_sd_leaves_out_a_damaged_record_and_a_provisional_one(tmp_path):
    store = store_of(tmp_path, (0.01, 0.02, 0.03, 0.04))
    expected = statistics.stdev(store.load(MANY[2], CPU).levels)
    write_text(tmp_path / CPU.key / f"{MANY[0].id}.json", "{")
    assert store.prior_sd(CPU, default=0.5) == pytest.approx(expected)
    room.write(tmp_path, baseline(MANY[1], nights=((1.0, 1.1, 1.2),)))
    assert store.prior_sd(CPU, default=0.5) == 0.5


def git(folder, *arguments):
    command = ["git", "-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false", *arguments]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout


def test_branches_that_each_add_a_cell_merge_cleanly_and_both_survive(tmp_path):
    git(tmp_path, "init", "--quiet", "--initial-branch=main")
    room.write(tmp_path, baseline(MANY[0]))
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "--message=one cell")
    for branch, of in (("left", MANY[1]), ("right", MANY[2])):
        git(tmp_path, "checkout", "--quiet", "-b", branch, "main")
        room.write(tmp_path, baseline(of, nights=((0.2,),)))
        git(tmp_path, "add", ".")
        git(tmp_path, "commit", "--quiet", f"--message={branch}")
    git(tmp_path, "merge", "--quiet", "--no-edit", "left")
    store = Store(tmp_path)
    assert store.ids(CPU) == {of.id for of in MANY[:3]}
    assert all(store.load(of, CPU) is not None for of in MANY[:3])
    room.write(tmp_path, store.load(MANY[1], CPU))
    assert git(tmp_path, "status", "--porcelain") == ""


def test_nights_of_the_same_build_are_told_by_commit_cleanliness_and_versions():
    assert origin().is_continued_by(origin("another night", host="node2", date="2026-12-01"))
    for change in ({"commit": "beef"}, {"dirty": True}, NEWER):
        assert not origin().is_continued_by(origin(**change))


@pytest.mark.parametrize("later", [{"commit": "beef"}, {"dirty": True}, {"commit": None, "dirty": None}], ids=str)
def test_nights_under_one_reason_are_of_one_series_whatever_their_commits(later):
    first = origin(reason="torch 2.14")
    assert first.is_continued_by(origin("another night", reason="torch 2.14", **later))
    for reason in (None, "torch 2.15"):
        assert not first.is_continued_by(origin("another night", reason=reason, **later))
    assert not first.is_continued_by(origin("another night", reason="torch 2.14", **later, **NEWER))


@pytest.mark.parametrize("unknown", [{"dirty": True}, {"commit": None, "dirty": None}])
def test_only_a_reason_says_that_builds_without_a_commit_of_their_own_are_the_same(unknown):
    assert not origin(**unknown).is_continued_by(origin(**unknown))


def test_files_hold_measured_values_and_no_thresholds(stored):
    _, text = stored
    assert [word for word in ("tolerance", "threshold", "limit", "floor") if f'{word}"' in text] == []
    record = jsonfile.parse(text, Baseline, source="text")
    assert record.runs[1].step_times_s == (0.11,) * 10
    assert jsonfile.parse(jsonfile.dumps(invariants()), Invariants, source="text") == invariants()


def test_record_from_before_a_field_existed_is_still_whole(tmp_path):
    """As a file of a writer that did not know `reason` yet: the checksum is over the file, not over our fields."""
    path = room.write(tmp_path, invariants())
    data = json.loads(path.read_text())
    del data["origin"]["reason"]
    data["checksum"] = room.digest(data)
    path.write_text(json.dumps(data))
    assert room.read(path, Invariants).origin.reason is None
