# syntax=docker/dockerfile:1
# TinyLoop in a container; docs/deploying.md says how to run it.
#
#   docker build --tag tinyloop:0.1.0 .
#   docker build --tag tinyloop:0.1.0-cuda13 --build-arg ENGINE=cuda13 .      NVIDIA GPUs, a driver from 580 on
#
#   wheel       makes the wheel of this checkout
#   packages    a virtual environment of what a lock file names, every package by version and hash
#   the image   interpreter and environment: no compiler, no pip in the environment, nothing to write to but volumes
#
# CUDA needs no base image of its own: NVRTC and cuBLAS come as packages, the driver from the node.  Kernels are compiled
# at the first start, into /var/cache/tinyloop; mount a volume there to keep them.
# `make locks` renews the lock files.  A build that is the same for ever names the base image by its digest too.

FROM python:3.12.12-slim-trixie AS base

FROM base AS wheel
WORKDIR /src
COPY deploy/image/build.lock .
RUN pip install --no-cache-dir --require-hashes --only-binary :all: --requirement build.lock
COPY pyproject.toml README.md LICENSE ./
COPY protos protos
COPY kernels_cu kernels_cu
COPY tinyloop_service tinyloop_service
RUN python -m hatchling build --target wheel --directory /wheel

FROM base AS packages
ARG ENGINE=cpu
COPY deploy/image/${ENGINE}.lock /requirements.lock
RUN python -m venv --without-pip /opt/tinyloop \
    && pip --python /opt/tinyloop/bin/python install --no-cache-dir --require-hashes --only-binary :all: \
        --requirement /requirements.lock
COPY --from=wheel /wheel /wheel
RUN pip --python /opt/tinyloop/bin/python install --no-cache-dir --no-index --no-deps /wheel/*.whl \
    && /opt/tinyloop/bin/tinyloop --version

FROM base
LABEL org.opencontainers.image.title="tinyloop" \
      org.opencontainers.image.description="gRPC service for looped language models" \
      org.opencontainers.image.licenses="Apache-2.0"
RUN groupadd --gid 10001 tinyloop \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin tinyloop \
    && install --directory --owner 10001 --group 10001 /var/cache/tinyloop /var/lib/tinyloop
COPY --from=packages /opt/tinyloop /opt/tinyloop
COPY deploy/image/healthcheck.py /opt/tinyloop/healthcheck.py
ENV PATH=/opt/tinyloop/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    HOME=/tmp \
    XDG_CACHE_HOME=/var/cache/tinyloop \
    CUPY_CACHE_DIR=/var/cache/tinyloop/cupy \
    TINYLOOP_LOG_FORMAT=json
USER 10001:10001
EXPOSE 50051 50052 9464
HEALTHCHECK --interval=10s --timeout=5s --start-period=15m CMD ["python", "/opt/tinyloop/healthcheck.py"]
ENTRYPOINT ["tinyloop"]
CMD ["serve"]
