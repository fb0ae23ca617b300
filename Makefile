# Everything runs in .venv, which is made on demand from the lock files.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:

# The locks were made on Python 3.11. A name counts only if it runs: version managers install names that do not.
CHECK := import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(firstword $(foreach p,python3.11 python3.13 python3.12 python3,$(shell $(p) -c '$(CHECK)' 2>/dev/null && echo $(p))))
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq

.PHONY: help demo test test-oracles lint format bench bench-small docs-tables lock clean

help:  ## show this list
	@sed -nE 's/^([a-z-]+):.*## (.*)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 22

demo: .venv/run.stamp  ## fit and compare on embedded data, write a report page
	@$(BIN)/sdgp demo

# the tests share their compiled programs, because compiling takes most of their time
PROGRAMS := JAX_COMPILATION_CACHE_DIR=$(CURDIR)/.venv/programs JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0

test: .venv/dev.stamp  ## run the tests
	@$(PROGRAMS) $(BIN)/pytest -n 2 --dist worksteal -q --durations=25 tests

test-oracles: .venv/oracles.stamp  ## compare with GPyTorch (installs torch); a skipped test fails
	@$(PROGRAMS) $(BIN)/pytest -n 2 --dist worksteal -q tests/oracles

lint: .venv/dev.stamp  ## check style and types
	@$(BIN)/ruff check -q
	@$(BIN)/ruff format -q --check
	@$(BIN)/mypy --no-error-summary

format: .venv/dev.stamp  ## format the code and apply safe fixes
	@$(BIN)/ruff check -q --fix
	@$(BIN)/ruff format -q

bench: .venv/oracles.stamp  ## time one training step (installs torch for the comparison)
	@$(BIN)/python benchmarks/step.py

SMALL := results/small
bench-small: .venv/run.stamp  ## a small version of the paper's experiments, with tables and the report
	@$(BIN)/sdgp bench run --data energy,concrete --methods sgp,mf-l3,star-l3 --splits 2 --steps 200 --inducing 32 \
		--jobs 2 --store $(SMALL)/runs.sqlite
	@$(BIN)/sdgp bench table --results $(SMALL)/runs.sqlite
	@$(BIN)/sdgp bench figure covariance calibration elbo --data concrete --steps 200 --inducing 32 \
		--results $(SMALL)/runs.sqlite --output $(SMALL)/figures
	@$(BIN)/sdgp report --results $(SMALL)/runs.sqlite --figures $(SMALL)/figures --output $(SMALL)/report.html

docs-tables: .venv/run.stamp  ## write the tables in docs anew from results
	@$(BIN)/python docs/renew.py

lock:  ## renew the lock files with the newest versions that pyproject.toml allows
	@requirements/lock.sh $(PYTHON)

clean:  ## remove .venv, caches and builds
	@rm -rf .venv .hypothesis .mypy_cache .pytest_cache .ruff_cache build dist demo-output results/small
	@find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

.venv/bin/python:
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer with venv is needed; name one: make PYTHON=/path/to/python" >&2; exit 1; }
	@$(PYTHON) -m venv .venv

.venv/run.stamp: requirements/run.lock pyproject.toml | .venv/bin/python
	@$(PIP) install -r $<
	@$(PIP) install --no-deps -e .
	@touch $@

.venv/dev.stamp: requirements/dev.lock .venv/run.stamp
	@$(PIP) install -r $<
	@touch $@

.venv/oracles.stamp: requirements/oracles.lock .venv/dev.stamp
	@$(PIP) install -r $<
	@touch $@
