"""The canary is alive, and a wrong collective is named."""

import pytest

from perf.measure.connection import ROOT, python_path
from tests import canary


def test_every_collective_gives_what_it_must(launcher):
    assert canary.wrong(canary.listen(launcher)) == []


@pytest.mark.parametrize("name", canary.right(0))
def test_a_wrong_collective_is_named(name):
    songs = [canary.Song(values=canary.right(rank)) for rank in (0, 1)]
    broken = canary.Song(values=canary.right(1) | {name: (2 * canary.right(1)[name][0],)})
    (message,) = canary.wrong([songs[0], broken])
    assert message.startswith(f"{name} gives (")
    assert "on rank 1, not (" in message


def test_suite_is_invalid_where_the_canary_is_silent(pytester, monkeypatch):
    pytester.makeconftest(
        """
        import pytest
        from tests import canary
        from tests.conftest import sound_collectives

        @pytest.fixture(scope="session")
        def launcher():
            return None

        canary.listen = lambda launcher: [canary.Song(values={}), canary.Song(values=canary.right(1))]
        """
    )
    pytester.makepyfile("import pytest\npytestmark = pytest.mark.usefixtures('sound_collectives')\ndef test_a(): pass")
    monkeypatch.setenv("PYTHONPATH", python_path(ROOT))
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    assert result.ret == 8
    assert "INVALID: all_reduce SUM gives None on rank 0, not (3.0, 3.0)" in result.stdout.str() + result.stderr.str()
