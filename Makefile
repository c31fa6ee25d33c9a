# What CI runs, and nothing that it does not. Each part can be run alone.
PYTHON ?= $(shell command -v python || command -v python3)

.PHONY: check format lint types tests

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
