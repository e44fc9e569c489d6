# Each target sets up what is missing first (./setup.sh; seconds when nothing is). Debian 12 or Ubuntu 24.04, as root.
#
#   make demo [STORE=gs]   the main job, shown: checkpoint, push, mount, restore while it loads, one table
#   make demo-containerd   pods of a real containerd: saved at their own word (STORE=gs, or file), restored, one starts cold
#   make test [ARGS=...]   all tests; ARGS go to pytest
#   make stress            chaos and kill matrices, long
#   make lint              format, lint, rooms, types
#   make bench             benchmarks; JSON in bench/results/
#   make lock              requirements/*.txt anew from pyproject.toml
#   make clean             remove what setup and the tools made, .venv and .tools too

SHELL := /bin/sh
PYTHON_RUN := .venv/bin/python
STORE ?=
ARGS ?=
export RUNSC

.DEFAULT_GOAL := help
.PHONY: help setup demo demo-containerd test stress lint bench lock clean

help:
	@sed -n 's/^#   //p' Makefile

setup:
	@./setup.sh

demo: setup
	@RUNSC="$$(readlink -f .tools/runsc)" exec $(PYTHON_RUN) -m bench.demo --store $(or $(STORE),file)

demo-containerd:
	@./setup.sh test
	@RUNSC="$$(readlink -f .tools/runsc)" exec $(PYTHON_RUN) -m bench.containerd_demo --store $(or $(STORE),gs)

test:
	@./setup.sh test
	RUNSC="$$(readlink -f .tools/runsc)" $(PYTHON_RUN) -m pytest $(ARGS)

stress: setup
	RUNSC="$$(readlink -f .tools/runsc)" STREAMD_STRESS=full $(PYTHON_RUN) -m pytest tests/stress tests/e2e/test_takeover_runsc.py $(ARGS)

lint: setup
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/lint-imports
	.venv/bin/mypy

bench:
	@./setup.sh bench
	RUNSC="$$(readlink -f .tools/runsc)" $(PYTHON_RUN) -m bench $(ARGS)

LOCK := .tools/lock-venv/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header --no-annotate
lock: setup
	$(PYTHON_RUN) -m venv .tools/lock-venv
	.tools/lock-venv/bin/python -m pip install --quiet --upgrade uv
	$(LOCK) --group build --output-file requirements/build.txt
	$(LOCK) pyproject.toml --output-file requirements/run.txt
	$(LOCK) pyproject.toml --group dev --output-file requirements/dev.txt

clean:
	rm -rf .venv .tools build *.egg-info .coverage .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
