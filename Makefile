# Tools run as modules: scripts of the shared environment carry absolute paths of another Python.
PYTHON := .venv/bin/python
PYTEST := $(PYTHON) -m pytest -v --durations=10

.PHONY: help venv venv-path lint test test-unit test-kernels test-engine test-e2e test-full demo bench-drc bench-handoff bench-wan bench-transport
.DEFAULT_GOAL := help

help:
	@echo "make venv       build the environment (the first time: minutes, 11 GB under ~/.cache/sglang-pdd)"
	@echo "make venv-path  print its path"
	@echo "make lint       ruff and mypy"
	@echo "make test       lint, unit, engine and end-to-end tests (under 30 minutes on 2 cores)"
	@echo "make test-unit  no server: seconds"
	@echo "make test-kernels  the kernels, interpreted and compiled ahead of time: a minute"
	@echo "make test-full  everything, also what is marked slow"
	@echo "make demo       three roles and a router on this machine"
	@echo "make bench-drc  what main decode's cache costs, and what it spares the WAN (ARGS=--help)"
	@echo "make bench-wan  beside stock over an emulated WAN (hours; root; goes on where it stopped; ARGS=--help)"
	@echo "make bench-handoff  what a handoff costs: over a WAN, and to a user (about an hour; root; ARGS=--help)"
	@echo "make bench-transport  the KV streams on an emulated WAN, beside plain TCP, Mooncake and NIXL (an hour; root; ARGS=--help)"

venv:
	@.ci/venv

venv-path:
	@echo $(CURDIR)/.venv

lint: venv
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy

test: lint
	$(MAKE) test-unit test-kernels test-engine test-e2e

test-unit: venv
	$(PYTEST) tests/unit -m "not full" --timeout 60

test-kernels: venv
	TRITON_INTERPRET=1 $(PYTEST) tests/kernels -m "not full"
	$(PYTEST) tests/kernels -m "not full"

test-engine: venv
	$(PYTEST) tests/engine -m "not full"

test-e2e: venv
	$(PYTEST) tests/e2e -m "not full" --timeout 600

test-full: lint
	TRITON_INTERPRET=1 $(PYTEST) tests/kernels
	PDD_TEST_FULL=1 $(PYTEST) tests --timeout 1200

demo: venv
	$(PYTHON) examples/demo.py

bench-drc: venv
	$(PYTHON) examples/bench_drc.py $(ARGS)

bench-handoff: venv
	$(PYTHON) examples/bench_handoff.py $(ARGS)

bench-wan: venv
	$(PYTHON) examples/bench_wan.py $(ARGS)

bench-transport: venv
	$(PYTHON) examples/bench_transport.py $(ARGS)
