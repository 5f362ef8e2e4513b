# The tokenizer: `docker build -t trtmesh/tokenizer -f deploy/tokenizer.Dockerfile .` at the root of the repository.
ARG BASE=python:3.11-slim-bookworm

FROM ${BASE} AS base
# A base for CUDA, such as nvidia/cuda:13.0.1-base-ubuntu24.04, brings no Python.
RUN command -v python3 >/dev/null || { apt-get update -q \
    && apt-get install -yq --no-install-recommends python3 python3-venv && rm -rf /var/lib/apt/lists/*; }

FROM base AS requirements
WORKDIR /build
COPY pyproject.toml deploy/requirements.py ./
RUN python3 requirements.py tokenizer otel > requirements.txt && python3 requirements.py --metadata > METADATA

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
COPY protos/trtmesh/v1 /app/trtmesh/v1
COPY services/chassis/trtmesh /app/trtmesh
COPY services/tokenizer/trtmesh /app/trtmesh
ENV PATH=/venv/bin:$PATH PYTHONPATH=/app PYTHONUNBUFFERED=1 HOME=/tmp
RUN python -m compileall -q /app
ENV TRTMESH_TOKENIZER_HOST=0.0.0.0 TRTMESH_TOKENIZER_PORT=9001 TRTMESH_TOKENIZER_METRICS_PORT=8002
USER 10001
EXPOSE 9001 8002
HEALTHCHECK --interval=5s --timeout=4s --start-period=60s --retries=3 CMD ["python", "-m", "trtmesh.chassis.probe", "127.0.0.1:9001"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["python", "-m", "trtmesh.tokenizer"]
