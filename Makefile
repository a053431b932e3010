# Every target works from a fresh clone with nothing but python3 >= 3.11; the second run needs no network.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/ready

.PHONY: demo test lint clean

demo: $(READY)
	$(BIN)/python -m recap.cli.demo

test: $(READY) lint
	$(BIN)/python -m pytest --numprocesses auto --dist loadfile

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf .venv build dist demo .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "recap needs python3 >= 3.11, this is " + sys.version.split()[0])'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@$(BIN)/recap weights raft-small >/dev/null 2>&1 || echo 'RAFT-small could not be fetched: flow is classical until it is; `.venv/bin/recap weights raft-small` tries again and says why.'
	touch $(READY)
