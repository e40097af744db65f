# Everything a newcomer types: make demo, make test, make check. Nothing has to be installed first but Python 3.11 or newer.
VENV    ?= .venv
PY      := $(VENV)/bin/python
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_ROOT_USER_ACTION := ignore

.PHONY: help demo test test-all check fmt contract bench clean
help:      ## this list
	@grep -hE '^[a-z-]+: .*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 24

$(VENV)/bin/python:
	scripts/make-venv $(VENV)

$(VENV)/.installed-ddp: pyproject.toml | $(VENV)/bin/python
	@echo "installing mtrain with torch (CPU build) into $(VENV): about a minute"
	@$(PY) -m pip install --quiet --progress-bar off -e '.[ddp]'
	@touch $@

$(VENV)/.installed-dev: pyproject.toml $(VENV)/.installed-ddp
	@echo "installing what tests and linters need into $(VENV)"
	@$(PY) -m pip install --quiet --progress-bar off -e '.[ddp,dev]'
	@touch $@

demo: $(VENV)/.installed-ddp  ## train a small YOLOv5 on the embedded digits with two DDP processes
	$(VENV)/bin/mtrain train -c digits --backend ddp --nproc-per-node 2

test: $(VENV)/.installed-dev  ## the tests, without the slow ones
	OMP_NUM_THREADS=1 MPLBACKEND=Agg $(PY) -m pytest -q -m "not slow" -n 2 --dist worksteal $(PYTEST_ARGS)

test-all: $(VENV)/.installed-dev  ## all tests
	OMP_NUM_THREADS=1 MPLBACKEND=Agg $(PY) -m pytest -q -n 2 --dist worksteal $(PYTEST_ARGS)

contract: $(VENV)/.installed-dev  ## two ranks learn what one rank learns
	OMP_NUM_THREADS=1 $(PY) -m pytest -q tests/contract $(PYTEST_ARGS)

check: $(VENV)/.installed-dev  ## linters, types, import graph
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(PY) -m pytest -q -p no:cacheprovider tests/core/test_imports.py

fmt: $(VENV)/.installed-dev  ## format the code
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

bench: $(VENV)/.installed-dev  ## the benchmark table: ratios against named peers
	$(PY) -m benchmarks

clean:     ## remove the environment and caches; run folders stay
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
