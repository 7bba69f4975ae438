# `make demo` and `make test` are all that a newcomer needs; everything lives in $(VENV).

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# An extra package index to take torch from (a CPU, CUDA or ROCm build); see the README.
TORCH_INDEX ?=
# Flags that pip and uv both take, such as --no-index or --find-links.
PIP_FLAGS ?=

INSTALLED := $(VENV)/.installed
.PHONY: install demo pictures check lint types layers structure test test-slow test-nightly test-faults test-slurm test-exports slurm-packages browser-packages provider-packages openapi reference test-gpu gpu-wheels gpu-check bench-enumerate bench-plan bench-estimates bench-tables bench-logs bench-memory bench-trainer bench-search bench-intervals bench-stopping bench-packing bench-busy bench-commands bench-workers bench-service bench-programs bench-revisions bench-dashboard bench-simulated bench-gpu bench-simulator frontier-study clean

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt tools/install.py | $(BIN)/pip
	$(BIN)/python tools/install.py $(if $(TORCH_INDEX),--torch-index $(TORCH_INDEX)) $(PIP_FLAGS)
	@touch $@

# Debian's python3 comes without ensurepip, which a virtual environment needs: root gets it
# installed, with a message; for any other user a message names the package.
$(BIN)/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "layout-tuner needs Python 3.11 or newer; say which: make PYTHON=python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || { \
	  if [ "$$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then \
	    echo "$(PYTHON) cannot create virtual environments; on Debian: sudo apt-get install python3-venv" >&2; \
	    exit 1; \
	  fi; \
	  echo "installing python3-venv, which Debian's python3 comes without"; \
	  apt-get update -qq && apt-get install -y -qq --no-install-recommends python3-venv >/dev/null; }
	$(PYTHON) -m venv --clear $(VENV)

demo: $(INSTALLED)
	@$(BIN)/python examples/demo.py

# Pictures of the pages for the docs, of a real campaign on this machine.
pictures: $(INSTALLED) browser-packages
	@$(BIN)/python examples/pictures.py

check: lint types layers structure

lint: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(INSTALLED)
	$(BIN)/mypy

layers: $(INSTALLED)
	$(BIN)/lint-imports

# Sizes of folders and modules, names of classes, subjects of commits.
structure: $(INSTALLED)
	$(BIN)/python -m tests.structure

# Tests at a time, each file's in their order; TEST_JOBS=0 runs one at a time. The fast suite waits
# for a third of its time: three fill two cores. Of the tests that start ranks (marker `ranks`), but
# for the trainer's, one runs at a time: see tests/conftest.py.
side_by_side = -n $(or $(TEST_JOBS),$1) --dist loadfile
ELSEWHERE := not gpu and not slurm and not exports

test: check browser-packages
	$(BIN)/pytest $(call side_by_side,3) -m "not slow and not nightly and $(ELSEWHERE)"

test-slow: $(INSTALLED) browser-packages provider-packages
	$(BIN)/pytest $(call side_by_side,2) -m "slow and not nightly and $(ELSEWHERE)"

# Long storms and fuzzing runs, of which the slow or the fast suite has shorter ones.
test-nightly: $(INSTALLED)
	$(BIN)/pytest $(call side_by_side,2) -m "nightly and $(ELSEWHERE)"

# Seeded faults, one run of the fast suite each: hours. An interrupted run goes on from its report.
FAULTS_REPORT ?= build/seeded-faults.json

test-faults: $(INSTALLED)
	@mkdir -p $(dir $(FAULTS_REPORT))
	$(BIN)/python -m tests.seeded_faults.run --report $(FAULTS_REPORT)

