# Every target sets up what it needs. `make` alone lists the targets.

VENV ?= .venv
# cpu or cuda: the build of torch in the environment. A choice once made stays.
BACKEND ?= $(or $(patsubst $(VENV)/.installed-%,%,$(wildcard $(VENV)/.installed-*)),cpu)
# The first interpreter that runs, is in range and can make virtual environments. `make setup PYTHON=...` overrides.
PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11; do \
	$$python -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null \
	&& echo $$python && break; done)

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed-$(BACKEND)

.DEFAULT_GOAL := help
.PHONY: help setup demo test soak check format protos lock clean

help: ## List the targets
	@sed -nE 's/^([a-z]+):.*## (.*)/  make \1|\2/p' Makefile | while IFS='|' read -r target text; do \
		printf '%-14s %s\n' "$$target" "$$text"; done

setup: $(STAMP) ## Make .venv with the locked versions (BACKEND=cuda for a GPU)

demo: $(STAMP) ## Watch a model write code, with speculation off and on
	@$(BIN)/outrider demo

test: $(STAMP) ## Run the tests
	@$(BIN)/python -m pytest -n 2 --dist loadfile

soak: $(STAMP) ## Run 10,000 random schedules of each simulation
	@$(BIN)/python -m pytest --num-seeds 10000 tests/property/test_draft_exchange.py tests/property/test_orchestrator.py

check: $(STAMP) ## Check style, types and imports
	@$(BIN)/ruff check --quiet
	@$(BIN)/ruff format --quiet --check || { echo 'Run `make format`.'; exit 1; }
	@$(BIN)/pyright --pythonpath $(BIN)/python
	@$(BIN)/lint-imports --no-logo

format: $(STAMP) ## Format the code
	@$(BIN)/ruff check --quiet --fix --select I
	@$(BIN)/ruff format

protos: $(STAMP) ## Generate common/protos from protos/
	@$(BIN)/python -m grpc_tools.protoc -Icommon/protos=protos --python_out=. --pyi_out=. \
		$(patsubst protos/%,common/protos/%,$(wildcard protos/*/*/*.proto))

lock: | $(BIN)/python ## Resolve constraints.txt again (UPGRADE=1 for the newest versions)
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --constraint constraints.txt uv
	@$(BIN)/python deploy/lock.py $(BIN)/uv $(if $(UPGRADE),--upgrade)

clean: ## Remove .venv and everything generated
	@rm -rf $(VENV) build dist outrider.egg-info .hypothesis .import_linter_cache .pytest_cache .ruff_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@test -n '$(PYTHON)' || { echo 'setup: needs Python 3.11, 3.12 or 3.13 with the venv module; none was found.' \
		'Name one with PYTHON=/path/to/python.' >&2; exit 1; }
	@'$(PYTHON)' -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' || { \
		echo 'setup: $(PYTHON) is not Python 3.11, 3.12 or 3.13:' "$$('$(PYTHON)' --version 2>&1)" >&2; exit 1; }
	@echo 'setup: making $(VENV) with $(PYTHON)'
	@'$(PYTHON)' -m venv $(VENV)

$(STAMP): pyproject.toml constraints.txt deploy/install.py | $(BIN)/python
	@$(BIN)/python deploy/install.py --backend $(BACKEND) --extra dev
	@rm -f $(VENV)/.installed-*
	@touch $@
