# Every target works from a fresh clone with nothing but python3 >= 3.11; the second run needs no network.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
PYTEST := $(BIN)/python -m pytest --numprocesses auto --dist loadfile

.PHONY: demo test test-slow test-all lint docs clean

demo: .venv/ready
	$(BIN)/python -m recap.cli.demo

# The fast tests; `make test-all` runs every one.
test: lint
	$(PYTEST) -m 'not slow'

test-slow: .venv/ready-dev
	$(PYTEST) -m slow

test-all: test test-slow

lint: .venv/ready-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Without --quiet, under which mkdocs counts no warnings and --strict lets broken links pass.
docs: .venv/ready-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo 'Look at site/index.html'

clean:
	rm -rf .venv build dist demo site .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# What `recap` needs and no more: no test tools, no Ray, no diffusers.
.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "recap needs python3 >= 3.11, this is " + sys.version.split()[0])'
	$(PYTHON) -m venv .venv
	$(PIP) -e .
	@$(BIN)/recap weights raft-small >/dev/null 2>&1 || echo 'RAFT-small could not be fetched: flow is classical until it is; `.venv/bin/recap weights raft-small` tries again and says why.'
	touch $@

.venv/ready-dev: .venv/ready $(wildcard integrations/*/pyproject.toml)
	$(PIP) -e '.[dev]' -e integrations/vbench
	touch $@

.venv/ready-docs: .venv/ready
	$(PIP) -e '.[docs]'
	touch $@
