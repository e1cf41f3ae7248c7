# Nothing but Python 3.11 and make is assumed: every target makes the virtual environment it needs.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

export PIP_CONSTRAINT := $(CURDIR)/constraints.txt

.PHONY: demo test check conformance bench crash clean

demo: $(VENV)/base  ## the main job, in a few seconds
	@$(BIN)/python examples/demo.py

test: $(VENV)/test  ## all tests, with real SQLite, Redis and PostgreSQL
	$(BIN)/python -m pytest

check: $(VENV)/test  ## lint, format, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

conformance: $(VENV)/test  ## the official suite of MCP, on Node from PyPI
	$(BIN)/python -m tests.mcp.conformance

bench: $(VENV)/bench  ## ratios to bare engines and to other libraries, in one run each
	@missed=0; for name in core ledger http stdio client cli; do echo "== $$name"; $(BIN)/python bench/$$name.py || missed=1; done; exit $$missed

KILLS ?= 10000
SEED ?= 0

crash: $(VENV)/test  ## the long run of kills: make crash KILLS=10000 SEED=7
	$(BIN)/python -m tests.crash --kills $(KILLS) --seed $(SEED)

clean:
	rm -rf $(VENV)

$(VENV)/python:
	$(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/base: $(VENV)/python pyproject.toml constraints.txt
	$(PIP) --editable .
	touch $@

$(VENV)/test: $(VENV)/python pyproject.toml constraints.txt
	$(PIP) --editable ".[test,bench]"
	touch $@ $(VENV)/base $(VENV)/bench

$(VENV)/bench: $(VENV)/python pyproject.toml constraints.txt
	$(PIP) --editable ".[bench]"
	touch $@ $(VENV)/base
