"""Room perf/judge/baseline.py, the ceilings of machines: found by their key, whole, and positive numbers."""

import pytest
from msgspec.structs import replace

from perf.judge import baseline as room
from perf.judge.baseline import RecordedCeilings, Store
from tests import nodes
from tests.factory import CPU, baseline, cell

CEILINGS = f"ceilings/{nodes.H200S.key}.json"


@pytest.fixture
def stored(tmp_path):
    """The path of stored ceilings."""
    return room.write(tmp_path, nodes.recorded())


def test_stored_ceilings_are_found_by_exactly_their_key(tmp_path, stored):
    assert stored == tmp_path / CEILINGS
    store = Store(tmp_path / "missing", tmp_path)
    assert store.load_ceilings(nodes.H200S) == nodes.recorded().sealed()
    assert store.load_ceilings(replace(nodes.H200S, power_limit_w=500)) is None
    assert store.load_ceilings(replace(nodes.H200S, count=1, link=None)) is None


def test_ceilings_are_no_cells(tmp_path, stored):
    room.write(tmp_path, baseline())
    assert Store(tmp_path).ids(nodes.H200S) == set()
    assert Store(tmp_path).ids(CPU) == {cell().id}


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("793", "794", "checksum"),
        ('"checksum": "', '"checksum": "0', "checksum"),
        ('"gemm_side"', '"gemm_edge"', "gemm_edge"),
        ('"schema_version": 1', '"schema_version": 2', "schema_version 2"),
        ("}", "", "broken JSON"),
    ],
)
def test_damaged_ceilings_are_refused_with_their_path(tmp_path, stored, old, new, says):
    whole = stored.read_text()
    assert old in whole
    stored.write_text(whole.replace(old, new, 1))
    with pytest.raises(ValueError, match=says) as caught:
        Store(tmp_path).load_ceilings(nodes.H200S)
    assert CEILINGS in str(caught.value)


def test_ceilings_under_another_key_are_refused(tmp_path, stored):
    other = replace(nodes.H200S, power_limit_w=500)
    stored.rename(stored.with_name(f"{other.key}.json"))
    with pytest.raises(ValueError, match=f"holds the record of {nodes.H200S.key}"):
        Store(tmp_path).load_ceilings(other)


@pytest.mark.parametrize("median", [None, 0.0, -1.0])
def test_ceiling_that_cannot_be_measured_is_refused_though_sealed(tmp_path, median):
    room.write(tmp_path, nodes.recorded(nodes.ceilings(p2p_bytes_per_s=nodes.rate(median))))
    with pytest.raises(ValueError, match=f"p2p_bytes_per_s of {median} cannot be a measured value"):
        Store(tmp_path).load_ceilings(nodes.H200S)


def test_seal_of_ceilings_covers_their_values(stored):
    whole = room.read(stored, RecordedCeilings)
    assert whole.is_whole()
    assert not replace(whole, ceilings=nodes.ceilings(num_ranks=3)).is_whole()
