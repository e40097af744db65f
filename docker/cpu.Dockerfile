# mtrain with every backend, on the CPU: torch, DeepSpeed, Horovod over gloo, Paddle.
#   docker build -f docker/cpu.Dockerfile -t mtrain:cpu .
FROM python:3.11.13-bookworm AS build
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
# The versions are those of this release of Debian.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends cmake \
    && rm -rf /var/lib/apt/lists/*
RUN python -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH
WORKDIR /src
COPY constraints.txt ./
# torch comes first, so that a change of mtrain does not install it again.
RUN pip install --no-cache-dir -c constraints.txt torch --index-url https://download.pytorch.org/whl/cpu
COPY . .
# A pod of a job recognises by mtrain-clusters which rank it is; mtrain-ui writes report.html.
RUN pip install --no-cache-dir -c constraints.txt ./packages/mtrain-trace '.[all]' \
    ./packages/mtrain-clusters ./packages/mtrain-ui \
    && scripts/build-horovod /opt/venv/bin/python

FROM python:3.11.13-slim-bookworm
# gcc compiles mtrain's kernels for the processor at hand, which is not the one that builds this image.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/* \
    && groupadd --gid 1000 mtrain \
    && useradd --uid 1000 --gid 1000 --create-home mtrain
COPY --from=build /opt/venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH
USER 1000:1000
WORKDIR /home/mtrain
CMD ["mtrain", "--help"]