# Debian's Chromium, for the tests of the pages; where it can't be installed they are skipped and
# say why.
browser-packages:
	@if command -v chromium >/dev/null; then exit 0; fi; \
	if [ "$$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then \
	  echo "Chromium is not installed and only root can install it, on Debian with apt-get install chromium: tests of the pages will be skipped"; \
	  exit 0; \
	fi; \
	echo "installing Debian's Chromium"; \
	{ apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium >/dev/null; } \
	  || echo "Debian's Chromium could not be installed: tests of the pages will be skipped"

# The OpenID Connect provider of the tests of signing in, as its lock file has it; where it can't be
# installed they are skipped and say why.
provider-packages:
	@if ! command -v npm >/dev/null; then \
	  echo "npm is not installed, on Debian apt-get install npm: tests of signing in with a provider will be skipped"; \
	  exit 0; \
	fi; \
	cd tests/api/sign_in/provider && { test -d node_modules || npm ci --silent --no-audit --no-fund >/dev/null; } \
	  || echo "oidc-provider could not be installed: tests of signing in with a provider will be skipped"

# Slurm's daemons from Debian's packages, on loopback; where they can't be installed the tests are
# skipped and say why. Installing must not start the system's own daemons: policy-rc.d says no meanwhile.
SLURM_PACKAGES := slurmctld slurmd slurm-client munge

slurm-packages:
	@missing=; for program in munged slurmctld slurmd sbatch; do \
	  PATH="$$PATH:/usr/sbin" command -v $$program >/dev/null || missing="$$missing $$program"; \
	done; \
	if [ -z "$$missing" ]; then exit 0; fi; \
	if [ "$$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then \
	  echo "Slurm is not installed and only root can install it, on Debian with apt-get install $(SLURM_PACKAGES): its tests will be skipped"; \
	  exit 0; \
	fi; \
	echo "installing Debian's Slurm: $(SLURM_PACKAGES)"; \
	policy=/usr/sbin/policy-rc.d; mine=; \
	if [ ! -e $$policy ]; then mine=1; printf '#!/bin/sh\nexit 101\n' > $$policy; chmod 755 $$policy; fi; \
	{ apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $(SLURM_PACKAGES) >/dev/null; } \
	  || echo "Debian's Slurm could not be installed: its tests will be skipped"; \
	if [ -n "$$mine" ]; then rm -f $$policy; fi

test-slurm: $(INSTALLED) slurm-packages
	$(BIN)/pytest $(call side_by_side,2) -m "slurm and not nightly"

# Files that were exported for other trainers, read by the trainers' own parsers. Each trainer is
# installed in build/trainers, once, and changes nothing in $(VENV). A test is the unit here: its
# cases are as many trainers.
test-exports: $(INSTALLED)
	TORCHTITAN_MAIN=$(TORCHTITAN_MAIN) $(BIN)/pytest -n $(or $(TEST_JOBS),2) --dist worksteal -m exports tests/exports

# The description of the HTTP API as it is checked in; a test compares it.
openapi: $(INSTALLED)
	$(BIN)/python -m layout_tuner.api.openapi_document > docs/openapi.json.new
	mv docs/openapi.json.new docs/openapi.json

# The reference of the command line as it is checked in; a test compares it.
reference: $(INSTALLED)
	$(BIN)/python -m tools.commands_reference > docs/reference/commands.md.new
	mv docs/reference/commands.md.new docs/reference/commands.md

test-gpu: $(INSTALLED)
	$(BIN)/pytest -m "gpu and not nightly"

# The wheels of `make gpu-check`, to be copied to a machine with a GPU and no network.
gpu-wheels: $(INSTALLED)
	$(BIN)/python -m tools.gpu_wheels

# Where a GPU is, within eight minutes and without a network: PYTHON has torch, numpy and scipy, the
# rest is in build/gpu-wheels. ARGS="--device cpu" tries it anywhere.
GPU_VENV := build/gpu-venv

gpu-check:
	$(PYTHON) tools/gpu_wheels.py --install $(GPU_VENV)
	$(GPU_VENV)/bin/python -m tools.gpu_check $(ARGS)

bench-enumerate: $(INSTALLED)
	$(BIN)/python -m benchmarks.bench_enumerate

bench-plan: $(INSTALLED)
	$(BIN)/python -m benchmarks.bench_plan

# TABLE: peaks by rank, as of the run of 175B on Frontier.
bench-memory: $(INSTALLED)
	$(BIN)/python -m benchmarks.bench_memory --table $(TABLE)

# TABLES: a folder with a table of FSDP runs, to judge the step time by.
bench-estimates: $(INSTALLED)
	$(BIN)/python -m benchmarks.bench_estimates $(if $(TABLES),--tables $(TABLES)) --record

# TABLES: as of bench-search. BEFORE: figures of another commit, kept by `--save`.
bench-tables: $(INSTALLED)
	$(BIN)/python -m benchmarks.bench_tables --tables $(TABLES) $(if $(BEFORE),--before $(BEFORE)) --record

bench-logs: $(INSTALLED)
	$(BIN)/python -m benchmarks.tables.one_log --tables $(TABLES) --record

bench-trainer: $(INSTALLED)
	$(BIN)/python -m benchmarks.bench_trainer --record
	$(BIN)/python -m benchmarks.trainer.mixture_layer --record

# TABLES: a folder of measurement tables (docs/reference/measurement-tables.md).
bench-search: $(INSTALLED)
	$(BIN)/python -m benchmarks.bench_search $(if $(TABLES),--tables $(TABLES)) $(if $(ONLY),--only $(ONLY)) --record

# TABLES: as of bench-search; without it only what needs no table is judged.
bench-simulator: $(INSTALLED)
	$(BIN)/python -m benchmarks.bench_simulator $(if $(TABLES),--tables $(TABLES)) --record

bench-intervals: $(INSTALLED)
	$(BIN)/python -m benchmarks.bench_intervals --record

bench-stopping: $(INSTALLED)
	$(BIN)/python -m benchmarks.bench_stopping $(if $(TABLES),--tables $(TABLES)) --record

bench-packing: $(INSTALLED)
	$(BIN)/python -m benchmarks.bench_packing --record

# Half an hour, with nothing else on the machine.
bench-busy: $(INSTALLED)
	$(BIN)/python -m benchmarks.bench_busy --record

# Ten minutes, with nothing else on the machine.
bench-workers: $(INSTALLED)
	$(BIN)/python -m benchmarks.bench_workers --record
	$(BIN)/python -m benchmarks.bench_packing --record

# Half a minute, with nothing else on the machine.
bench-commands: $(INSTALLED)
	$(BIN)/python -m benchmarks.bench_commands --record

# Two minutes, with nothing else on the machine.
bench-programs: $(INSTALLED)
	$(BIN)/python -m benchmarks.bench_programs --record

# The service on SQLite and on a PostgreSQL of its own, with nothing else on the machine.
bench-service: $(INSTALLED)
	$(BIN)/python -m benchmarks.bench_service --record

# Pages in Debian's Chromium, with nothing else on the machine.
bench-dashboard: $(INSTALLED) browser-packages
	$(BIN)/python -m benchmarks.bench_dashboard --record

# Ten minutes, with nothing else on the machine.
bench-simulated: $(INSTALLED)
	$(BIN)/python -m benchmarks.bench_simulated --record

# BASE: the bin folder of an environment with another revision.
bench-revisions: $(INSTALLED)
	$(BIN)/python -m benchmarks.bench_revisions --base $(BASE)

# Where a GPU is; PYTHON's torch must see it, and torch and numpy are all that it needs.
bench-gpu:
	$(PYTHON) -m benchmarks.bench_gpu --record

# docs/frontier-study.md and its figures: an hour, ten minutes with QUICK=1, and what was interrupted
# goes on. TABLES: a folder of published measurements; ONLY: some parts of it.
frontier-study: $(INSTALLED)
	$(BIN)/python -m benchmarks.frontier_study.study $(if $(TABLES),--tables $(TABLES)) $(if $(QUICK),--quick) $(if $(ONLY),--only $(ONLY))

clean:
	rm -rf $(VENV) demo-data .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
