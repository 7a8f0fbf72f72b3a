# Everything runs in a virtual environment that is made on first use from requirements.lock.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DEV := $(VENV)/.ready-dev
PIP := $(BIN)/python -m pip install --disable-pip-version-check --quiet

.PHONY: help train env quick test check format docs dist-check bench clean

help:             ## this list
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 20

train: $(READY)   ## train the default recipe with 2 workers; make train ARGS="an4 --density 0.01"
	$(BIN)/oktopk train $(ARGS)

env: $(DEV)       ## the virtual environment, with what tests need

$(READY): requirements.lock pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) --requirement requirements.lock
	$(PIP) --no-deps --no-build-isolation --editable .
	touch $@

$(DEV): $(READY) requirements-dev.lock requirements-triton.lock
	$(PIP) --requirement requirements-dev.lock
	$(PIP) --no-deps --upgrade --target $(VENV)/triton --requirement requirements-triton.lock
	touch $@

quick: $(DEV)     ## some tests of every layer, in 90 seconds
	$(BIN)/python -m pytest -m quick --hypothesis-profile quick $(ARGS)

test: $(DEV)      ## all tests; make test ARGS="--exhaustive -k oktopk" passes options to pytest
	$(BIN)/python -m pytest $(ARGS)

check: $(DEV)     ## lint, format, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(DEV)    ## put the code into its standard form
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(DEV)      ## the documentation as a site in build/site; dead links are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

dist-check: $(DEV)  ## wheel and source distribution; install them and run the quick tests there
	.ci/dist-check $(BIN)/python

bench: $(DEV)     ## kernels, all algorithms on 4 ranks, training steps; about seven minutes
	$(BIN)/python benchmarks/kernels.py
	$(BIN)/python benchmarks/allreduce.py
	$(BIN)/python benchmarks/overlap.py

clean:            ## remove the virtual environment and all caches
	rm -rf $(VENV) build .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info
	find . -name __pycache__ -prune -exec rm -rf {} +
