"""Root of the test tree: turns the suite on for `pytest perf` and `pytest tests` alike."""

pytest_plugins = ["perf.plugin"]
