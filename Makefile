# The day-to-day commands; `make demo` and `make test` do all the set-up themselves.
PYTHON ?= python3
BIN := .venv/bin
DEMO_DIR ?= demo
PORT ?= 8000

.PHONY: env demo test lint bench clean

env: .venv/.complete

# The stamp is written last, so an interrupted installation is made again.
.venv/.complete: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Lookalike needs Python 3.11 or newer: make PYTHON=python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[cpu,train,dev]"
	touch $@

# What a server installs: no PyTorch. The tests run the service in it.
.venv-serve/.complete: pyproject.toml constraints.txt
	test -x .venv-serve/bin/python || $(PYTHON) -m venv .venv-serve
	.venv-serve/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[cpu]"
	touch $@

demo: env
	$(BIN)/lookalike demo --dir $(DEMO_DIR) --port $(PORT)

test: env lint .venv-serve/.complete
	$(BIN)/python -m pytest -n auto --dist loadfile

lint: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: env
	@for benchmark in benchmarks/[a-z]*.py; do $(BIN)/python $$benchmark --quick || exit 1; done

clean:
	rm -rf .venv .venv-serve demo build *.egg-info .mypy_cache .ruff_cache .pytest_cache
