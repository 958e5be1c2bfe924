# Every target prepares .venv by itself: Python 3.10+ and make are all it takes.

PYTHON ?= python3
# Installed before everything else so that nothing pulls another build. Any arguments of `pip install` will do, such as
# torch==2.15.0 or the path of a wheel; docs/versions.md has the versions that are tested.
TORCH  ?= torch==2.13.0

VENV  := .venv
BIN   := $(VENV)/bin
SPACE := $(subst ,, )
# One stamp per TORCH, so that asking for another one installs it.
READY := $(VENV)/.ready-$(subst /,-,$(subst $(SPACE),-,$(TORCH)))
PEERS := $(VENV)/.peers
# What `make test-fast` runs: no ranks, no servers, no browsers, few programs of their own.
FAST  := tests/base tests/layout tests/formats tests/state tests/dcp_engine tests/load tests/save tests/attacks tests/test_layers.py
CODE  := src tests tools benchmarks $(wildcard demo examples)

# Tests start hundreds of processes; each would compile the sources and rewrite the asserts of the tests again.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help demo test test-fast lint bench bench-quick test-long test-versions docs format clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(READY)  ## train on 4 processes, resume on 2 and on 1, compare; kill -9 and restart
	@$(BIN)/python demo/run.py

test: lint  ## lint, type-check and run the tests
	@echo "== pytest"
	@$(BIN)/python -m pytest -n 2 --dist loadfile

test-fast: $(READY)  ## the tests that need one process, for the inner loop (a minute)
	@$(BIN)/python -m pytest -n 2 --dist loadfile -m 'not long and not ranks' $(FAST)

lint: $(READY)  ## ruff and mypy
	@echo "== ruff check"
	@$(BIN)/ruff check $(CODE)
	@echo "== ruff format --check"
	@$(BIN)/ruff format --check $(CODE)
	@echo "== mypy"
	@$(BIN)/mypy

test-long: $(READY)  ## the tests marked long, and every property test with all its examples
	@$(BIN)/python -m pytest -n 2 --dist loadfile -m 'long or hypothesis' --hypothesis-profile long

# TORCH and PYTHON choose one row of the table, if they are given; KEEP=1 leaves the environments in build/versions.
test-versions:  ## the tests with other versions of torch and Python (hours; or TORCH=2.8.0 PYTHON=python3.12)
	@$(if $(filter command,$(origin PYTHON)),python3,$(PYTHON)) -m tests.versions $(if $(KEEP),--keep) \
		$(if $(filter command,$(origin TORCH)),--torch '$(TORCH)') $(if $(filter command,$(origin PYTHON)),--python '$(PYTHON)')

bench: $(READY) $(PEERS)  ## measure against the hardware, stock DCP and peers, and update docs/ (15 minutes)
	@$(BIN)/python -m benchmarks.run --json docs/performance.json
	@$(BIN)/python -m benchmarks.document

bench-quick: $(READY) $(PEERS)  ## the same table from less data; no document changes (2 minutes)
	@$(BIN)/python -m benchmarks.run --scale quick --json build/bench-quick.json

docs: $(READY)  ## docs/cli.md and the manual page, from the help of the commands
	@$(BIN)/python -m tools.cli_pages

format: $(READY)  ## rewrite the code in the house format
	@$(BIN)/ruff check --fix $(CODE)
	@$(BIN)/ruff format $(CODE)

clean:  ## remove .venv and everything the tools left behind
	@rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .bench-*
	@find $(CODE) -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamp is written last: an interrupted set-up starts over.
$(READY): pyproject.toml
	@echo "== preparing $(VENV) ($(TORCH); a few minutes the first time)"
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 10) or sys.exit("holdfast needs Python 3.10 or newer; set PYTHON=...")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@rm -f $(VENV)/.ready*
	@touch $@

# Tests do without them. One that cannot be had is a line in the table.
$(PEERS): $(READY)
	@echo "== installing the peers of the benchmark"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[bench]' \
		|| echo "not all peers can be installed; the table says which are missing"
	@touch $@
