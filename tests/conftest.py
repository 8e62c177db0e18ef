"""Shared by the tests: one warm server of ranks for the whole session."""

from collections.abc import Iterator

import pytest

from perf.launch import Launcher


@pytest.fixture(scope="session")
def launcher() -> Iterator[Launcher]:
    """A server with torch imported, from which every test forks its ranks."""
    with Launcher() as warm:
        yield warm
