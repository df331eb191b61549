# `make demo`, `make test`, `make lint`: each creates .venv and installs what it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: demo test lint format

demo: $(INSTALLED)
	$(BIN)/angelspec demo

test: $(INSTALLED)
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/pyright

format: $(INSTALLED)
	$(BIN)/ruff check --fix .

# The stamp is older than pyproject.toml when the dependencies may have changed.
$(INSTALLED): pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "Python 3.11 or later is needed; name one with make PYTHON=...")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[test]'
	@touch $(INSTALLED)
