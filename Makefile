# Every target but test-oldest and test-gpu works from a fresh clone with nothing but python3 >= 3.11; the second run needs no network.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
# One more than there are cores, since many tests wait for other processes.
PYTEST = $(BIN)/python -m pytest --numprocesses $$(expr $$(getconf _NPROCESSORS_ONLN) + 1) --dist loadfile

# A Python 3.10, for `make test-oldest`: on the path or installed by pyenv.
OLDEST ?= $(shell for p in python3.10 $$HOME/.pyenv/versions/3.10*/bin/python; do $$p -c '' 2>/dev/null && echo $$p && break; done)
# The core and `attach`, as far as they need no extra.
OLDEST_TESTS := tests/test_plan.py tests/test_rollout.py tests/attention tests/memory/test_window.py tests/laws/test_bank.py \
  tests/io/test_video.py tests/io/test_weights.py tests/flow/test_classical.py \
  tests/contracts/test_policies.py tests/fast/test_backbone.py tests/backbones/wan/test_wan_model.py \
  $(addprefix tests/attach/test_,attach.py cache.py hooks.py two_threads.py upstream.py)

# What is tested on a GPU, where the sources are not a checkout: make test-gpu COMMIT=13348c0
COMMIT ?=

.PHONY: demo test test-slow test-all test-oldest test-gpu lint docs clean

demo: .venv/ready
	$(BIN)/python -m recap.cli.demo

# The fast tests; `make test-all` runs every one, and looks at style and types.
test: .venv/ready-dev
	$(PYTEST) -m 'not slow'

test-slow: .venv/ready-dev
	$(PYTEST) -m slow

test-all: lint test test-slow

# The oldest Python and torch that the package promises, in an environment of its own: 5 GB, as that torch brings CUDA.
test-oldest: .venv-oldest/ready
	.venv-oldest/bin/python -m pytest --numprocesses auto --dist loadfile -m 'not slow' -k 'not helios and not embedded' $(OLDEST_TESTS)

# What needs CUDA, by the Python that has torch and Triton there, with nothing installed; docs/log/gpu.txt is its log.
test-gpu:
	PYTHONPATH="$(CURDIR)/src:$(CURDIR):$$PYTHONPATH" $(PYTHON) -m tests.gpu --commit '$(COMMIT)'

lint: .venv/ready-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Without --quiet, under which mkdocs counts no warnings and --strict lets broken links pass.
docs: .venv/ready-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo 'Look at site/index.html'

clean:
	rm -rf .venv .venv-oldest build dist demo site .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# What `recap` needs and no more: no test tools, no Ray, no diffusers.
.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "make needs python3 >= 3.11 (the package itself 3.10), this is " + sys.version.split()[0])'
	$(PYTHON) -m venv .venv
	$(PIP) -e .
	@$(BIN)/recap weights raft-small >/dev/null 2>&1 || echo 'RAFT-small could not be fetched: flow is classical until it is; `.venv/bin/recap weights raft-small` tries again and says why.'
	touch $@

.venv/ready-dev: .venv/ready $(wildcard integrations/*/pyproject.toml)
	$(PIP) -e '.[dev]' -e integrations/vbench
	touch $@

.venv-oldest/ready: pyproject.toml constraints-oldest.txt
	@test -n '$(OLDEST)' || { echo 'no Python 3.10 was found: name one, as in make test-oldest OLDEST=/path/to/python3.10'; exit 1; }
	$(OLDEST) -m venv .venv-oldest
	.venv-oldest/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-oldest.txt -e . pytest pytest-xdist hypothesis
	touch $@

.venv/ready-docs: .venv/ready
	$(PIP) -e '.[docs]'
	touch $@
