# Everything that a fresh clone needs. `make help` lists the targets.
#
#   PYTHON    the Python (3.10 or later) that makes the virtual environment
#   VENV      where it goes
#   ARGS      options passed on to the command a target runs:  make serve ARGS="--port 8001"
#   PIP_ARGS  options passed on to pip install

PYTHON   ?= python3
VENV     ?= .venv
ARGS     ?=
PIP_ARGS ?=

BIN     := $(VENV)/bin
PIP     := $(BIN)/python -m pip --disable-pip-version-check
CHECKED := src tests $(wildcard benchmarks)
SOURCES := $(shell find src -type f -not -path '*/__pycache__/*' -not -path '*.egg-info/*')

.DEFAULT_GOAL := help
.PHONY: help serve demo models test bits lint format types bench clean
.DELETE_ON_ERROR:

help:  ## list the targets
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/make \1 - \2/p' Makefile

serve: $(VENV)/.installed  ## install, fetch the default model, serve it on http://127.0.0.1:8000
	@exec $(BIN)/headwater serve $(ARGS)

demo: $(VENV)/.installed  ## the same, but send a few chat requests, print what each one reused, and stop
	@exec $(BIN)/headwater demo $(ARGS)

test: $(VENV)/.dev models  ## install what the tests need and run them
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest $(ARGS)

bits: $(VENV)/.dev models  ## compare bits over the whole matrix: tiny models, then both real ones (hours; ARGS="--pairs": less)
	HF_HUB_OFFLINE=1 HEADWATER_BITS=all $(BIN)/python -m pytest tests/bits/test_tiny.py
	HF_HUB_OFFLINE=1 $(BIN)/python -m tests.bits $(ARGS)

models: $(VENV)/.dev  ## fetch the models that the tests use (kept in the user's cache folder)
	@if [ -z "$$HEADWATER_TEST_MODELS" ]; then \
	  $(BIN)/headwater pull smollm2-135m && $(BIN)/headwater pull gemma3-270m; fi

lint: $(VENV)/.dev  ## ruff: rules and formatting
	$(BIN)/ruff check $(CHECKED)
	$(BIN)/ruff format --check $(CHECKED)

format: $(VENV)/.dev  ## let ruff fix what it can
	$(BIN)/ruff check --fix $(CHECKED)
	$(BIN)/ruff format $(CHECKED)

types: $(VENV)/.dev  ## mypy
	$(BIN)/mypy

bench: $(VENV)/.installed  ## time the cache, the scheduler and the engine step
	@set -e; for script in $(sort $(wildcard benchmarks/*.py)); do echo "== $$script"; $(BIN)/python $$script; done

clean:  ## remove the virtual environment and everything that tools wrote here
	@if [ -e "$(VENV)/pyvenv.cfg" ]; then rm -rf "$(VENV)"; fi
	rm -rf build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

# ---- the virtual environment; the stamps make a second run instant ----------------------------------

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "Headwater needs Python 3.10 or later as '$(PYTHON)'; name another one with PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo "'$(PYTHON)' cannot make virtual environments. On Debian or Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

# A development install is editable and serves as well: where there is one, it is kept, not replaced.
HAS_DEV := $(wildcard $(VENV)/.dev)

$(VENV)/.installed: $(VENV)/.created pyproject.toml constraints.txt $(SOURCES) $(HAS_DEV)
	$(if $(HAS_DEV),,rm -rf build && $(PIP) install -c constraints.txt $(PIP_ARGS) '.[bench]')
	@touch $@

$(VENV)/.dev: $(VENV)/.created pyproject.toml constraints.txt
	$(PIP) install -c constraints.txt $(PIP_ARGS) -e '.[dev]'
	@touch $@
