# Each target sets up what it needs in .venv, on a fresh machine with Python >= 3.11 and a C compiler.
TORCH  ?= 2.13.0
VISION ?= 0.28.0
VENV   ?= .venv
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3 python; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null && echo $$p && break; done)
PY     ?= $(VENV)/bin/python
PIP    := $(VENV)/bin/python -m pip --disable-pip-version-check
SOURCES := pyproject.toml setup.py $(wildcard csrc/*.c csrc/*.h)
ARGS   ?=
JOBS   ?= 2

.PHONY: help demo test ext lint format types bench docs clean
help:
	@echo "make demo    ResNet-18 and BERT, eager against magneto"
	@echo "make test    the test suite in two processes (ARGS=... goes to pytest, JOBS=n)"
	@echo "make lint types docs bench ext format clean"

$(VENV)/bin/python:
	@test -n "$(PYTHON)" || { echo "magneto needs Python 3.11, 3.12 or 3.13: make PYTHON=/path/to/python $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -q -U pip "setuptools>=77"

# torch first, and by exact version: a plain "torch" could bring another build and gigabytes with it.
$(VENV)/.torch: | $(VENV)/bin/python
	$(PIP) install -q torch==$(TORCH)
	$(PIP) install -q --no-deps torchvision==$(VISION)
	@touch $@

$(VENV)/.%: $(VENV)/.torch $(SOURCES)
	$(PIP) install -q -e '.[$*]'
	@touch $@

demo: $(VENV)/.demo
	$(VENV)/bin/python -m benchmarks.demo $(ARGS)

test: $(VENV)/.test
	$(VENV)/bin/python -m pytest -n $(JOBS) --dist loadfile $(ARGS)

bench: $(VENV)/.bench
	$(VENV)/bin/python -m benchmarks.run $(ARGS)
	$(VENV)/bin/python -m benchmarks.overhead $(ARGS)

lint: $(VENV)/.dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

format: $(VENV)/.dev
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

types: $(VENV)/.dev
	$(VENV)/bin/mypy

docs: $(VENV)/.test
	$(VENV)/bin/python -m docs.pages docs

# In place, with the interpreter given by PY (no virtual environment needed): make ext PY=python3.12
ext:
	$(PY) setup.py -q build_ext --inplace

clean:
	rm -rf build dist *.egg-info magneto/*.so $(VENV)
