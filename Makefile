# The whole interface of the repository; `make help` lists it.
SHELL := /bin/bash
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
STRICT ?=
# Tests and tools use one thread each, as the chapters do.
export OMP_NUM_THREADS ?= 1

.DEFAULT_GOAL := help
.PHONY: help install book smoke test accept lint clean

help:  ## list the targets
	@sed -nE 's/^([a-z]+):.*## (.*)/make \1|\2/p' Makefile | while IFS='|' read -r name text; do printf '%-14s%s\n' "$$name" "$$text"; done

install: $(STAMP)  ## create .venv with the pinned packages (an installed torch that satisfies the pin is kept)

$(PY):
	@found=""; for name in python3.13 python3.12 python3.11 python3; do \
	  if $$name -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then found=$$name; break; fi; \
	done; \
	if [ -z "$$found" ]; then echo "error: Python 3.11 or newer is needed, and none was found: install python3.11, python3.12 or python3.13" >&2; exit 1; fi; \
	if ! $$found -m venv $(VENV); then echo "error: $$found can't create a virtual environment: install its venv module (Debian: python3-venv)" >&2; rm -rf $(VENV); exit 1; fi

$(STAMP): requirements.txt constraints.txt pyproject.toml | $(PY)
	$(PY) -m pip install --quiet --disable-pip-version-check -r requirements.txt -c constraints.txt
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

book: $(STAMP)  ## execute the chapters that changed and build _build/html (STRICT=1: warnings are errors)
	@$(PY) -m pa_core build $(if $(STRICT),--strict)

smoke: $(STAMP)  ## the same with small sizes, in _build/smoke/html
	@$(PY) -m pa_core build --profile smoke $(if $(STRICT),--strict)

test: lint  ## ruff, pytest, and nbval on the reference notebooks
	$(PY) -m pytest -q tests --ignore tests/reference -n 2
	$(PY) -m pytest -q tests/reference --nbval-lax --nbval-current-env --nbval-cell-timeout 300 -n 2 --dist loadfile

accept: $(STAMP)  ## make the reference notebooks again and print the numbers that changed
	@$(PY) -m pa_core accept

lint: $(STAMP)  ## ruff on the package and the tests
	$(PY) -m ruff check pa_core tests

clean:  ## remove everything derived, the environment apart
	rm -rf _build .pytest_cache .ruff_cache .hypothesis
