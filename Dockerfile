# shardio's commands, for the nodes of a cluster: docker build -t shardio . && docker run --rm shardio --help
# With a GPU: --build-arg BASE=pytorch/pytorch:2.9.1-cuda12.8-cudnn9-devel, whose torch is kept.
ARG BASE=python:3.12-slim
FROM ${BASE} AS build
# The base image may be of any Debian or Ubuntu: no version fits all.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --no-install-recommends -y gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
COPY . /src
# A wheel, so that the compiler stays behind.
RUN python -m pip wheel --no-cache-dir --no-deps --wheel-dir /wheels /src

FROM ${BASE}
COPY --from=build /wheels /wheels
RUN python -m pip install --no-cache-dir "$(ls /wheels/*.whl)[parquet,remote]" && rm -rf /wheels
ENTRYPOINT ["shardio"]
