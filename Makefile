# The commands of the repository. Each works from a fresh clone: what it needs is set up first, in .venv next to this
# file; downloads are cached outside the clone (pip's and npm's caches, and ~/.cache/towline for tokenizers).

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory
.DEFAULT_GOAL := help

BIN := .venv/bin
READY := .venv/.ready
PYTEST_ARGS ?=
ARGS ?=
# Tests run in parallel; the tests of one file stay together, since they share what is slow to make, and the slowest files
# come first (tests/conftest.py). Many tests wait for processes: two workers per core, if there is memory for them. A worker
# that dies is not replaced: pytest-xdist would wait for its tests forever. PARALLEL=-n0 runs them one by one.
WORKERS := $(shell awk -v cores=$$(nproc) '/^MemAvailable/ {n = 2 * cores; m = int($$2 / 3e6); if (m < n) n = m; \
	if (n > 8) n = 8; print n < 1 ? 1 : n}' /proc/meminfo)
PARALLEL ?= -n $(WORKERS) --dist loadfile --no-loadscope-reorder --max-worker-restart=0
RUFF_PATHS := $(wildcard src tests bench examples)

.PHONY: help setup system test-system assets node pi harnesses demo test test-harnesses test-crashes test-faults test-security test-chaos vllm test-engines test-training test-trainers test-cluster test-ray test-images test-miniature lint format bench audit lock clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-15s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

setup: $(READY) ## Make .venv with everything that is pinned (PYTHON=…, TORCH_ARGS=… to choose)

# The stamp is written last, so an interrupted set-up is taken up again.
$(READY): pyproject.toml requirements/install.sh requirements/dev.txt requirements/torch.txt requirements/templates.txt
	@bash requirements/install.sh
	@touch $@

# Sandboxes; `newuidmap` gives an ordinary user's sandboxes more than one user id.
SANDBOXES := bwrap:bubblewrap newuidmap:uidmap
system: ## Install the system packages that sessions in sandboxes need, if they are missing
	@bash requirements/system.sh $(SANDBOXES)

test-system:
	@bash requirements/system.sh $(SANDBOXES) dockerd:docker.io busybox:busybox-static initdb:postgresql ip:iproute2

assets: setup ## Fetch the real tokenizers and chat templates that tests, demo and audit use
	@$(BIN)/python -m towline.assets fetch

demo: setup system ## Show one session and prove its record, then train a tiny model by GRPO (ARGS="--seed 2", "--control")
	$(BIN)/towline demo $(ARGS)

# Without scripts: an SDK's install step has no business here. The lock file names no registry.
NODE_READY := tests/e2e/node/node_modules/.package-lock.json
node: $(NODE_READY) ## Install the official TypeScript SDKs that tests run
$(NODE_READY): tests/e2e/node/package.json tests/e2e/node/package-lock.json | setup
	@PATH="$(CURDIR)/$(BIN):$$PATH" npm ci --prefix tests/e2e/node --ignore-scripts --no-audit --no-fund --loglevel=error
	@touch $@

# Two agent programs, one of npm and one of PyPI, are in every test run; the others have a target of their own.
pi: setup
	@$(BIN)/towline harness install pi hermes

harnesses: setup ## Install every agent program that Towline has a preset for (4 GB)
	$(BIN)/towline harness install all

test: assets node test-system pi ## Run all tests but those of the larger harnesses (PYTEST_ARGS="-k name" for some)
	$(BIN)/python -m pytest $(PARALLEL) $(PYTEST_ARGS)

test-harnesses: assets system harnesses ## Run the real Codex, Claude Code, Qwen Code, Gemini CLI, OpenCode, OpenClaw, Hermes, …
	$(BIN)/python -m pytest tests/e2e/harnesses $(PARALLEL) $(PYTEST_ARGS)

test-crashes: setup test-system ## Kill a server with real sandboxes at every named point and at random, on both databases
	$(BIN)/python -m pytest tests/server/test_server_crash.py --all-crashes --timeout 3000 -n0 $(PYTEST_ARGS)

# Mostly waiting: more workers than cores.
test-faults: setup system ## Fail the engine in ten ways under serve, eval and train: nothing that failed is scored
	$(BIN)/python -m pytest tests/faults -n 4 --max-worker-restart=0 $(PYTEST_ARGS)

# Each attack runs twice: with its guard, when it must gain nothing, and without, when it must succeed.
test-security: setup test-system ## Attack the service, its sandboxes and verifiers; the number of attacks and successes is printed
	$(BIN)/python -m pytest tests/security $(PARALLEL) $(PYTEST_ARGS)

