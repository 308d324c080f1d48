# Everything a person or a CI runs. `make` alone lists the targets.
# Nothing but make, a shell and Python 3.11 or 3.12 is needed; the rest goes into ./.venv on first use.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PEERS_VENV := .venv-peers
PEERS_STAMP := $(PEERS_VENV)/.installed

# Extra pip arguments for the torch download, where the default index offers a build you do not want
# (on Linux that is usually the CUDA one): make venv TORCH_INDEX_ARGS="--index-url <index of CPU wheels>".
TORCH_INDEX_ARGS ?=
# Passed on: make serve CONFIG=turnout.yaml, make test PYTEST_ARGS="tests/decoding -x", make bench BENCH_ARGS=--quick.
CONFIG ?=
PYTEST_ARGS ?=
TRAIN_ARGS ?=
SOAK_ARGS ?=
BENCH_ARGS ?=

.PHONY: help venv lint format test test-cluster test-exactness test-kvstore-chaos test-chaos test-launch venv-peers bench bench-load bench-long-context bench-ead bench-ead-ablation bench-speculation bench-codecs bench-hydragen bench-kvstore bench-scaling simulate-scaling bench-hop bench-cluster soak chaos demo serve train-demo train-heads train-kv-codecs proto clean

help: ## list the targets
	@awk -F':.*## ' '/^[a-z][a-z-]*:.*## / { printf "  %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

venv: $(STAMP) ## make or update .venv (done by the other targets when needed)

$(STAMP): pyproject.toml constraints.txt scripts/make_venv.sh
	@TORCH_INDEX_ARGS='$(TORCH_INDEX_ARGS)' scripts/make_venv.sh $(VENV)
	@touch $@

lint: venv ## style, types, layering, sizes, tests that can fail
	$(BIN)/ruff check --quiet .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/python scripts/check_size.py
	$(BIN)/python scripts/check_tests.py

format: venv ## let ruff rewrite what it can
	$(BIN)/ruff check --quiet --fix .
	$(BIN)/ruff format --quiet .

test: venv ## the default test suite (no GPU, no Redis server, no network)
	$(BIN)/pytest $(PYTEST_ARGS)

test-cluster: venv ## model actors and deployments that are killed, restarted, moved, scaled, on Ray clusters of their own
	$(BIN)/pytest -m "cluster and not exactness" --timeout 900 $(PYTEST_ARGS)

test-exactness: venv ## the output laws of speculation over 200,000 runs each, and every combination of its parts
	$(BIN)/pytest -m exactness --timeout 3600 $(PYTEST_ARGS)

test-kvstore-chaos: venv ## the shared prefix store while Redis is killed, stopped, spoiled and full, 20 workers (10 minutes)
	$(BIN)/pytest -m chaos --timeout 600 tests/kvstore/acceptance $(PYTEST_ARGS)

test-chaos: venv ## kill draft, target and replica once each under load, with one falsified answer to be caught (3 minutes)
	$(BIN)/pytest -m chaos --timeout 900 tests/chaos $(PYTEST_ARGS)

test-launch: venv ## `ray up` on this machine through processes, serve, add a node, `ray down` (5 minutes)
	$(BIN)/pytest -m launch --timeout 900 tests/launch $(PYTEST_ARGS)

venv-peers: $(PEERS_STAMP) ## make or update .venv-peers: engines that `make bench` measures beside ours

$(PEERS_STAMP): experiments/peers/requirements.txt scripts/make_peers_venv.sh | $(STAMP)
	@TORCH_INDEX_ARGS='$(TORCH_INDEX_ARGS)' scripts/make_peers_venv.sh $(PEERS_VENV)
	@touch $@

bench: venv ## measure speed beside other engines, and streaming through the server (BENCH_ARGS=--quick: briefly)
	$(BIN)/python -m experiments.bench_peers $(BENCH_ARGS)
	$(BIN)/python -m experiments.bench_decode $(BENCH_ARGS)
	$(BIN)/python -m experiments.bench_serve $(BENCH_ARGS)

bench-load: venv ## measure latency and goodput against offered load (demo models or CONFIG=<file>), and smoothness
	$(BIN)/python -m experiments.bench_load $(if $(CONFIG),--config $(CONFIG)) $(BENCH_ARGS)
	$(BIN)/python -m experiments.smoothness $(BENCH_ARGS)

bench-long-context: venv ## measure first token and memory against the prompt's length, up to 32k tokens
	$(BIN)/python -m experiments.long_context

