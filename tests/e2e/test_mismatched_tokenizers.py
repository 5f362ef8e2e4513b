"""A process of another tokenizer is refused with both fingerprints."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import grpc
import pytest
from e2e.mesh import DEMO, PATIENCE_SECONDS, SIMULATED, Mesh, eventually, running_mesh
from grpc_health.v1 import health_pb2, health_pb2_grpc
from processes import ServiceProcess
from trtmesh.chassis.errors import NoWorker
from trtmesh.v1 import router_admin_pb2 as admin_pb

OTHER = "a-fingerprint-of-other-files"


async def test_engine_of_another_tokenizer_is_refused() -> None:
    async def start(mesh: Mesh) -> None:
        tokenizer = await mesh.start_tokenizer()
        await mesh.start_engine(*SIMULATED, "--simulated-vocabulary-tokenizer-fingerprint", OTHER)
        # The router delays hellos for a known tokenizer, but not while the tokenizer loads.
        await until_loaded(tokenizer)
        await mesh.start_router()

    async with running_mesh(start=start) as mesh:

        async def refused() -> bool:
            status = await mesh.status()
            return [w.state for w in status.workers] == [admin_pb.WORKER_STATE_REFUSED]

        await eventually(refused)
        status = await mesh.status()
        (worker,), (tokenizer,) = status.workers, status.tokenizers
        assert OTHER in worker.problem
        assert tokenizer.fingerprint
        assert tokenizer.fingerprint in worker.problem
        # The hello carries the fingerprint, so the refusal is the engine's.
        assert worker.problem.startswith("FAILED_PRECONDITION")
        assert worker.worker == ""
        with pytest.raises(NoWorker):
            await mesh.client.complete(["x"], max_tokens=1)


async def until_loaded(process: ServiceProcess) -> None:
    """Waits until a process is serving."""
    async with grpc.aio.insecure_channel(process.address) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        async with asyncio.timeout(PATIENCE_SECONDS):
            while (await watch.read()).status != health_pb2.HealthCheckResponse.SERVING:
                pass
        watch.cancel()


async def test_tokenizer_of_other_files_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    shutil.copytree(DEMO, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    first, second = "a", "b"
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    file.write_text(json.dumps(content))

    async with running_mesh() as mesh:
        (before,) = await mesh.client.complete(["abc"], max_tokens=8)
        await mesh.start_tokenizer(folder)
        await mesh.start_router()

        async def one_is_refused() -> bool:
            status = await mesh.status()
            states = sorted(tokenizer.state for tokenizer in status.tokenizers)
            workers = {worker.state for worker in status.workers}
            expected = [admin_pb.WORKER_STATE_READY, admin_pb.WORKER_STATE_REFUSED]
            return states == expected and workers == {admin_pb.WORKER_STATE_READY}

        await eventually(one_is_refused)
        tokenizers = (await mesh.status()).tokenizers
        refused = next(t for t in tokenizers if t.state == admin_pb.WORKER_STATE_REFUSED)
        agreed = next(t for t in tokenizers if t.state == admin_pb.WORKER_STATE_READY)
        assert refused.fingerprint in refused.problem
        assert agreed.fingerprint in refused.problem
        texts = {(await mesh.client.complete(["abc"], max_tokens=8))[0].text for _ in range(6)}
        assert len(texts) == 1
        assert before.text
