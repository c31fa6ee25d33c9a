# `make check` is what CI runs. Each part of it can be run alone.
PYTHON ?= $(shell command -v python || command -v python3)

# Processes that tests start compile this package once, not each for itself, whatever the environment says.
export PYTHONDONTWRITEBYTECODE =

.PHONY: check format lint types tests nightly

check: lint types tests

format:
	$(PYTHON) -m ruff format .
	$(PYTHON) -m ruff check --fix .

lint:
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m ruff check .

types:
	$(PYTHON) -m mypy

# Two at a time, a module always in one of them: its tests share engines.
tests:
	$(PYTHON) -m pytest -n 2 --dist loadscope

# What is too long for each change: the marked tests, and fifty orders of tasks for each test on a virtual clock. Wants
# `pip install -e '.[dev,nightly]'`.
nightly:
	$(PYTHON) -m pytest -n 2 --dist loadscope -m 'nightly or virtual_clock' --clock-seeds 50
