# Two commands do everything: `make demo` and `make test`. Both make .venv if it is not there.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

export OMP_NUM_THREADS ?= 1
export HF_HUB_OFFLINE ?= 1
# Where it is set, every process that a test starts compiles anew what it imports.
export PYTHONDONTWRITEBYTECODE :=

# Processes that run tests. One for each core, up to four: more wait for each other's servers.
TEST_PROCESSES ?= $(shell n=$$(nproc 2>/dev/null || echo 2); echo $$((n < 4 ? n : 4)))

.PHONY: demo test test-slow test-transformers engines-venv test-engines test-engines-slow lint format types model bench docs clean help

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/'

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt 'torch==2.13.0'
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev,demo]'
	@touch $@

demo: $(STAMP) ## a real model's KV cache goes into a store (URL=... or a temporary folder) and back; then kvstore-bench io
	$(BIN)/python examples/demo.py $(if $(URL),--url '$(URL)')

model: $(STAMP) ## download and convert SmolLM2-135M-Instruct into .cache/models
	@$(BIN)/python -c "from kvstore.testing.models import smollm2_folder; print(smollm2_folder())"

test: model ## the whole suite, without what is marked slow
	$(BIN)/python -m pytest -m "not slow and not engines" -n $(TEST_PROCESSES) --dist loadscope --no-loadscope-reorder

test-slow: model ## what takes longer
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev,demo,slow]'
	$(BIN)/python -m pytest -m "slow and not engines"

test-transformers: $(STAMP) ## the transformers integration under the oldest version it supports
	$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps --target .cache/transformers-5.19 transformers==5.19.0
	PYTHONPATH=.cache/transformers-5.19 $(BIN)/python -m pytest tests/integration/test_transformers.py -m "not model"

ENGINES ?= lmcache vllm sglang

engines-venv: ## the environments of the engines (ENGINES="lmcache vllm sglang"), outside the checkout; gigabytes
	PYTHON=$(PYTHON) tests/engines/venvs.sh $(ENGINES)

test-engines: model engines-venv ## engines over our store: their own tools, and real text by a real model
	ENGINES_REQUIRED=1 $(BIN)/python -m pytest -m "engines and not slow" tests/engines

test-engines-slow: model engines-venv ## the longer ones of them
	ENGINES_REQUIRED=1 $(BIN)/python -m pytest -m "engines and slow" tests/engines

lint: $(STAMP) ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP) ## format and fix
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(STAMP) ## every figure of docs/figures.md that this machine can give
	$(BIN)/kvstore-bench io --json out/io.json --html out/io.html
	$(BIN)/python tests/bench/bench_keys.py --json out/keys.json
	$(BIN)/python tests/bench/bench_checksum.py --json out/checksum.json
	$(BIN)/python tests/bench/bench_codecs.py --json out/codecs.json
	$(BIN)/python tests/bench/import_time.py
	$(BIN)/python tests/bench/bench_scale.py --json out/scale.json
	for transport in tcp shm ucx; do $(BIN)/kvstore-bench io node://local --transport $$transport --sizes 16MiB --json out/node_$$transport.json || exit 1; done
	$(BIN)/kvstore-bench io node://local --transport tcp --sizes 16KiB --batch 1024 --json out/node_tcp_small.json
	$(BIN)/kvstore-bench compare mooncake --json out/mooncake.json
	$(BIN)/kvstore-bench blend --quick --json out/blend.json
	$(BIN)/python tests/bench/bench_daemon.py --json out/daemon.json
	$(BIN)/python tests/bench/bench_control.py --json out/control.json
	$(BIN)/python tests/bench/bench_telemetry.py --json out/telemetry.json
	@echo 'S3 (minutes): $(BIN)/python tests/bench/bench_s3.py --tls --json out/s3.json'
	@echo 'against LMCache (needs an environment with lmcache 0.5.6): $(BIN)/python tests/bench/bench_s3_lmcache.py --lmcache-python PATH --json out/s3_lmcache.json'

docs: $(STAMP) ## print the manual of options into docs/options.md
	$(BIN)/python -m kvstore.manual > docs/options.md

clean: ## remove everything that can be made again
	rm -rf $(VENV) .cache out .pytest_cache .mypy_cache .ruff_cache .hypothesis
