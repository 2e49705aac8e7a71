# Images for docs/start/kubernetes.md: the package, torch and the examples.
#
#     docker build -t fusionlayer .                    for torchrun, Ray, Spark, TrainJob and JobSet
#     docker build -t fusionlayer-mpi --target mpi .   with Open MPI and sshd, for MPIJob
#
# BASE is an image of a Debian with Python 3.10 or later; what it has of torch stays. PIP_EXTRA_INDEX_URL may name the
# index of PyTorch's CPU builds. For CUDA kernels take a BASE with nvcc, and FUSIONLAYER_CUDA=1.
ARG BASE=python:3.12-slim-bookworm

FROM ${BASE} AS build
ARG FUSIONLAYER_CUDA=0
ARG FUSIONLAYER_CUDA_ARCHS=all
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY . .
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM ${BASE} AS train
ARG PIP_EXTRA_INDEX_URL
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir /wheels/*.whl
WORKDIR /workspace
COPY examples examples

FROM train AS mpi
RUN apt-get update \
    && apt-get install -y --no-install-recommends openmpi-bin openssh-client openssh-server \
    && rm -rf /var/lib/apt/lists/* \
    && mkdir -p /run/sshd \
    && ssh-keygen -A \
    && sed 's/^/* /' /etc/ssh/ssh_host_*_key.pub > /etc/ssh/ssh_known_hosts

FROM train
