# `make demo` and `make test` do all set-up themselves; they need make, a POSIX shell and a
# CPython 3.12 or newer somewhere on the machine (tools/find_python.sh looks for it).
#
#   PYTHON=...  the interpreter to make environments with, instead of the first usable one
#   CUDA=12|13  install JAX's CUDA plugin too (without it everything runs on the CPU)
#   ARGS=...    more arguments for the program that the target runs

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo test test-env lint types test-versions test-torch docs wheel soak bench clean
export PYTHON
unexport PYTHONHOME PYTHONPATH

VENV := .venv
OLDEST_JAX := 0.11.2
VENV_OLDEST := .venv-jax-$(OLDEST_JAX)
comma := ,
CUDA_EXTRA := $(if $(CUDA),$(comma)cuda$(CUDA))
# Two workers where there are two cores: a worker compiles and runs on several threads itself. Each
# begins with a half of the files, whose tests share compiled programs, and then takes of the other's.
WORKERS = $(shell test "$$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 1)" -ge 2 && printf '%s' '-n 2 --dist worksteal')

help: ## say what the targets are
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-14s %s\n", $$1, $$2 }' Makefile

demo: ## set up and run the demonstration
	@sh tools/setup_env.sh $(VENV) demo$(CUDA_EXTRA)
	@$(VENV)/bin/python -m msa_icp_jax demo $(ARGS)

test: lint types ## set up, then lint, check types and run the whole suite
	@echo "test: pytest on the newest jax allowed" >&2
	@$(VENV)/bin/python -m pytest $(WORKERS) $(ARGS)

lint: test-env ## ruff: rules and format
	@echo "lint: ruff" >&2
	@$(VENV)/bin/python -m ruff check --quiet .
	@$(VENV)/bin/python -m ruff format --quiet --check .

types: test-env ## mypy
	@echo "types: mypy" >&2
	@$(VENV)/bin/python -m mypy

test-versions: ## run the suite on the oldest jax supported, in an environment of its own
	@sh tools/setup_env.sh $(VENV_OLDEST) demo,test jax==$(OLDEST_JAX) jaxlib==$(OLDEST_JAX)
	@echo "test-versions: pytest on jax $(OLDEST_JAX)" >&2
	@$(VENV_OLDEST)/bin/python -m pytest $(WORKERS) $(ARGS)

test-torch: ## install torch too (gigabytes) and run its tests; `make test` then has them too
	@sh tools/setup_env.sh $(VENV) demo,test,torch$(CUDA_EXTRA)
	@echo "test-torch: pytest on torch" >&2
	@$(VENV)/bin/python -m pytest $(WORKERS) tests/test_torch_*.py $(ARGS)

docs: ## build the API reference into build/reference (with torch installed, of both packages)
	@sh tools/setup_env.sh $(VENV) docs
	@$(VENV)/bin/python tools/reference.py $(ARGS)

wheel: test-env ## build the wheel into dist
	@$(VENV)/bin/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .

soak: ## run 5,000 decode steps, each one checked (ARGS="--steps 100000" on a GPU)
	@sh tools/setup_env.sh $(VENV) demo$(CUDA_EXTRA)
	@$(VENV)/bin/python tools/soak.py $(ARGS)

bench: ## set up and time the work points (with CUDA: torch too; without a GPU: small ones)
	@sh tools/setup_env.sh $(VENV) demo,bench$(if $(CUDA),$(comma)torch)$(CUDA_EXTRA)
	@$(VENV)/bin/python -m benchmarks $(ARGS)

test-env:
	@sh tools/setup_env.sh $(VENV) demo,test$(CUDA_EXTRA)

clean: ## remove environments, caches and build output
	rm -rf .venv .venv-jax-* build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