bench-ead: venv ## measure entropy_adaptive on held-out arithmetic: accuracy, cost, time
	$(BIN)/python -m experiments.bench_ead

bench-ead-ablation: venv ## measure what window, minimum stay and effect of entropy_adaptive are worth
	$(BIN)/python -m experiments.ead_ablation $(BENCH_ARGS)

bench-speculation: venv ## compare every speculative method with plain decoding, hours (BENCH_ARGS="--quick --target demo")
	$(BIN)/turnout bench speculation $(BENCH_ARGS)

bench-codecs: venv ## measure the codecs of the shared prefix store: bytes, speed, what they do to answers (BENCH_ARGS=--quick: briefly)
	$(BIN)/python -m experiments.bench_codecs $(BENCH_ARGS)

bench-hydragen: venv ## measure decoding after a shared prefix, read once for all requests and apart
	$(BIN)/python -m experiments.bench_hydragen $(BENCH_ARGS)

bench-kvstore: venv ## measure the shared prefix store, access to Redis, codecs, shared-prefix attention, reuse of spans
	$(BIN)/python -m experiments.prefix_store.bench $(BENCH_ARGS)
	$(BIN)/python -m experiments.bench_redis_access $(BENCH_ARGS)
	$(BIN)/python -m experiments.bench_codecs $(BENCH_ARGS)
	$(BIN)/python -m experiments.bench_hydragen $(BENCH_ARGS)
	$(BIN)/python -m experiments.bench_reuse $(BENCH_ARGS)

bench-scaling: venv ## measure autoscaling under load steps and the choice of replicas (BENCH_ARGS=--quick: briefly)
	$(BIN)/python -m experiments.bench_scaling $(BENCH_ARGS)

simulate-scaling: venv ## simulate 1 to 4096 pools from measured costs, as docs/scaling.md says (BENCH_ARGS=--quick: briefly)
	$(BIN)/python -m experiments.scaling.simulate $(BENCH_ARGS)

bench-hop: venv ## measure hops between actors: tensors, one remote operation, bytes per token (BENCH_ARGS=--quick: briefly)
	$(BIN)/python -m experiments.bench_hop $(BENCH_ARGS)

bench-cluster: venv ## measure models in actors beside models in one process, and PEARL (BENCH_ARGS=--quick: briefly)
	$(BIN)/python -m experiments.bench_cluster $(BENCH_ARGS)

soak: venv ## load the demo models beyond their capacity for 20 minutes; memory, leaks, answers (SOAK_ARGS="--minutes 2")
	$(BIN)/python -m experiments.soak $(SOAK_ARGS)

chaos: venv ## kill every part of a cluster at random under load for 10 minutes; every answer is compared (CHAOS_ARGS="--minutes 2 --least 1")
	$(BIN)/python -m experiments.chaos.run $(CHAOS_ARGS)

demo: venv ## start everything on this machine, answer one prompt over gRPC, stop
	@$(BIN)/python -m cli.demo

serve: venv ## serve the demo models, or CONFIG=<file>, until Ctrl-C
	@$(BIN)/turnout serve $(CONFIG)

train-demo: venv ## train the demo model pair anew (hours on 2 cores; TRAIN_ARGS=--compiled with a C++ compiler)
	$(BIN)/python -m training.train_demo --model small $(TRAIN_ARGS)
	$(BIN)/python -m training.train_demo --model large $(TRAIN_ARGS)
	$(BIN)/python -m training.export_demo
	$(BIN)/python -m training.evaluate_demo
	$(BIN)/python -m training.model_card

train-heads: venv ## train the draft heads of the demo's large model anew (25 minutes on 2 cores)
	for kind in medusa redrafter kangaroo eesd; do \
		$(BIN)/turnout train $$kind --out .runs/heads/$$kind.safetensors; \
		install -D -m 644 -t turnout/demo/artifacts .runs/heads/$$kind.safetensors .runs/heads/$$kind.report.json; \
	done

train-kv-codecs: venv ## profile the demo pair for the codecs of the shared prefix store anew (a minute or two)
	$(BIN)/turnout train kv-codecs --out turnout/demo/artifacts

proto: venv ## regenerate the gRPC code from turnout/proto/generation.proto
	$(BIN)/python -m turnout.proto.generate

clean: ## delete caches and build outputs (.venv stays)
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -not -path './.*' -prune -exec rm -rf {} +
