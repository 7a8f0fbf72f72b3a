# Everything runs in a virtual environment that is made on first use from requirements.lock.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: help env test check format bench clean

help:             ## this list
	@sed -n 's/^\([a-z]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST)

env: $(READY)     ## the virtual environment

$(READY): requirements.lock pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --requirement requirements.lock
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --no-deps --no-build-isolation --editable .
	touch $@

test: $(READY)    ## all tests; make test ARGS="--exhaustive -k oktopk" passes options to pytest
	$(BIN)/python -m pytest $(ARGS)

check: $(READY)   ## lint, format, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)  ## put the code into its standard form
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY)   ## kernels, all algorithms on 4 ranks, training steps; about seven minutes
	$(BIN)/python benchmarks/kernels.py
	$(BIN)/python benchmarks/allreduce.py
	$(BIN)/python benchmarks/overlap.py

clean:            ## remove the virtual environment and all caches
	rm -rf $(VENV) build .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info
	find . -name __pycache__ -prune -exec rm -rf {} +
