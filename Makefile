PYTHON ?= python3
# the versions to install: make setup CONSTRAINTS=constraints-oldest.txt in a fresh clone
CONSTRAINTS ?= constraints.txt
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# passed on to the program or to pytest: make run ARGS="--budget.removed 0.5", make test ARGS="-k gates"
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help setup run test lint format bench clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# always with the constraints: pip left alone would resolve another torch
$(STAMP): pyproject.toml $(CONSTRAINTS)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -c $(CONSTRAINTS) -e ".[dev]"
	touch $@

setup: $(STAMP)  ## create .venv and install rankwise with its development tools

run: setup  ## train, prune and compare a small language model: minutes, no download
	$(BIN)/rankwise run demo $(ARGS)

# one torch thread per worker: the workers share the cores
test: setup  ## run the tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 8 $(ARGS)

lint: setup  ## run ruff, mypy and import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

format: setup  ## format the code and apply the safe fixes
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup  ## time the core against its dense counterpart
	$(BIN)/python benchmarks/core.py $(ARGS)

clean:  ## remove the environment, caches and build outputs
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find src tests examples benchmarks -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true
