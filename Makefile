# Everything here works on a fresh machine with Python >= 3.11 and a package index: the environment is made when needed,
# and made again when pyproject.toml changes.

.DEFAULT_GOAL := help
SHELL := /bin/sh
.DELETE_ON_ERROR:

VENV := .venv
PY := $(VENV)/bin/python
# The stamp's name holds what the environment was made from, and where: a copied checkout installs itself again.
INPUT_HASH := $(shell { pwd; cat pyproject.toml; } | cksum | cut -d' ' -f1)
STAMP := $(VENV)/.made-from-$(INPUT_HASH)
TRAIN_STAMP := $(STAMP)-train

# Rooms checked by mypy; the whole package, so that no room can fall behind.
TYPED := src/loadwise
# Every bench that exists of those that answer to --quick --json.
BENCHES := $(foreach bench,decision linear embed sim emulator disc_live gateway verification memory import_time http_stack,\
           $(if $(wildcard bench/$(bench).py bench/$(bench)/__main__.py),bench.$(bench)))

# pytest says 5 where nothing was selected: not a failure of a target that may have no tests yet.
PYTEST = $(PY) -m pytest
MAYBE_NONE = || { status=$$?; [ $$status -eq 5 ] && echo "no test carries this marker yet"; }

.PHONY: help venv demo test test-real test-slow test-train lint format bench clean

help: ## List the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 18

venv: $(STAMP) ## Make the environment in .venv

$(STAMP):
	@set -e; \
	if ! $(PY) -m pip --version >/dev/null 2>&1; then \
	  found=; \
	  for python in $(PYTHON) python3 python3.13 python3.12 python3.11 python3.14; do \
	    if $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then found=$$python; break; fi; \
	  done; \
	  if [ -z "$$found" ]; then \
	    echo "Loadwise needs Python >= 3.11; say where: make PYTHON=/path/to/python3 $(MAKECMDGOALS)" >&2; exit 1; \
	  fi; \
	  rm -rf $(VENV); \
	  $$found -m venv $(VENV); \
	fi; \
	echo "installing into $(VENV); the first time this takes a minute or two" >&2; \
	$(PY) -m pip install --quiet --disable-pip-version-check -e ".[all,dev]"; \
	rm -f $(VENV)/.made-from-*; \
	touch $@

$(TRAIN_STAMP): $(STAMP)
	$(PY) -m pip install --quiet --disable-pip-version-check -e ".[train]"
	@touch $@

demo: $(STAMP) ## Run the demo; more flags with ARGS="--seed 3"
	@$(PY) -m loadwise demo $(ARGS)

test: $(STAMP) ## Run the tests and the examples in docstrings; needs no engine, no torch, no Debian package
	$(PYTEST) -m "not real and not slow and not train" --doctest-modules --ignore=src/loadwise/train tests src $(ARGS)

test-real: $(STAMP) ## Run the tests that need a real engine, a sandbox, a broker or a browser
	@$(PYTEST) -m "real and not slow" tests $(ARGS) $(MAYBE_NONE)

test-slow: $(STAMP) ## Run the tests that take longer than a minute
	@$(PYTEST) -m "slow and not train" tests $(ARGS) $(MAYBE_NONE)

test-train: $(TRAIN_STAMP) ## Run the tests that need torch, after installing it
	@$(PYTEST) -m train tests $(ARGS) $(MAYBE_NONE)

lint: $(STAMP) ## Check style, types and the stair of rooms
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy $(TYPED)
	$(PY) $(VENV)/bin/lint-imports --no-logo

format: $(STAMP) ## Mend what the style checker can mend
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

bench: $(STAMP) ## Run every bench, quick; one JSON object each
	@set -e; for bench in $(BENCHES); do echo "$$bench" >&2; $(PY) -m $$bench --quick --json; done

clean: ## Remove the environment and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis build dist
