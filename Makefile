# One command for each job. `make` alone lists them. Everything is installed into .venv (and .venv-zarr) beside this
# file; the stamps in there make a second run install nothing.

.DEFAULT_GOAL := help
SHELL := /bin/sh

# The first of these that is Python 3.11 or newer makes .venv; `make setup PYTHONS=/path/to/python` chooses another.
PYTHONS ?= python3.11 python3.12 python3.13 python3
# Interpreters new enough for the newest zarr; pyenv keeps its own outside PATH.
ZARR_PYTHONS ?= python3.13 python3.12 $(wildcard $(HOME)/.pyenv/versions/3.13.*/bin/python3 $(HOME)/.pyenv/versions/3.12.*/bin/python3)
# What a storage node needs to read packs, and the tools that run tests/compat there: no torch on purpose.
ZARR_REQUIREMENTS := 'numpy>=2.0' 'zarr>=3.4' 'numcodecs>=0.16.6,!=0.17.0' google-crc32c crc32c isal 'msgspec>=0.19' 'numba>=0.61' zstandard pytest==9.2.0 pytest-timeout==2.4.0

BIN := .venv/bin
INSTALLED := .venv/.installed
ZARR_BIN := .venv-zarr/bin
ZARR_INSTALLED := .venv-zarr/.installed
PIP := -m pip --disable-pip-version-check
# Processes that run tests side by side: most tests wait for a disk, a child or a server now and then.
WORKERS ?= 2
# Extra arguments: make test ARGS="-k tree", make demo ARGS="--help".
ARGS ?=

.PHONY: help setup demo hdfs test test-hdfs-all lint format bench bench-quality soak golden clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' Makefile

setup: $(INSTALLED) ## make .venv and install deltastore with its tools into it (once)

demo: setup ## the main job: train, kill, resume, read one old step
	$(BIN)/deltastore demo $(ARGS)

test: setup ## all tests but the soak ones, then the golden packs with the newest zarr
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadscope --no-loadscope-reorder $(ARGS)
	@$(MAKE) --no-print-directory golden

hdfs: setup ## start an HDFS to play with and print the command that opens a store on it (Java 17 and Maven)
	$(BIN)/python -m tests.hdfs.cluster runs/hdfs $(ARGS)

test-hdfs-all: setup ## the tests on HDFS once for each of three versions of Hadoop
	@set -e; for version in 3.5.0 3.4.3 3.3.6; do \
	  echo "test-hdfs-all: Hadoop $$version"; DELTASTORE_HADOOP=$$version $(BIN)/python -m pytest tests/hdfs -m '' $(ARGS); \
	done

lint: setup ## ruff, mypy and the import rule
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup ## rewrite the sources as ruff wants them
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup ## measure against safetensors, torch.save and others (minutes; see tests/README.md)
	$(BIN)/python -m tests.bench $(ARGS)

bench-quality: setup ## what bounded commits are worth: trainings, chains, kills (an hour)
	$(BIN)/python -m tests.bench.quality $(ARGS)

soak: setup ## the long runs: crash loops, retention, nightly property tests (hours)
	HYPOTHESIS_PROFILE=$${HYPOTHESIS_PROFILE:-nightly} $(BIN)/python -m pytest -m soak $(ARGS)

# Tests of tests/compat may use numpy, zarr, numcodecs, crc32c, isal, msgspec, zstandard and deltastore without torch. The conftest
# above them is cut off: its tools are not installed there.
golden: ## read the golden packs with Python 3.12+, zarr 3.4+ and no torch
	@set -e; \
	if [ ! -e $(ZARR_INSTALLED) ] || [ Makefile -nt $(ZARR_INSTALLED) ]; then \
	  found=; \
	  for candidate in $(ZARR_PYTHONS); do \
	    if "$$candidate" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1; then \
	      found="$$candidate"; break; \
	    fi; \
	  done; \
	  if [ -z "$$found" ]; then \
	    echo "golden: skipped, no Python 3.12 or newer here (zarr 3.4 needs one)"; exit 0; \
	  fi; \
	  echo "golden: making .venv-zarr with $$found"; \
	  "$$found" -m venv .venv-zarr; \
	  $(ZARR_BIN)/python $(PIP) install --quiet $(ZARR_REQUIREMENTS); \
	  touch $(ZARR_INSTALLED); \
	fi; \
	$(ZARR_BIN)/python -c 'import sys, zarr; print("golden: Python", sys.version.split()[0], "zarr", zarr.__version__)'; \
	$(ZARR_BIN)/python -m pytest --confcutdir=tests/compat -p no:cacheprovider tests/compat

clean: ## remove caches and builds; the environments stay (delete .venv and .venv-zarr by hand)
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .grimp_cache .hypothesis
	find deltastore formats adapters tests -type d -name __pycache__ -prune -exec rm -rf {} +

$(INSTALLED): pyproject.toml | $(BIN)/python
	$(BIN)/python $(PIP) install -e '.[dev]'
	@touch $@

$(BIN)/python:
	@set -e; \
	for candidate in $(PYTHONS); do \
	  if "$$candidate" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then \
	    echo "setup: making .venv with $$candidate"; \
	    "$$candidate" -m venv .venv; exit 0; \
	  fi; \
	done; \
	echo "setup: none of '$(PYTHONS)' is Python 3.11 or newer with venv and ensurepip;" >&2; \
	echo "       name one: make setup PYTHONS=/path/to/python3.11" >&2; exit 1
