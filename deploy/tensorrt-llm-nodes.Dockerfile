# The TensorRT-LLM engine for groups of several nodes, whose ranks mpirun starts over SSH, as root. Untested like its base.
# docker build -t trtmesh/engine-tensorrt-llm-nodes -f deploy/tensorrt-llm-nodes.Dockerfile . after that of deploy/tensorrt-llm.Dockerfile.
ARG BASE=trtmesh/engine-tensorrt-llm

FROM ${BASE}
USER root
# SSH looks for its keys in root's own home.
ENV HOME=/root
RUN apt-get update && apt-get install --yes --no-install-recommends openssh-server && rm -rf /var/lib/apt/lists/*
