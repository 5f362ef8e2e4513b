"""The tokenizer of the model directory as a zip archive, for gateways without a copy."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from hashlib import sha256
from io import BytesIO
from pathlib import Path

from smg_grpc_proto.generated import common_pb2
from trtmesh.chassis.errors import Exhausted, UnsupportedCall

FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("tokenizer.model", "spiece.model", "vocab.json", "merges.txt", "vocab.txt"),
    *("chat_template.jinja", "chat_template.json", "config.json", "generation_config.json"),
)
"""No name comes from a request."""

VOCABULARIES = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")
MOST_ARCHIVE_BYTES = 200 * 2**20
MOST_UNPACKED_BYTES = 500 * 2**20
"""Limits of the contract's clients."""
CHUNK_BYTES = 512 * 2**10
CONSTANT_TIME = (1980, 1, 1, 0, 0, 0)
"""Equal files make equal archives."""


def tokenizer_archive(model_dir: Path | None) -> bytes:
    """Blocks to compress. Raises UnsupportedCall without a tokenizer, and Exhausted for too large a tokenizer."""
    files = (
        [model_dir / name for name in FILES if (model_dir / name).is_file()] if model_dir else []
    )
    if not any(file.name in VOCABULARIES for file in files):
        raise UnsupportedCall(
            "this worker's model directory has no tokenizer; give the gateway one"
        )
    unpacked = sum(file.stat().st_size for file in files)
    _check("the files of the tokenizer take", unpacked, MOST_UNPACKED_BYTES)
    archive = BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as writer:
        for file in files:
            entry = zipfile.ZipInfo(file.name, CONSTANT_TIME)
            entry.compress_type = zipfile.ZIP_DEFLATED
            writer.writestr(entry, file.read_bytes())
    _check("the tokenizer's archive takes", archive.tell(), MOST_ARCHIVE_BYTES)
    return archive.getvalue()


def chunks(archive: bytes) -> Iterator[common_pb2.GetTokenizerChunk]:
    """The archive in parts, the last with the digest of all."""
    starts = range(0, len(archive), CHUNK_BYTES)
    for start in starts:
        part = common_pb2.GetTokenizerChunk(data=archive[start : start + CHUNK_BYTES])
        if start == starts[-1]:
            part.sha256 = sha256(archive).hexdigest()
        yield part


def _check(what: str, size: int, most: int) -> None:
    if size > most:
        raise Exhausted(
            f"{what} {size} bytes, but clients accept at most {most}; give the gateway the tokenizer itself"
        )
