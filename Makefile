# Each verb is a thin call of `tandem` or of one tool; CI calls the same verbs.
# Settings: PYTHON (which Python makes .venv), TORCH_INDEX_URL (where torch's CPU wheel comes from),
# PROMETHEUS_PORT, CONFIG, ARGS.

BIN := .venv/bin
ARGS ?=
# Of `up`, `demo` and `doctor`: another lab than the default one.
CONFIG ?=
WITH_CONFIG := $(if $(CONFIG),--config $(CONFIG))
PROMETHEUS_PORT ?= 9090
# Where deploy/test_tools.sh unpacks what is not installed.
TOOLS := $(CURDIR)/.tandem/tools/usr/bin

.DEFAULT_GOAL := help
.PHONY: help demo test test-unit check up down status bench report dashboards prometheus bench-client bench-recording bench-scheduler bench-idle bench-gateway bench-overhead validate-simulate study-policies study-adaptive crosscheck doctor install clean

help: ## List the verbs
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-17s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: install ## The whole job: environment, model, lab, load, table and report, everything down again
	@$(BIN)/tandem demo $(WITH_CONFIG) $(ARGS)

test: install ## Set up whatever is missing and run all tests but the slow ones
	@$(BIN)/tandem prepare
	@deploy/test_tools.sh
	PATH="$(TOOLS):$$PATH" $(BIN)/python -m pytest -m "not slow" $(ARGS)

test-unit: install ## Unit and property tests only: seconds, no model, no Ray
	$(BIN)/python -m pytest tests/unit tests/property $(ARGS)

check: install ## Format, lint, types, import rules
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports

up: install ## Start the lab and return when it is ready; CONFIG=FILE
	@$(BIN)/tandem up --detach $(WITH_CONFIG) $(ARGS)

down: install ## Stop the lab
	@$(BIN)/tandem down $(ARGS)

status: install ## Show lanes and replicas
	@$(BIN)/tandem status $(ARGS)

bench: install ## Measure the running lab; ARGS="--concurrency 1,4"
	@$(BIN)/tandem bench $(ARGS)

report: install ## Write the report of a run again; ARGS="runs/<time>-<name>"
	@$(BIN)/tandem report $(ARGS)

bench-client: install ## How many streams the load client holds on this machine; ARGS="--streams 500"
	@$(BIN)/python -m loadtest.proof.hold_streams $(ARGS)

dashboards: install ## Write the dashboards' JSON and the table of metrics again, and test Prometheus' rules
	$(BIN)/python -m dashboards.build
	$(BIN)/python -m serving.metrics.table
	@deploy/test_tools.sh
	PATH="$(TOOLS):$$PATH" promtool test rules dashboards/prometheus/tests/*.yml

prometheus: ## Run Prometheus for the lab on 127.0.0.1:8000, on 127.0.0.1:9090, until Ctrl-C; PROMETHEUS_PORT=9091
	@deploy/test_tools.sh
	PATH="$(TOOLS):$$PATH" prometheus --config.file=dashboards/prometheus/prometheus.yml \
	  --storage.tsdb.path=.tandem/prometheus --web.listen-address=127.0.0.1:$(PROMETHEUS_PORT) $(ARGS)

bench-recording: install ## What recording engine steps costs on the running lab; ARGS="--pairs 100"
	@$(BIN)/python -m loadtest.proof.recording_cost $(ARGS)

bench-scheduler: install ## How fast the scheduler decides: pure code and running service; ARGS="--limit-s 1"
	@$(BIN)/python -m serving.benchmarks.scheduler $(ARGS)

bench-idle: install ## What the running lab takes of the processors while nobody uses it; ARGS="--seconds 30"
	@$(BIN)/python -m serving.benchmarks.idle $(ARGS)

bench-gateway: install ## Measure our gateway and others in front of the same simulated engines; ARGS="--levels 1,256 --repeats 1"
	@deploy/benchgateway/install.sh
	@$(BIN)/python -m serving.benchmarks.gateway $(ARGS)

bench-overhead: install ## What the gateway costs on top of a real engine; ARGS="--bare-url URL --url URL --levels 1,64,128"
	@$(BIN)/tandem prepare
	@$(BIN)/python -m serving.benchmarks.overhead $(ARGS)

validate-simulate: install ## How far `tandem simulate` is off on the running lab: calibrate, measure, simulate that; 15 minutes; ARGS="--lanes batched"
	@$(BIN)/python -m loadtest.simulate.validate $(ARGS)

study-policies: install ## Compare the order policies in simulated time; ARGS="--seed 2"
	@$(BIN)/python -m serving.simulation.study_policies $(ARGS)

study-adaptive: install ## Compare decoding that adapts under a load that rises and falls, 35 min; SIMULATED=1: in virtual time
	@$(if $(SIMULATED),$(BIN)/python -m loadtest.study.in_virtual_time,$(BIN)/tandem prepare && deploy/study_adaptive.sh) $(ARGS)

crosscheck: install ## Measure one simulated engine with this and three other load tools, next to the truth; ARGS="--seed 2"
	@deploy/crosscheck/install.sh
	@$(BIN)/tandem prepare
	@$(BIN)/python -m loadtest.crosscheck $(ARGS)

doctor: install ## Say what this machine lacks, and what to do about it
	@$(BIN)/tandem doctor $(WITH_CONFIG) $(ARGS)

install: ## Make .venv from the lock; takes no time when that is done
	@deploy/install.sh

clean: ## Remove .venv, caches and the installation log; runs/ stays
	rm -rf .venv .tandem .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find serving loadtest dashboards tests -name __pycache__ -type d -prune -exec rm -rf {} +