# PYTEST_ARGS="--seed N --sessions N --faults a,b --seconds S -k sqlite" replays or shortens a storm. Ray's nodes need root.
test-chaos: setup test-system ## Kill, stop, fill and cut everything at random under 1,000 sessions, and count what was lost
	@bash requirements/ray.sh
	$(BIN)/python -m pytest tests/e2e/chaos -n0 $(PYTEST_ARGS)

test-training: setup system ## Train the tiny model for some minutes: it learns, and with shuffled rewards it does not
	$(BIN)/python -m pytest tests/e2e/training $(PYTEST_ARGS)

# Each in an environment of its own, .venv-NAME: see requirements/trainers.sh.
test-trainers: setup system ## Run the adapters' tests with the real frameworks and routers, and print a table of what ran
	@bash requirements/trainers.sh trl verl nemo-gym verifiers routers
	$(BIN)/python tests/adapters/run.py -- $(PYTEST_ARGS)

# A Slurm of four nodes in namespaces of this machine; it needs root, as its nodes do.
test-cluster: setup test-system ## Run 50 sessions in a real Slurm job of an ordinary user; validate the Kubernetes manifests
	@bash requirements/system.sh slurmctld:slurm-wlm sbatch:slurm-client munged:munge
	@bash requirements/cluster.sh
	@bash requirements/ray.sh
	$(BIN)/python -m pytest tests/e2e/cluster --ignore tests/e2e/cluster/test_ray.py $(PYTEST_ARGS)

# Four nodes in namespaces of this machine, without a way out; it needs root, as they do.
test-ray: setup system ## Run sessions on a real Ray of four nodes; kill a node and the server, cut and heal a link
	@bash requirements/ray.sh
	$(BIN)/python -m pytest tests/e2e/cluster/test_ray.py -s $(PYTEST_ARGS)

test-images: setup test-system ## Pull images from a real registry and build Dockerfiles with buildah, as root and rootless
	@bash requirements/system.sh buildah:buildah docker-registry:docker-registry
	$(BIN)/python -m pytest tests/e2e/images $(PYTEST_ARGS)

# Its image is made of this machine's own packages; no registry is needed.
test-miniature: setup test-system ## Run the miniature SWE suite on a real dockerd: oracle 12/12, nothing 0/12, edited tests 0/12
	@bash requirements/system.sh node:nodejs cc:gcc git:git mawk:mawk
	$(BIN)/python -m pytest tests/e2e/miniature $(PYTEST_ARGS)

vllm: setup
	@bash requirements/vllm.sh

test-engines: assets system vllm pi ## Run the real vLLM for CPUs (3.5 GB): exactness, harnesses, weight updates, a dead replica
	@$(BIN)/towline harness install codex
	TOWLINE_VLLM="$$(bash requirements/vllm.sh path)" $(BIN)/python -m pytest tests/e2e/engines $(PYTEST_ARGS)

lint: setup ## Check style, formatting and types
	$(BIN)/ruff check $(RUFF_PATHS)
	$(BIN)/ruff format --check $(RUFF_PATHS)
	$(BIN)/mypy

format: setup ## Rewrite the code in the house style
	$(BIN)/ruff check --fix $(RUFF_PATHS)
	$(BIN)/ruff format $(RUFF_PATHS)

bench: assets test-system ## Measure what the README's figures come from
	$(BIN)/python bench/run.py

audit: assets ## Prove token fidelity over real tokenizers and templates; rows and model go to runs/audit
	$(BIN)/towline audit fidelity --json --out runs/audit

LOCK := $(BIN)/uv pip compile --quiet --upgrade --universal --python-version 3.11 --generate-hashes --no-emit-index-url \
	--custom-compile-command "make lock"

# Not after `setup`, which fails when a dependency is not locked yet: any environment will do.
lock: ## Rewrite the hashed requirement files with the newest allowed versions
	@test -x $(BIN)/python || bash requirements/install.sh
	$(BIN)/python -m pip install --quiet uv==0.13.7
	$(LOCK) pyproject.toml requirements/dev.in --extra assets --extra math --extra postgres --extra llamacpp -o requirements/dev.txt
	$(LOCK) pyproject.toml -c requirements/dev.txt -o requirements/base.txt
	$(LOCK) --no-deps requirements/templates.in -o requirements/templates.txt
	$(LOCK) requirements/cluster.in -o requirements/cluster.txt
	$(LOCK) requirements/ray.in -c requirements/dev.txt -o requirements/ray.txt

clean: ## Remove .venv, caches and build output; runs/ and the download caches stay
	rm -rf .venv .venv-* build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
