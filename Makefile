# Every target sets up .venv by itself; nothing else is needed than make and Python 3.11 or later.

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin
READY := $(VENV)/.ready
DOCS_READY := $(VENV)/.ready-docs

.DEFAULT_GOAL := help
.PHONY: help setup demo test soak test-tpu bench-tpu test-keras test-gpu test-busy test-versions test-docs docs docs-serve dist check format bench bench-compare clean

help:  ## Show the targets
	@sed -n 's/^\([a-z-]*\):[^#]*## /\1\t/p' Makefile | expand -t 15

setup: $(READY)  ## Make .venv with everything that the other targets need

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed; name it with make PYTHON=...")'
	@echo "setting up $(VENV): about a minute, once, and again when its requirements change"
	@$(PYTHON) -m venv --clear $(VENV)
	@$(RUN)/pip install -qq --constraint constraints.txt --editable '.[dev]'
	@touch $@

$(DOCS_READY): $(READY)
	@$(RUN)/pip install -qq --constraint constraints.txt --editable '.[docs]'
	@touch $@

demo: $(READY)  ## Train a network on one device and on 2 and 4 logical devices, side by side
	@$(RUN)/stratagem devices
	@$(RUN)/python examples/demo.py

# Three on two cores: many tests wait for other processes. JOBS=2 is gentler.
JOBS ?= 3
PYTEST := $(RUN)/pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder

test: $(READY)  ## Run all tests but those of `soak`
	@$(PYTEST)

soak: $(READY)  ## Run what repeats a promise over many parameters; SHARE=2/4 takes a part, MINUTES=5 stops early
	@$(PYTEST) --soak $(if $(SHARE),--soak-share $(SHARE)) $(if $(MINUTES),--soak-minutes $(MINUTES))
	@$(if $(SHARE)$(MINUTES),,$(RUN)/python -m tests.keras_own)

# torch_xla needs the torch of its own number, with its CUDA packages: 7 GB, and two minutes.
TPU_VENV := .venv-tpu
TPU_READY := $(TPU_VENV)/.ready
TPU_TORCH := 2.9.0
ON_XLA := PJRT_DEVICE=CPU CPU_NUM_DEVICES=4 TF_CPP_MIN_LOG_LEVEL=2

$(TPU_READY): pyproject.toml constraints.txt
	@echo "setting up $(TPU_VENV): 7 GB and a few minutes, once, and again when its requirements change"
	@$(PYTHON) -m venv --clear $(TPU_VENV)
	@grep -v '^torch==' constraints.txt > $(TPU_VENV)/constraints.txt
	@$(TPU_VENV)/bin/pip install -qq --constraint $(TPU_VENV)/constraints.txt torch==$(TPU_TORCH) torch_xla==$(TPU_TORCH) \
		cloudpickle cryptography numpy pyzmq rich safetensors typer keras pytest pytest-timeout hypothesis matplotlib
	@$(TPU_VENV)/bin/pip install -qq --no-deps --editable .  # which asks for a newer torch
	@touch $@

TPU_TESTS := tests/contracts/test_strategies.py tests/contracts/test_keras.py tests/contracts/test_estimator.py \
	tests/strategies/test_tpu.py tests/strategies/test_tpu_xla.py tests/test_import.py

test-tpu: $(TPU_READY)  ## Run what TPUStrategy promises on four devices of torch_xla, in an environment of its own
	@$(ON_XLA) $(TPU_VENV)/bin/python -m pytest -q -p no:xdist --timeout 180 $(TPU_TESTS)

bench-tpu: $(TPU_READY)  ## Measure TPUStrategy against torch_xla by hand; part of no other target
	@$(TPU_VENV)/bin/python -m benchmarks.tpu

test-keras: $(READY)  ## Run Keras' own tests plain and in a scope of two replicas, and compare; part of a whole `soak`
	@$(RUN)/python -m tests.keras_own

test-gpu: $(READY)  ## Run what needs a real accelerator; where there is none, say so and end with an error
	@$(RUN)/python -m tests.hardware

test-busy: $(READY)  ## Run all tests five times while two processes burn both cores; REPEAT=1 runs them once
	@$(RUN)/python -m tests.busy --repeat $(or $(REPEAT),5) -- $(PYTEST)

test-versions:  ## Run a choice of tests with the oldest and the newest Python and torch; downloads gigabytes, about 30 minutes
	@$(PYTHON) -m tests.versions $(if $(ONLY),--only $(ONLY)) $(if $(KEEP),--keep)

test-docs: $(READY)  ## Run the code of all documents and docstrings, and the notebooks: at most 6 minutes on two quiet cores
	@$(RUN)/pytest -n $(JOBS) --dist load --docs

docs: $(DOCS_READY)  ## Build the site in build/docs/html; a warning or a dead link is a failure
	@$(RUN)/python docs/make_site.py

docs-serve: $(DOCS_READY)  ## Build the site and show it at http://127.0.0.1:8000; PORT=9000 takes another port
	@$(RUN)/python docs/make_site.py --serve $(or $(PORT),8000)

dist: $(READY)  ## Build the wheel and the sdist in dist
	@$(RUN)/python -m build --no-isolation --outdir dist

check: $(READY)  ## What to run before a commit: format, lint, types, the fast tests
	@$(RUN)/ruff format --check .
	@$(RUN)/ruff check .
	@$(RUN)/mypy
	@$(PYTEST) -q -m 'not slow'

format: $(READY)  ## Format the code and mend what the linter can mend
	@$(RUN)/ruff format .
	@$(RUN)/ruff check --fix .

bench: $(READY)  ## Measure everything (40 minutes) and write the tables of README and docs
	@$(RUN)/python -m benchmarks

bench-compare: $(READY)  ## Say which of the ratios that were measured have fallen since the last version
	@$(RUN)/python -m benchmarks.history compare

clean:  ## Remove what the other targets made
	@rm -rf $(VENV) $(TPU_VENV) .mypy_cache .ruff_cache .hypothesis benchmarks/results build dist
