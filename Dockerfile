# `recap` in the versions of constraints.txt and constraints-image.txt.
#
#   docker build -t recap .                          for a CPU
#   docker build -t recap:cuda --target cuda .       for NVIDIA GPUs, with what the public models need
#
#   docker run --rm -v "$PWD:/work" recap generate "a fox on a beach by day"
#   docker run --rm --gpus all -v "$PWD:/work" -v recap-weights:/weights recap:cuda verify longlive

FROM python:3.11-slim AS base
# Below HOME, Triton keeps the kernels that it compiled: where anybody may write, and in a volume that outlives --rm.
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 RECAP_HOME=/weights HOME=/weights
WORKDIR /source
COPY constraints.txt constraints-image.txt ./
# Anybody may run it, so that results in /work belong to whoever asked for them: docker run --user "$(id -u)".
RUN mkdir -p -m 1777 /weights /weights/.triton /weights/.triton/cache /work
ENTRYPOINT ["recap"]
CMD ["--help"]

FROM base AS cuda
# torch from its own index, as PyPI has one build only; the driver of the host must know this CUDA.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cu130
# Triton compiles a few lines of C when kernels are first used.
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
RUN pip install --index-url "$TORCH_INDEX" "$(grep '^torch==' constraints.txt)"
# After torch, so that a change of the sources does not install it again.
COPY pyproject.toml README.md LICENSE ./
COPY src src
RUN pip install -c constraints.txt -c constraints-image.txt '.[wan,studio]'
WORKDIR /work

# The last one is what is built when none is named.
FROM base AS cpu
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN pip install --index-url "$TORCH_INDEX" "$(grep '^torch==' constraints.txt)"
COPY pyproject.toml README.md LICENSE ./
COPY src src
RUN pip install -c constraints.txt -c constraints-image.txt '.[studio]'
WORKDIR /work
