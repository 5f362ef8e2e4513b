"""Who a foreign engine's model is: routers let workers of equal fingerprints continue each other's items."""

from __future__ import annotations

import asyncio
import io
import zipfile
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory

import grpc
from smg_grpc_proto.generated import common_pb2
from trtmesh.chassis.errors import ModelUnusable
from trtmesh.chassis.fingerprint import VOCABULARY_FILES, tokenizer_fingerprint
from trtmesh.engine.backends.foreign.contract import Contract, EngineFacts
from trtmesh.engine.model_fingerprint import model_fingerprint

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    *VOCABULARY_FILES,
)

MAX_ARCHIVE_BYTES = 200 * 2**20
MAX_FILE_BYTES = 200 * 2**20


def name_of(facts: EngineFacts) -> str:
    """The name that requests ask for: as with our own workers, that of the model's directory."""
    return Path(facts.model or facts.model_path).name


@dataclass(frozen=True, slots=True)
class Identity:
    """Fingerprints of model and tokenizer."""

    model: str
    tokenizer: str
    """'' if it is not known."""


async def identity_of(
    contract: Contract, facts: EngineFacts, model_dirs: Sequence[str]
) -> Identity:
    """Who the engine's model is. No contract tells anything about weights, so only a directory of `model_dirs` with the
    model's name makes a worker equal to one of ours. Raises ModelUnusable, or AioRpcError."""
    directory = next((Path(each) for each in model_dirs if Path(each).name == name_of(facts)), None)
    tokenizer = await _tokenizer_of(contract, facts, directory)
    if directory is None:
        return Identity(_told(facts, tokenizer), tokenizer)
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise ModelUnusable(f"{directory} has no weights; it stands in foreign.model_dirs")
    data_type = f"torch.{facts.data_type}"
    return Identity(
        await asyncio.to_thread(model_fingerprint, directory, files, data_type), tokenizer
    )


def _told(facts: EngineFacts, tokenizer: str) -> str:
    """Equal for engines of one name, type and tokenizer."""
    told = (
        name_of(facts),
        facts.data_type,
        facts.vocabulary_size,
        facts.details,
        tokenizer,
    )
    return "foreign-" + sha256(repr(told).encode()).hexdigest()


async def _tokenizer_of(contract: Contract, facts: EngineFacts, model_dir: Path | None) -> str:
    """The fingerprint of the engine's tokenizer: by its own files where it sends them, else by those of `model_dir`, or
    of the engine's directory if this machine has it. '' if none is known. Raises ModelUnusable, or AioRpcError."""
    try:
        archive = await _read(contract.tokenizer())
    except grpc.aio.AioRpcError as error:
        if error.code() is not grpc.StatusCode.UNIMPLEMENTED:
            raise
        directory = model_dir or Path(facts.model_path)
        return tokenizer_fingerprint(directory) if directory.is_dir() else ""
    own = _fingerprint_of_archive(archive)
    if model_dir is not None and tokenizer_fingerprint(model_dir) != own:
        raise ModelUnusable(f"the engine's tokenizer is another than that of {model_dir}")
    return own


async def _read(chunks: AsyncGenerator[common_pb2.GetTokenizerChunk, None]) -> bytes:
    """The archive. Raises ModelUnusable for one that is too large or damaged."""
    data, digest = bytearray(), ""
    async for chunk in chunks:
        data += chunk.data
        digest = chunk.sha256 or digest
        if len(data) > MAX_ARCHIVE_BYTES:
            raise ModelUnusable(f"the engine's tokenizer has more than {MAX_ARCHIVE_BYTES} bytes")
    if digest and sha256(data).hexdigest() != digest:
        raise ModelUnusable("the engine's tokenizer arrived damaged: its SHA-256 differs")
    return bytes(data)


def _fingerprint_of_archive(archive: bytes) -> str:
    """Only files of known names are taken out, so an archive writes nothing elsewhere."""
    with TemporaryDirectory(prefix="trtmesh-tokenizer-") as folder:
        try:
            with zipfile.ZipFile(io.BytesIO(archive)) as files:
                for name in set(TOKENIZER_FILES) & set(files.namelist()):
                    with files.open(name) as file:
                        content = file.read(MAX_FILE_BYTES + 1)
                    if len(content) > MAX_FILE_BYTES:
                        raise ModelUnusable(f"{name} of the engine's tokenizer is too large")
                    (Path(folder) / name).write_bytes(content)
        except zipfile.BadZipFile as error:
            raise ModelUnusable(f"the engine's tokenizer is no archive: {error}") from error
        return tokenizer_fingerprint(Path(folder))
