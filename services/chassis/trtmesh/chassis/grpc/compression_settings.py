"""Settings of the compression of answers."""

from __future__ import annotations

from typing import Literal

from trtmesh.chassis.settings import Settings


class CompressionSettings(Settings):
    """Compression of large messages to gRPC clients, by gzip or deflate. It takes 15 to 45 ns of CPU a byte on a thread
    of its own, which pays on connections below 100 to 300 Mbit/s. A message of less than 16 KiB, or
    that shrinks by less than an eighth, is sent as it is."""

    answers: Literal["asked", "accepted", "never"] = "asked"
    """`asked` compresses answers to requests that come compressed, by the request's encoding: many clients announce
    with every call that they accept gzip, without a reason to want it. `accepted` compresses answers to all of these
    as well."""
