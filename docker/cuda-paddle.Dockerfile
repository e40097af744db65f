# mtrain with the backend fleet for NVIDIA GPUs. Paddle and torch are two images: no process has two frameworks anyway.
#   docker build -f docker/cuda-paddle.Dockerfile -t mtrain:cuda-paddle .
# Paddle's builds for GPUs are on Paddle's own index; PADDLE_INDEX must be the one for this version of CUDA.
ARG CUDA=12.6.3
FROM nvidia/cuda:${CUDA}-cudnn-runtime-ubuntu24.04 AS build
ARG PADDLE=3.3.1
ARG PADDLE_INDEX=https://www.paddlepaddle.org.cn/packages/stable/cu126/
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
# The versions are those of this release of Ubuntu.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3-venv \
    && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH
WORKDIR /src
RUN pip install --no-cache-dir "paddlepaddle-gpu==${PADDLE}" --index-url "${PADDLE_INDEX}"
COPY . .
# The extra `fleet` takes the Paddle that is there.
RUN pip install --no-cache-dir -c constraints.txt ./packages/mtrain-trace '.[fleet,vision,report,tensorboard]' \
    ./packages/mtrain-clusters ./packages/mtrain-ui

FROM nvidia/cuda:${CUDA}-cudnn-runtime-ubuntu24.04
# gcc compiles mtrain's kernels for the processor at hand, and Triton's launchers (python3-dev).
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev python3-dev \
    && rm -rf /var/lib/apt/lists/* \
    && userdel --remove ubuntu \
    && groupadd --gid 1000 mtrain \
    && useradd --uid 1000 --gid 1000 --create-home mtrain
COPY --from=build /opt/venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH
USER 1000:1000
WORKDIR /home/mtrain
CMD ["mtrain", "--help"]
