"""Start and end of the process, and recovery after a kill."""

from __future__ import annotations

import asyncio
import signal
import urllib.request
from pathlib import Path

import grpc
import pytest
from processes import run_to_exit, service_process
from tokenizer.serving import close_decode, connected, decode, encode, linked, open_decode
from tokenizers import Tokenizer
from trtmesh.v1 import tokenizer_pb2 as pb
from trtmesh.v1 import tokenizer_pb2_grpc as pb_grpc


async def until_ready(stub: pb_grpc.TokenizerServiceAsyncStub) -> pb.GetTokenizerResponse:
    """The description, as soon as the tokenizer is loaded."""
    while True:
        try:
            return await stub.GetTokenizer(pb.GetTokenizerRequest())
        except grpc.aio.AioRpcError as error:
            if "still loading" not in (error.details() or ""):
                raise


async def test_sequence_survives_the_death_of_its_tokenizer(model_dir: Path) -> None:
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    ids = tokenizer.encode("naïve 😀 café").ids
    flags = ("--model-dir", str(model_dir), "--port", "0")
    async with (
        service_process("tokenizer", *flags) as first,
        service_process("tokenizer", *flags) as second,
    ):
        texts: list[str] = []
        async with connected(first.address) as stub:
            fingerprint = (await until_ready(stub)).fingerprint
            async with linked(stub) as link:
                await link.send(open_decode(1))
                cut = len(ids) // 2
                texts += (await link.decode(decode({1: ids[:cut]}))).texts
                first.signal(signal.SIGKILL)
                with pytest.raises(grpc.aio.AioRpcError):
                    await link.call.read()
        async with connected(second.address) as stub:
            assert (await until_ready(stub)).fingerprint == fingerprint
            async with linked(stub) as link:
                await link.send(open_decode(1, delivered_token_ids=ids[:cut]))
                texts += (await link.decode(decode({1: ids[cut:]}, [1]))).texts
        assert "".join(texts) == "naïve 😀 café"


def read(url: str) -> str:
    with urllib.request.urlopen(url) as response:
        return str(response.read(), "utf-8")


async def test_sigterm_drains_and_exits(model_dir: Path) -> None:
    flags = ("--model-dir", str(model_dir), "--port", "0", "--metrics-port", "0")
    async with service_process("tokenizer", *flags) as process, connected(process.address) as stub:
        await until_ready(stub)
        async with linked(stub) as link:
            await link.send(open_decode(1))
            await link.decode(decode({1: [5]}))
            url = f"http://127.0.0.1:{process.metrics_port}/metrics"
            metrics = await asyncio.to_thread(read, url)
            assert "trtmesh_tokenizer_open_decode_states 1.0" in metrics
            process.signal(signal.SIGTERM)
            while (await link.encode(encode(2, "text"))).error.reason != "DRAINING":
                pass
            assert not (await link.decode(decode({1: [5]}, [1]))).failures
            await link.send(close_decode(1))
            with pytest.raises(grpc.aio.AioRpcError, match="this tokenizer stops"):
                await link.call.read()
            assert await process.wait() == 0
            assert "Traceback" not in process.stderr


@pytest.mark.parametrize("spoilt", ["missing", "broken"])
async def test_unusable_model_directory_ends_the_process(tmp_path: Path, spoilt: str) -> None:
    directory = tmp_path / "model"
    if spoilt == "broken":
        directory.mkdir()
        (directory / "tokenizer.json").write_text("{")
    ended = await run_to_exit("tokenizer", "--model-dir", str(directory), "--port", "0")
    assert ended.status == 4
    assert "trtmesh tokenizer: error: " in ended.stderr
    assert str(directory) in ended.stderr.splitlines()[-1]
