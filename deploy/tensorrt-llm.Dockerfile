# An engine with the TensorRT-LLM backend, on an image that has the library. Untested: no machine of this project has it.
# docker build -t trtmesh/engine-tensorrt-llm -f deploy/tensorrt-llm.Dockerfile --build-arg BASE=... . at the root of the repository.
ARG BASE=nvcr.io/nvidia/tensorrt-llm/release:1.2.1

FROM ${BASE} AS requirements
WORKDIR /build
COPY pyproject.toml deploy/requirements.py ./
RUN python3 requirements.py otel > requirements.txt && python3 requirements.py --metadata > METADATA

FROM ${BASE}
# Beside the library's packages, which it pins: torch, transformers, numpy and safetensors are its own.
COPY --from=requirements /build/requirements.txt /tmp/requirements.txt
RUN python3 -m venv --system-site-packages /venv \
    && /venv/bin/pip install --no-cache-dir --disable-pip-version-check -r /tmp/requirements.txt
RUN useradd --system --uid 10001 --home-dir /tmp trtmesh
# By which programs know their version.
COPY --from=requirements /build/METADATA /app/trtmesh.dist-info/METADATA
COPY protos/trtmesh/v1 /app/trtmesh/v1
COPY services/chassis/trtmesh /app/trtmesh
COPY services/engine/trtmesh /app/trtmesh
ENV PATH=/venv/bin:$PATH PYTHONPATH=/app PYTHONUNBUFFERED=1 HOME=/tmp
ENV TRTMESH_ENGINE_HOST=0.0.0.0 TRTMESH_ENGINE_PORT=9101 TRTMESH_ENGINE_METRICS_PORT=8002 TRTMESH_ENGINE_BACKEND=tensorrt_llm
USER 10001
EXPOSE 9101 8002
# Loading takes minutes.
HEALTHCHECK --interval=5s --timeout=4s --start-period=900s --retries=3 CMD ["python", "-m", "trtmesh.chassis.probe", "127.0.0.1:9101"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["python", "-m", "trtmesh.engine"]
