# Every target does its own set-up: a fresh clone needs Python 3.11+, make and git, nothing else.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TORCH ?= 2.13.0

# Tests mostly wait for each other's ranks, so there are more processes than cores; a file is run by one of them.
WORKERS ?= $(shell echo $$(( $$(nproc 2>/dev/null || echo 2) + 2 )))
PYTEST := $(BIN)/pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

# Values, graphs and what computes on them: no processes, and no files of other tools.
QUICK := tests/answers tests/collectives tests/graph tests/model_tables tests/network tests/optimization \
	tests/plan tests/planning tests/prediction tests/replayer tests/scheduling tests/simulation tests/strategies tests/trace \
	$(wildcard tests/test_*.py)

# Where it is set, each of some thousand processes would compile every module again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup quick quick-tests test test-all test-with check lint types docs unit unit-all coverage demo demo-check clean

setup: $(STAMP)
	@echo 'To have headway and torchrun on the PATH of this shell: . $(BIN)/activate'

# torch is pinned first: a looser request may fetch gigabytes of accelerator libraries.
CONTRIB := contrib/headway-baselines contrib/headway-readers
$(STAMP): pyproject.toml $(CONTRIB:%=%/pyproject.toml)
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Headway needs Python 3.11 or newer")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(if $(filter newest,$(TORCH)),torch,torch==$(TORCH))
	$(BIN)/python -m pip install --quiet --editable '.[dev]' $(CONTRIB:%=--editable %)
	touch $(STAMP)

# What is asked for while one works.
quick: $(STAMP)
	$(MAKE) --jobs=2 --output-sync=line check quick-tests

quick-tests: $(STAMP)
	$(BIN)/pytest -q -n 2 --dist loadfile --no-loadscope-reorder -m "not processes and not exhaustive" $(QUICK)

# What continuous integration runs.
test: $(STAMP)
	$(MAKE) --jobs=2 --output-sync=line check unit

test-all: check unit-all

check: lint types docs

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/python tools/house.py

types: $(STAMP)
	$(BIN)/mypy

docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict --site-dir $(VENV)/site

unit: $(STAMP)
	$(PYTEST) -m "not exhaustive"

unit-all: $(STAMP)
	HEADWAY_TESTS=all $(PYTEST)

# Lines and branches that any process of the tests went through, ranks and recorded jobs among them.
coverage: $(STAMP)
	$(BIN)/coverage erase
	COVERAGE_PROCESS_START=$(CURDIR)/pyproject.toml $(BIN)/coverage run -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m "not exhaustive"
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report --skip-covered --sort=cover

# Another torch or Python, in a folder of its own: make test-with TORCH=2.10.0 PYTHON=python3.12. TORCH=newest is what
# pip installs by itself, which takes gigabytes.
test-with:
	$(MAKE) quick unit VENV=.venv-$(TORCH)-$(notdir $(PYTHON))

demo: $(STAMP)
	$(BIN)/headway demo

# The whole loop in some two minutes, its answer checked.
demo-check: $(STAMP)
	$(BIN)/python -m tests.demo_check $(VENV)/demo

clean:
	rm -rf $(VENV) .venv-* .mypy_cache .ruff_cache .pytest_cache .coverage*
