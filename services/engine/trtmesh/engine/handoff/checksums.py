"""The checksum of a part: the CRC-32 of all bytes."""

from __future__ import annotations

from collections.abc import Iterable

from trtmesh.chassis.http2.frames import Buffer
from trtmesh.engine.kv_memory import Bytes

try:
    # The same CRC-32, five times as fast.
    from isal.isal_zlib import crc32
except ImportError:
    # There are no wheels for some systems.
    from zlib import crc32

__all__ = ["checksum_of", "crc32"]


def checksum_of(pieces: Iterable[Bytes | Buffer], checksum: int = 0) -> int:
    """The checksum of a part in pieces, continued from the checksum of earlier pieces."""
    for piece in pieces:
        checksum = crc32(piece, checksum)
    return checksum
