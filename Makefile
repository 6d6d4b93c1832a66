# TinyLoop: `make demo` shows it, `make test` proves it, `make check` is what CI runs.
#
# Everything lives in .venv; it is made and filled once, and again only when pyproject.toml changes.
# Another interpreter: `make PYTHON=python3.12 demo`.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

# Two stamps, so that a demo does not wait for linters: what the service needs, and what its developers need.
RUN_READY := $(VENV)/.ready-run
DEV_READY := $(VENV)/.ready-dev

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo serve test check lint protos clean

help:
	@echo "make demo    start a server with the demo model, share one prefix among 10 concurrent requests, measure it"
	@echo "make serve   the server alone, on 127.0.0.1:50051, until Ctrl-C"
	@echo "make test    every test (at most 6 minutes on two cores)"
	@echo "make lint    ruff, mypy --strict, import-linter, buf lint"
	@echo "make check   lint and test"
	@echo "make protos  generate tinyloop_service/pb from protos/ again"
	@echo "make clean   remove .venv, caches and build outputs"

demo: $(RUN_READY)
	@$(BIN)/tinyloop demo

serve: $(RUN_READY)
	@$(BIN)/tinyloop serve

test: $(DEV_READY)
	$(BIN)/python -m pytest -q

check: lint test

lint: $(DEV_READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/buf lint

protos: $(DEV_READY)
	$(BIN)/python protos/generate.py

clean:
	rm -rf $(VENV) dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find tinyloop_service tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "TinyLoop needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>/dev/null || echo not there)." >&2; \
	  echo "Name a newer one: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
	  echo "'$(PYTHON) -m venv' failed; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }

$(RUN_READY): pyproject.toml | $(BIN)/python
	@echo "Installing TinyLoop into $(VENV) (once; a minute or two) ..."
	@$(PIP) install --editable .
	@touch $@

$(DEV_READY): pyproject.toml | $(BIN)/python
	@echo "Installing TinyLoop and its development tools into $(VENV) (once; a minute or two) ..."
	@$(PIP) install --editable '.[dev]'
	@touch $(RUN_READY) $@
