# mtrain with the backends on torch for NVIDIA GPUs: ddp, DeepSpeed, and Horovod built with NCCL.
#   docker build -f docker/cuda-torch.Dockerfile -t mtrain:cuda-torch .
# The toolkit must have the CUDA version for which torch is built: Horovod is compiled against both. `pip install torch` brings
# a build for CUDA 13.0; for another one, give CUDA and TORCH_INDEX together.
ARG CUDA=13.0.1
FROM nvidia/cuda:${CUDA}-cudnn-devel-ubuntu24.04 AS build
ARG TORCH_INDEX=https://download.pytorch.org/whl/cu130
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore CUDA_HOME=/usr/local/cuda
# The versions are those of this release of Ubuntu.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends cmake g++ make python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH
WORKDIR /src
COPY constraints.txt ./
# torch comes first, so that a change of mtrain does not install it again.
RUN pip install --no-cache-dir -c constraints.txt torch --index-url "${TORCH_INDEX}"
COPY . .
# A pod of a job recognises by mtrain-clusters which rank it is; mtrain-ui writes report.html.
RUN pip install --no-cache-dir -c constraints.txt ./packages/mtrain-trace '.[ddp,deepspeed,vision,report,tensorboard]' \
    ./packages/mtrain-clusters ./packages/mtrain-ui \
    && HOROVOD_GPU_OPERATIONS=NCCL scripts/build-horovod /opt/venv/bin/python

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
