# `make help` lists the targets. Everything runs in .venv, unless a virtual environment is active or PYTHON= is given.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DEFAULT_GOAL := help
.PHONY: help install install-dev train-t2i train-i2t train-sft test test-slow style bench tiny-checkpoint

# conda's `base` is nearly always active and rarely meant: it does not count.
ACTIVE_ENVIRONMENT := $(VIRTUAL_ENV)$(if $(filter-out base,$(CONDA_DEFAULT_ENV)),$(CONDA_PREFIX))
PYTHON ?= $(if $(ACTIVE_ENVIRONMENT),python,.venv/bin/python)
RECIPE ?=
ACCELERATE ?=
NUM_PROCESSES ?=
ARGS ?=

export TOKENIZERS_PARALLELISM = false
# DeepSpeed is a source package: it compiles what a run needs at its start, not while it is installed.
export DS_BUILD_OPS = 0

help:  ## show this text
	@echo "usage: make TARGET [RECIPE=recipes/tiny/t2i.yaml] [ACCELERATE=zero3] [NUM_PROCESSES=8] [ARGS=\"--max_steps 10\"]"
	@echo
	@sed -n 's/^\([a-z0-9-]*\):.*## \(.*\)/  \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20
	@echo
	@echo "ACCELERATE names a file in accelerate_configs/: $(ACCELERATE_NAMES)"
	@echo "Default: cpu or single_gpu for one process, ddp for several. PYTHON= picks another interpreter."

ACCELERATE_NAMES = $(basename $(notdir $(wildcard accelerate_configs/*.yaml)))

# Exit status 0 when janus_trl and every requirement of it (and of the extra in argv[1]) is there in the right version.
define CHECK_INSTALLED
import sys
from importlib.metadata import requires, version
from packaging.requirements import Requirement
for line in requires("janus_trl"):
    requirement = Requirement(line)
    if requirement.marker is None or requirement.marker.evaluate({"extra": sys.argv[1]}):
        if version(requirement.name) not in requirement.specifier:
            sys.exit(1)
endef
export CHECK_INSTALLED

.venv/bin/python:
	python3 -m venv .venv || { rm -rf .venv; exit 1; }

install: $(filter .venv/bin/python,$(PYTHON))  ## install the package and what it needs (a second call does nothing)
	@$(PYTHON) -c "$$CHECK_INSTALLED" "" 2>/dev/null || $(PYTHON) -m pip install -e .

install-dev: $(filter .venv/bin/python,$(PYTHON))
	@$(PYTHON) -c "$$CHECK_INSTALLED" dev 2>/dev/null || $(PYTHON) -m pip install -e ".[dev]"

LAUNCH = $(if $(findstring /,$(PYTHON)),$(dir $(PYTHON)))accelerate launch

# $(1): script, $(2): default recipe. The input is checked in one plain process first: a mistake costs seconds and
# prints one message, not one traceback per GPU.
define TRAIN
recipe="$(or $(RECIPE),$(2))"; name="$(ACCELERATE)"; n="$(NUM_PROCESSES)"
gpus=$$($(PYTHON) -c "import torch; print(torch.cuda.device_count())")
if [ -z "$$name" ]; then
	if [ "$${n:-1}" != 1 ]; then name=ddp; elif [ "$$gpus" -gt 0 ]; then name=single_gpu; else name=cpu; fi
fi
if [ ! -f "accelerate_configs/$$name.yaml" ]; then
	echo "ACCELERATE=$$name: no accelerate_configs/$$name.yaml; choose one of: $(ACCELERATE_NAMES)" >&2; exit 2
fi
case "$$name" in
	cpu|single_gpu)
		if [ "$${n:-1}" != 1 ]; then
			echo "NUM_PROCESSES=$$n with ACCELERATE=$$name: it starts one process; use ACCELERATE=ddp, zero2 or zero3" >&2
			exit 2
		fi; n=1 ;;
	*) n="$${n:-$$([ "$$gpus" -gt 0 ] && echo "$$gpus" || echo 2)}" ;;
esac
# accelerate gives each of several CPU processes one thread: share the cores instead.
if [ "$$gpus" -eq 0 ] && [ -z "$${OMP_NUM_THREADS:-}" ]; then
	export OMP_NUM_THREADS=$$($(PYTHON) -c "import torch; print(max(1, torch.get_num_threads() // $$n))")
fi
$(PYTHON) -m janus_trl.scripts.$(1) --config "$$recipe" $(ARGS) --dry_run true --num_processes "$$n" --accelerate_config "$$name"
command=($(LAUNCH) --config_file "accelerate_configs/$$name.yaml" --num_processes "$$n" \
	-m janus_trl.scripts.$(1) --config "$$recipe" $(ARGS))
printf '%q ' "$${command[@]}"; echo
"$${command[@]}"
endef

train-t2i: install  ## train text-to-image with GRPO (default RECIPE=recipes/tiny/t2i.yaml)
	@$(call TRAIN,grpo,recipes/tiny/t2i.yaml)

train-i2t: install  ## train image-to-text with GRPO (default RECIPE=recipes/tiny/i2t.yaml)
	@$(call TRAIN,grpo,recipes/tiny/i2t.yaml)

train-sft: install  ## supervised fine-tuning, the cold start (default RECIPE=recipes/tiny/sft.yaml)
	@$(call TRAIN,sft,recipes/tiny/sft.yaml)

# Two workers with one thread each: tiny models gain nothing from a second thread.
test: install-dev  ## run the tests, except the slow ones
	OMP_NUM_THREADS=1 $(PYTHON) -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)

test-slow: install-dev  ## run the slow tests (several processes, longer training)
	OMP_NUM_THREADS=1 $(PYTHON) -m pytest -m slow $(ARGS)

style: install-dev  ## lint and format with ruff
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

bench: install  ## measure the rollout of the tiny model; ARGS="--size 1b" for a larger one
	$(PYTHON) benchmarks/rollout.py $(or $(ARGS),--size tiny)

tiny-checkpoint: install  ## make the checkpoint in janus_trl/tiny/checkpoint/ again
	$(PYTHON) -m janus_trl.tiny.make_checkpoint $(ARGS)
