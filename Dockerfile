# Four images from one source; see docs/deploy.md.
#   docker build --target serve --tag lookalike .              serves and indexes on CPUs, without PyTorch
#   docker build --target serve-gpu --tag lookalike:gpu .      serves and indexes on an NVIDIA GPU
#   docker build --target train --tag lookalike:train .        also trains and exports
#   docker build --target demo --shm-size 1g --tag lookalike:demo .    serves the sample shop, trained while it builds
# Other base images, such as those of a mirror. The default ones are named in FROM, where Dependabot updates them.
ARG PYTHON_IMAGE=python-default
ARG CUDA_IMAGE=cuda-default

FROM docker.io/library/python:3.11-slim-bookworm@sha256:a36c24f9cbdf4fd0f52d67f0823eeac19c2028c637cecc392d97f980d4fec56b AS python-default

# ONNX Runtime for GPUs takes CUDA 13 and cuDNN 9 from the image.
FROM docker.io/nvidia/cuda:13.0.2-cudnn-runtime-ubuntu24.04@sha256:14d94b039cb94bbd5da559f303b46bc4b0d5d6c24ab1a9d7b186e566ed3400dc AS cuda-default

FROM ${PYTHON_IMAGE} AS python

FROM ${CUDA_IMAGE} AS python-gpu
RUN command -v python3 >/dev/null || { \
    apt-get update && apt-get install --yes --no-install-recommends python3 && rm -rf /var/lib/apt/lists/*; }

# --- Build: dependencies have a layer of their own, which a source change does not rebuild -------------------

FROM python AS builder
# A private package index, unless pip's configuration in the base image names it.
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /build
# Without pip: the pip of the builder installs into it, and no image contains one.
RUN python3 -m venv --without-pip /opt/lookalike
# Every file is compared with a digest of these lists, and nothing is built from source: `make lock` writes them.
COPY deploy/requirements ./

FROM builder AS dependencies
# Additional lists: "cluster otel parquet remote".
ARG EXTRAS=""
# Compiled at build time with unchecked hashes: the file system is read-only at run time. Files for newer versions of
# Python fail to compile and are not needed.
RUN python3 -m pip --python /opt/lookalike/bin/python install --no-compile --require-hashes --only-binary :all: \
      $(printf -- '--requirement %s.txt ' serve ${EXTRAS}) \
 && find /opt/lookalike/lib -type d -name tests -prune -exec rm -r {} + \
 && { python3 -m compileall -q -j 0 --invalidation-mode unchecked-hash /opt/lookalike/lib || true; }

FROM builder AS dependencies-train
ARG EXTRAS=""
RUN python3 -m pip --python /opt/lookalike/bin/python install --no-compile --require-hashes --only-binary :all: \
      $(printf -- '--requirement %s.txt ' train ${EXTRAS}) \
 && { python3 -m compileall -q -j 0 --invalidation-mode unchecked-hash /opt/lookalike/lib || true; }

FROM python-gpu AS dependencies-gpu
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /build
RUN python3 -m pip --version 2>/dev/null || { \
    apt-get update && apt-get install --yes --no-install-recommends python3-pip python3-venv; }
RUN python3 -m venv --without-pip /opt/lookalike
COPY deploy/requirements ./
ARG EXTRAS=""
RUN python3 -m pip --python /opt/lookalike/bin/python install --no-compile --require-hashes --only-binary :all: \
      $(printf -- '--requirement %s.txt ' serve-gpu ${EXTRAS}) \
 && find /opt/lookalike/lib -type d -name tests -prune -exec rm -r {} + \
 && { python3 -m compileall -q -j 0 --invalidation-mode unchecked-hash /opt/lookalike/lib || true; }

# The application, apart from the dependencies and the same in all images: an upgrade downloads this small layer.
FROM builder AS package
RUN python3 -m pip install --require-hashes --only-binary :all: --requirement build.txt
WORKDIR /source
COPY pyproject.toml README.md LICENSE lookalike.py ./
COPY index index
COPY service service
COPY training training
RUN python3 -m pip install --no-compile --no-deps --no-build-isolation --target /app . \
 && sed --in-place '1s|.*|#!/opt/lookalike/bin/python|' /app/bin/lookalike \
 && python3 -m compileall -q -j 0 --invalidation-mode unchecked-hash /app

# --- Run time: no pip, no build tools, no root --------------------------------------------------------------

FROM python AS runtime
# The gallery is a folder in its volume, so that a snapshot can be restored next to it and then renamed.
ENV PATH=/app/bin:/opt/lookalike/bin:${PATH} PYTHONPATH=/app PYTHONUNBUFFERED=1 HOME=/tmp \
    LOOKALIKE_HOST=0.0.0.0 LOOKALIKE_GALLERY=/data/gallery LOOKALIKE_KEYS=/keys/keys.json
RUN useradd --uid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin lookalike \
 && install --directory --owner 10001 --group 10001 --mode 0750 /data /keys
WORKDIR /data
USER 10001:10001

FROM runtime AS train
COPY --from=dependencies-train /opt/lookalike /opt/lookalike
COPY --from=package /app /app
CMD ["lookalike", "--help"]
ARG VERSION=unreleased
ARG REVISION=unknown
LABEL org.opencontainers.image.title="Lookalike, training" \
      org.opencontainers.image.description="Trains and exports the models of Lookalike's visual product search" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"

FROM python-gpu AS serve-gpu
ENV PATH=/app/bin:/opt/lookalike/bin:${PATH} PYTHONPATH=/app PYTHONUNBUFFERED=1 HOME=/tmp \
    XDG_CACHE_HOME=/data/cache LOOKALIKE_HOST=0.0.0.0 LOOKALIKE_GALLERY=/data/gallery LOOKALIKE_KEYS=/keys/keys.json
RUN useradd --uid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin lookalike \
 && install --directory --owner 10001 --group 10001 --mode 0750 /data /keys
WORKDIR /data
USER 10001:10001
EXPOSE 8000
HEALTHCHECK --interval=30s --timeout=5s --start-period=60s CMD ["python", "-c", "import http.client, os; \
probe = http.client.HTTPConnection('127.0.0.1', int(os.environ.get('LOOKALIKE_PORT') or 8000), timeout=4); \
probe.request('GET', '/healthz'); raise SystemExit(probe.getresponse().status != 200)"]
COPY --from=dependencies-gpu /opt/lookalike /opt/lookalike
COPY --from=package /app /app
CMD ["lookalike", "serve"]
ARG VERSION=unreleased
ARG REVISION=unknown
LABEL org.opencontainers.image.title="Lookalike, on a GPU" \
      org.opencontainers.image.description="Visual product search: photos in, similar products out" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"

FROM runtime AS service
EXPOSE 8000
HEALTHCHECK --interval=30s --timeout=5s --start-period=60s CMD ["python", "-c", "import http.client, os; \
probe = http.client.HTTPConnection('127.0.0.1', int(os.environ.get('LOOKALIKE_PORT') or 8000), timeout=4); \
probe.request('GET', '/healthz'); raise SystemExit(probe.getresponse().status != 200)"]
COPY --from=dependencies /opt/lookalike /opt/lookalike
COPY --from=package /app /app
CMD ["lookalike", "serve"]

FROM train AS demo-shop
# Processes that decode photos pass them in shared memory: more than the 64 MB that a build has by default.
RUN lookalike demo --no-serve --dir /data/demo

# Without keys: for a look, not for a shop.
FROM service AS demo
ENV LOOKALIKE_EXAMPLES=/data/examples LOOKALIKE_KEYS="" LOOKALIKE_OPEN=true
COPY --from=demo-shop --chown=10001:10001 /data/demo/gallery /data/gallery
COPY --from=demo-shop --chown=10001:10001 /data/demo/examples /data/examples
ARG VERSION=unreleased
ARG REVISION=unknown
LABEL org.opencontainers.image.title="Lookalike, demo" \
      org.opencontainers.image.description="Visual product search of a sample shop" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"

# The last stage is what `docker build .` makes.
FROM service AS serve
ARG VERSION=unreleased
ARG REVISION=unknown
LABEL org.opencontainers.image.title="Lookalike" \
      org.opencontainers.image.description="Visual product search: photos in, similar products out" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
