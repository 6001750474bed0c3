# The two commands that a fresh clone needs: `make demo` and `make test`. Both set everything up.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export OMP_NUM_THREADS ?= 1

.PHONY: help demo test check unit exhaustive test-cluster test-torch test-processors docs site site-look bench clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/ -/'

$(VENV)/.base: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[tensorboard]'
	touch $@

$(VENV)/.test: $(VENV)/.base
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[test]'
	touch $@

$(VENV)/.benchmark: $(VENV)/.test
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[benchmark]'
	touch $@

demo: $(VENV)/.base  ## train a GPT on Python's own source with 2 processes, save it, sample from it, show its report
	$(BIN)/lockstep launch --nproc 2 examples/gpt/train.py --out runs/demo
	$(BIN)/python examples/gpt/sample.py runs/demo --prompt "def "
	$(BIN)/lockstep report runs/demo

test: $(VENV)/.test  ## everything that must hold: style, types, layers, tests, docs
	@$(BIN)/python -m tests.kernels
	$(MAKE) --no-print-directory --jobs 3 check docs unit

check: $(VENV)/.test  ## ruff, format, types, import layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

unit: $(VENV)/.test  ## the tests
	$(BIN)/python -m pytest --numprocesses 2 --dist worksteal --durations=15

exhaustive: $(VENV)/.test  ## the tests, with more examples, and with those that repeat on more ranks or in products of settings what others prove
	$(BIN)/python -m pytest -m "not cluster and not browser" --hypothesis-profile exhaustive --numprocesses 2 --dist worksteal

$(VENV)/.cluster: $(VENV)/.test
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[ray]'
	touch $@

test-cluster: $(VENV)/.cluster  ## the tests with a real Ray, Slurm, Open MPI and ssh server (root installs these; Debian)
	if [ "$$(id -u)" = 0 ] && command -v apt-get; then apt-get update -qq && \
	  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq slurm-wlm munge openmpi-bin openssh-server; fi
	$(BIN)/python -m pytest -m cluster -rs tests

test-processors: $(VENV)/.test  ## the tests of the numbers under each set of kernels that this processor can be brought to
	$(BIN)/python -m tests.kernels run

TORCH ?= 2.15.0
TORCH_VENV := .venv-torch-$(TORCH)
TORCH_TESTS := test_torch_changes.py torch_internals shared_memory parallel/test_parity.py parallel/zero/test_window.py parallel/zero/test_parity.py \
  parallel/zero/test_models.py parallel/zero/test_optimizers.py parallel/optimizers parallel/test_loops.py \
  parallel/test_split_parity.py parallel/pipeline parallel/tensor checkpoint/test_sharded_state.py \
  checkpoint/test_parameters.py checkpoint/test_rank_state.py data/test_plain_order.py train compat/deepspeed examples

$(TORCH_VENV)/.test: pyproject.toml
	$(PYTHON) -m venv $(TORCH_VENV)
	$(TORCH_VENV)/bin/python -m pip install --quiet --upgrade pip
	$(TORCH_VENV)/bin/python -m pip install --quiet torch==$(TORCH)
	$(TORCH_VENV)/bin/python -m pip install --quiet torch==$(TORCH) --editable '.[test,tensorboard]'
	touch $@

test-torch: $(TORCH_VENV)/.test  ## the tests of the numbers on another torch, in an environment of its own: make test-torch TORCH=2.15.0
	$(TORCH_VENV)/bin/python -m pytest --numprocesses 2 --dist worksteal --junitxml $(TORCH_VENV)/results.xml \
	  $(addprefix tests/,$(TORCH_TESTS))
	$(TORCH_VENV)/bin/python tests/torch_versions.py $(TORCH_VENV)/results.xml

docs: $(VENV)/.test  ## build the documentation; warnings are errors
	$(BIN)/python -m tests.site.publish

site-look: docs  ## look at every page of the built documentation in Chromium, which must be there: apt-get install chromium
	$(BIN)/python -m pytest -m browser tests/site

site: $(VENV)/.test  ## the documentation of this version beside that of others, in public/, ready for a web server
	$(BIN)/python -m tests.site.publish public

bench: $(VENV)/.benchmark  ## measure against bare torch, Accelerate, Lightning Fabric and DeepSpeed
	$(BIN)/python benchmarks/step_time.py
	$(BIN)/python benchmarks/zero_step_time.py
	$(BIN)/python benchmarks/strategies.py
	$(BIN)/python benchmarks/collectives.py
	$(BIN)/python benchmarks/offload.py
	$(BIN)/python benchmarks/restart_time.py
	$(BIN)/python benchmarks/checkpoints.py
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/compile_blocks.py
	$(BIN)/python benchmarks/defaults.py
	$(BIN)/python benchmarks/launch_time.py

clean:  ## remove the environment and everything that was built
	rm -rf $(VENV) .venv-torch-* build dist site public runs .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
