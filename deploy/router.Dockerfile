# The router: `docker build -t trtmesh/router -f deploy/router.Dockerfile .` at the root of the repository.
ARG BASE=python:3.11-slim-bookworm

FROM ${BASE} AS base
# A base for CUDA, such as nvidia/cuda:13.0.1-base-ubuntu24.04, brings no Python.
RUN command -v python3 >/dev/null || { apt-get update -q \
    && apt-get install -yq --no-install-recommends python3 python3-venv && rm -rf /var/lib/apt/lists/*; }

FROM base AS requirements
WORKDIR /build
COPY pyproject.toml deploy/requirements.py ./
RUN python3 requirements.py otel > requirements.txt && python3 requirements.py --metadata > METADATA

FROM base AS dependencies
ARG PIP_ARGS=""
RUN python3 -m venv /venv
COPY constraints.txt ./
COPY --from=requirements /build/requirements.txt ./
RUN /venv/bin/pip install --no-cache-dir --disable-pip-version-check ${PIP_ARGS} -c constraints.txt -r requirements.txt \
    && /venv/bin/pip uninstall -q -y pip

FROM base
RUN useradd --system --uid 10001 --home-dir /tmp trtmesh
COPY --from=dependencies /venv /venv
# By which programs know their version.
COPY --from=requirements /build/METADATA /app/trtmesh.dist-info/METADATA
COPY protos/trtmesh /app/trtmesh
COPY services/chassis/trtmesh /app/trtmesh
COPY services/router/trtmesh /app/trtmesh
COPY services/client/trtmesh /app/trtmesh
COPY services/cli/trtmesh /app/trtmesh
COPY tools/trtmesh /app/trtmesh
ENV PATH=/venv/bin:$PATH PYTHONPATH=/app PYTHONUNBUFFERED=1 HOME=/tmp
RUN python -m compileall -q /app
ENV TRTMESH_ROUTER_HOST=0.0.0.0 TRTMESH_ROUTER_PORT=8001 TRTMESH_ROUTER_HTTP_PORT=8000 TRTMESH_ROUTER_METRICS_PORT=8002
# A volume there is writable for the router.
RUN install -d -o 10001 /registry
USER 10001
EXPOSE 8000 8001 8002
HEALTHCHECK --interval=5s --timeout=4s --start-period=60s --retries=3 CMD ["python", "-m", "trtmesh.chassis.probe", "127.0.0.1:8001"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["python", "-m", "trtmesh.router"]
