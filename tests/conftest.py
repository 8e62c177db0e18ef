"""Shared by the tests: one warm server of ranks for the whole session."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from perf.facts.hardware import usable_cores
from perf.measure.launch import Launcher
from tests import canary
from tests.suite_runs import SuiteRuns

LEASED = {"test_bisect", "test_compare", "test_doctor"}
"""Modules whose tests start test runs or tools of their own."""
CORES_FOR_ALL = 16
"""On fewer, test runs at once would disturb each other's times."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """On few cores, one worker of xdist makes all tests that hold the node's lease: two would wait for each other."""
    if usable_cores() < CORES_FOR_ALL:
        for item in items:
            if "suite_runs" in getattr(item, "fixturenames", ()) or item.path.stem in LEASED:
                item.add_marker(pytest.mark.xdist_group("lease of the node"))


@pytest.fixture(scope="session")
def launcher() -> Iterator[Launcher]:
    """A server with torch imported, from which every test forks its ranks."""
    with Launcher() as warm:
        yield warm


@pytest.fixture(scope="session")
def recorded_state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the first test that needs recorded baselines leaves a copy for the others."""
    return tmp_path_factory.mktemp("recorded") / "baselines"


@pytest.fixture
def suite_runs(pytester: pytest.Pytester, recorded_state: Path, monkeypatch: pytest.MonkeyPatch) -> SuiteRuns:
    """Runs `pytest perf` in a pytest of its own, away from this checkout's baselines and results."""
    monkeypatch.delenv(
        "PYTEST_XDIST_WORKER", raising=False
    )  # with it pytest-benchmark takes the inner one for a worker
    if usable_cores() >= CORES_FOR_ALL:
        # The lease of the node lies in the temporary folder: with one each, inner test runs need not wait for others.
        monkeypatch.setenv("TMPDIR", str(pytester.mkdir("temporary")))
    return SuiteRuns(pytester, recorded_state)


@pytest.fixture(scope="session")
def sound_collectives(launcher: Launcher) -> None:
    """Ends the session where a collective is wrong: each strategy built on it would be red, and none at fault."""
    if wrong := canary.wrong(canary.listen(launcher)):
        pytest.exit(f"INVALID: {wrong[0]}; no strategy can be judged by this backend", returncode=8)
