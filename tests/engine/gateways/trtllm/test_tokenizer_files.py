"""The archive of the tokenizer."""

from __future__ import annotations

import zipfile
from hashlib import sha256
from io import BytesIO
from pathlib import Path

import grpc
import pytest
from recording_backend import RecordingBackend
from smg_grpc_proto.generated import common_pb2
from trtllm_client import DEMO, offering, refusal
from trtmesh.chassis.errors import Exhausted, UnsupportedCall
from trtmesh.engine.gateways.trtllm import tokenizer_files
from trtmesh.engine.gateways.trtllm.tokenizer_files import CHUNK_BYTES, chunks, tokenizer_archive


async def test_a_gateway_gets_the_tokenizer_of_the_model() -> None:
    async with offering(RecordingBackend()) as stub:
        parts = [part async for part in stub.GetTokenizer(common_pb2.GetTokenizerRequest())]
    archive = b"".join(part.data for part in parts)
    assert [part.sha256 for part in parts[:-1]] == [""] * (len(parts) - 1)
    assert parts[-1].sha256 == sha256(archive).hexdigest()
    with zipfile.ZipFile(BytesIO(archive)) as files:
        assert "tokenizer.json" in files.namelist()
        assert not [name for name in files.namelist() if "safetensors" in name]
        assert files.read("tokenizer.json") == (DEMO / "tokenizer.json").read_bytes()


async def test_a_worker_without_a_tokenizer_says_so(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    async with offering(RecordingBackend(), model_dir=tmp_path) as stub:
        error = await refusal(stub.GetTokenizer(common_pb2.GetTokenizerRequest()))
    assert error.code() is grpc.StatusCode.UNIMPLEMENTED
    with pytest.raises(UnsupportedCall):
        tokenizer_archive(None)


def test_equal_files_make_equal_archives() -> None:
    assert tokenizer_archive(DEMO) == tokenizer_archive(DEMO)


@pytest.mark.parametrize("limit", ["MOST_UNPACKED_BYTES", "MOST_ARCHIVE_BYTES"])
def test_a_tokenizer_that_no_client_accepts_is_refused(
    limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer_files, limit, 1000)
    with pytest.raises(Exhausted, match="at most 1000"):
        tokenizer_archive(DEMO)


def test_only_the_last_chunk_has_the_digest() -> None:
    archive = bytes(2 * CHUNK_BYTES + 1)
    parts = list(chunks(archive))
    assert [len(part.data) for part in parts] == [CHUNK_BYTES, CHUNK_BYTES, 1]
    assert [bool(part.sha256) for part in parts] == [False, False, True]
