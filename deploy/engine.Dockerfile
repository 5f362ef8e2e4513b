# The engine: `docker build -t trtmesh/engine -f deploy/engine.Dockerfile .` at the root of the repository.
ARG BASE=python:3.11-slim-bookworm
# cpu, or cuda for NVIDIA's GPUs.
ARG DEVICE=cpu

FROM ${BASE} AS base
# A base for CUDA, such as nvidia/cuda:13.0.1-base-ubuntu24.04, brings no Python.
RUN command -v python3 >/dev/null || { apt-get update -q \
    && apt-get install -yq --no-install-recommends python3 python3-venv && rm -rf /var/lib/apt/lists/*; }

FROM base AS requirements
WORKDIR /build
COPY pyproject.toml deploy/requirements.py ./
RUN python3 requirements.py engine foreign otel > requirements.txt && python3 requirements.py --metadata > METADATA

FROM base AS dependencies
ARG DEVICE
# Options of pip, in place of the index that has torch for CPUs.
ARG PIP_ARGS
RUN python3 -m venv /venv
COPY constraints.txt ./
COPY --from=requirements /build/requirements.txt ./
# PyPI's torch has the libraries of CUDA and Triton.
RUN case ${DEVICE} in cpu) index="--extra-index-url https://download.pytorch.org/whl/cpu" ;; cuda) index="" ;; \
    *) echo "DEVICE is ${DEVICE} but must be cpu or cuda" >&2; exit 1 ;; esac \
    && /venv/bin/pip install --no-cache-dir --disable-pip-version-check ${PIP_ARGS-${index}} -c constraints.txt -r requirements.txt \
    && /venv/bin/pip uninstall -q -y pip

FROM base
ARG DEVICE
# Triton compiles the code that starts kernels, against Python's headers, when the engine starts.
RUN test ${DEVICE} != cuda || { apt-get update -q && apt-get install -yq --no-install-recommends gcc libc6-dev \
    $(python3 -c 'import os, sysconfig as s; print("" if os.path.exists(s.get_path("include") + "/Python.h") else "python3-dev")') \
    && rm -rf /var/lib/apt/lists/*; }
RUN useradd --system --uid 10001 --home-dir /tmp trtmesh
COPY --from=dependencies /venv /venv
# By which programs know their version.
COPY --from=requirements /build/METADATA /app/trtmesh.dist-info/METADATA
COPY protos/trtmesh/v1 /app/trtmesh/v1
COPY services/chassis/trtmesh /app/trtmesh
COPY services/engine/trtmesh /app/trtmesh
ENV PATH=/venv/bin:$PATH PYTHONPATH=/app PYTHONUNBUFFERED=1 HOME=/tmp
RUN python -m compileall -q /app
ENV TRTMESH_ENGINE_HOST=0.0.0.0 TRTMESH_ENGINE_PORT=9101 TRTMESH_ENGINE_METRICS_PORT=8002
USER 10001
EXPOSE 9101 8002
HEALTHCHECK --interval=5s --timeout=4s --start-period=60s --retries=3 CMD ["python", "-m", "trtmesh.chassis.probe", "127.0.0.1:9101"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["python", "-m", "trtmesh.engine"]
