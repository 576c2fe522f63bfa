# Every target does its own set-up: a fresh clone needs Python 3.11+, make and git, nothing else.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: setup test check unit demo clean

setup: $(STAMP)

# torch is pinned first: a looser request may fetch gigabytes of accelerator libraries.
$(STAMP): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Headway needs Python 3.11 or newer")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet torch==2.13.0
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $(STAMP)

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

unit: $(STAMP)
	$(BIN)/pytest

test: check unit

demo: $(STAMP)
	$(BIN)/headway demo

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache
