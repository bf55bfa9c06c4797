# The day-to-day commands; `make demo` and `make test` do all the set-up themselves.
PYTHON ?= python3
BIN := .venv/bin
DEMO_DIR ?= demo
PORT ?= 8000

.PHONY: env demo check test test-containers lint bench package sbom audit clean

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

# Tools that look at what is released, apart from it.
.venv-release/.complete: constraints.txt
	test -x .venv-release/bin/python || $(PYTHON) -m venv .venv-release
	.venv-release/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt build cyclonedx-bom pip-audit pip-licenses twine zizmor
	touch $@

demo: env
	$(BIN)/lookalike demo --dir $(DEMO_DIR) --port $(PORT)

# The tests that are not marked `slow`, to run while working.
check: env lint
	$(BIN)/python -m pytest -n auto --dist loadfile -m "not slow"

test: env lint .venv-serve/.complete
	$(BIN)/python -m pytest -n auto --dist loadfile

# Needs Docker or Podman with compose; docs/deploy.md names the variables that choose one.
test-containers: env
	CONTAINERS=1 $(BIN)/python -m pytest tests/containers

lint: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: env
	@for benchmark in benchmarks/[a-z]*.py; do $(BIN)/python $$benchmark --quick || exit 1; done

package: .venv-release/.complete
	rm -rf dist
	.venv-release/bin/python -m build
	.venv-release/bin/twine check --strict dist/*

# Of what a server gets and nothing else: the wheel with its extra `cpu`, no pip. GPL and unknown licences are refused.
sbom: package
	rm -rf build/serve && $(PYTHON) -m venv --without-pip build/serve
	.venv-release/bin/python -m pip --python build/serve/bin/python install --quiet --disable-pip-version-check --constraint constraints.txt "$$(echo dist/*.whl)[cpu]"
	build/serve/bin/lookalike --version
	.venv-release/bin/pip-licenses --python build/serve/bin/python --partial-match --fail-on "GPL;GNU;EUPL;SSPL;UNKNOWN" --format markdown
	.venv-release/bin/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible --output-file build/lookalike.cdx.json build/serve/bin/python

# Strict: a package that nobody could look up is a failure, not a pass.
audit: .venv-release/.complete
	.venv-release/bin/zizmor --offline --quiet .github
	.venv-release/bin/pip-audit --strict --no-deps --disable-pip --progress-spinner off --requirement constraints.txt \
	  || { echo "A package has a known vulnerability, or the index that knows them could not be asked: see above." >&2; exit 1; }

clean:
	rm -rf .venv .venv-serve .venv-release demo build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
