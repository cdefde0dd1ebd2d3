# SPDX-License-Identifier: Apache-2.0
# An image that trains on CPUs with Gloo. For GPUs, start from an image that has nvcc:
#   docker build --build-arg BASE=nvidia/cuda:13.0.1-devel-ubuntu24.04 --build-arg TORCH=torch -t usbyte .
# On x86-64 an index may serve PyTorch with CUDA by default; name a CPU build in TORCH for a small image.
# Ranks of one job talk over the host's network: docker run --network host --shm-size 1g usbyte ...
ARG BASE=python:3.12-slim-bookworm

FROM ${BASE} AS build
RUN apt-get update && apt-get install -y --no-install-recommends g++ python3-dev python3-pip python3-venv \
  && rm -rf /var/lib/apt/lists/*
COPY . /src
RUN python3 -m pip wheel --no-deps -w /wheels /src

FROM ${BASE}
ARG TORCH="torch==2.13.0"
RUN apt-get update \
  && apt-get install -y --no-install-recommends openssh-client python3 python3-pip python3-venv \
  && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/usbyte
ENV PATH=/opt/usbyte/bin:$PATH
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir ${TORCH} /wheels/*.whl && usbyte doctor && rm -rf /wheels
COPY examples /examples
CMD ["usbyte", "doctor"]
