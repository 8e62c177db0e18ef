# `make perf` runs the main job, `make test` the tests; each sets up .venv first when it is missing.
# An existing environment, such as a GPU image's: make PYTHON=python3 perf

PYTHON ?= .venv/bin/python
ARGS ?=
# Each worker of the tests keeps a server of ranks, and most tests have two ranks: more workers than cores help nobody.
WORKERS ?= 2

.PHONY: perf test test-long test-all lint clean

perf: setup
	$(PYTHON) -m pytest perf --perf-matrix smoke --perf-provisional --perf-allow=no-baseline,noisy $(ARGS)

test: setup
	$(PYTHON) -m pytest tests -n $(WORKERS) --dist loadgroup $(ARGS)

test-long: setup
	$(PYTHON) -m pytest tests -n $(WORKERS) --dist loadgroup -m long $(ARGS)

test-all: test test-long

lint: setup
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy

.PHONY: setup
ifeq ($(PYTHON),.venv/bin/python)
setup: .venv/installed
else
setup:
endif

.venv/installed: constraints.txt pyproject.toml
	python3 -c 'import sys; sys.exit(sys.version_info < (3, 11) and "python3 is %d.%d, needs 3.11 or newer" % sys.version_info[:2])'
	python3 -m venv .venv
	.venv/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	.venv/bin/python -m pip install --quiet --constraint constraints.txt --no-deps apache-otava || echo 'no change points in histories: apache-otava is not to be had'
	touch .venv/installed

clean:
	rm -rf .venv .shardmark results history
