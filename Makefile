# make setup [PYTHON=python3.12]   a virtual environment in .venv with everything below
# make demo [SEED=0]               a tiny model from nothing: SFT, GRPO, table and curves
# make test [WORKERS=2]            the daily tests; FAST=1 leaves out slow tests, ALL=1 adds nightly tests
# make faults                      the long campaigns: kills, faults of two processes, fuzzing, endurance
# make aot [ALL=1]                 compiles for TPUs that aren't there: installs libtpu (0.7 GB) and runs those tests
# make aot-gpu                     the same for H100s: XLA's plugin for CUDA (0.5 GB), in a folder of its own
# make check                       ruff and mypy
# make device                      on a TPU or GPU: the kernels' tests, and the head's times
# make docs                        writes docs/settings.md from the schema
# make bench                       the head beside full logits and other libraries' heads, on this machine

PYTHON ?= python3
SEED ?= 0
WORKERS ?= 2
BIN := .venv/bin
RUNS := runs/demo_seed$(SEED)

.PHONY: setup demo test faults aot aot-gpu check docs device bench

setup: .venv/installed

# An interpreter that is named, and is not the one that .venv was made with, makes it anew.
ifneq ($(origin PYTHON), file)
ifneq ($(shell $(PYTHON) -c 'import sys; print(sys.version)'), $(shell $(BIN)/python -c 'import sys; print(sys.version)' 2>&1))
.venv/installed: another-interpreter
endif
endif
.PHONY: another-interpreter
another-interpreter:

.venv/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "error: $(PYTHON) is older than Python 3.11; make setup PYTHON=python3.12 picks another"; exit 2; }
	$(PYTHON) -m venv --clear .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: setup
	$(BIN)/python train.py --config tiny_sft.yaml seed=$(SEED) run_dir=$(RUNS)/sft
	$(BIN)/python train.py --config tiny_grpo.yaml seed=$(SEED) run_dir=$(RUNS)/grpo model.source=$(RUNS)/sft
	$(BIN)/python tools/plot.py $(RUNS)/grpo

# Shapes and types are checked nightly, and wherever pytest is started by hand.
test: setup
	SHAPES=$(if $(ALL),1,0) $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder \
	  -m "not aot and not aot_gpu and not faults$(if $(ALL),, and not nightly)$(if $(FAST), and not slow)"

faults: setup
	$(BIN)/python -m pytest -m faults

aot: .venv/aot-installed
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist load -m "aot$(if $(ALL),, and not nightly and not slow)"

.venv/aot-installed: .venv/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[tpu]'
	@touch $@

aot-gpu: .venv/aot-gpu
	$(BIN)/python -m pytest -m aot_gpu

# Where JAX finds the plugin and no driver, every program complains: so not beside the other packages.
.venv/aot-gpu: .venv/installed
	rm -rf $@ $@.part
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --no-deps \
	  --target $@.part jax-cuda12-plugin jax-cuda12-pjrt
	mv $@.part $@
	@touch $@

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: setup
	$(BIN)/python tools/bench head

docs: setup
	$(BIN)/python tools/settings.py

# Where nothing was set up, as on a machine that has its own JAX, that machine's Python.
DEVICE = $(or $(wildcard $(BIN)/python),$(PYTHON))
device:
	JAX_PLATFORMS= $(DEVICE) -m pytest -v -m "gpu or tpu" tests/kernels/test_on_device.py
	$(DEVICE) tools/bench head --live 1
