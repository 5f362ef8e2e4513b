"""The demo model's tokenizer as an engine sends it."""

from __future__ import annotations

import hashlib
import io
import zipfile
from collections.abc import AsyncIterator
from pathlib import Path

from smg_grpc_proto.generated import common_pb2

DEMO = Path(__file__).parents[2] / "models" / "demo"
CHUNK = 65536


async def tokenizer_chunks() -> AsyncIterator[common_pb2.GetTokenizerChunk]:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
            archive.write(DEMO / name, name)
    data = content.getvalue()
    parts = [data[start : start + CHUNK] for start in range(0, len(data), CHUNK)]
    for part in parts[:-1]:
        yield common_pb2.GetTokenizerChunk(data=part)
    digest = hashlib.sha256(data).hexdigest()
    yield common_pb2.GetTokenizerChunk(data=parts[-1], sha256=digest)
