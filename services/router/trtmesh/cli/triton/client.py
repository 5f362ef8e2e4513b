"""Client of a KServe server, over grpc.aio with the protocol's own messages."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Self

import grpc
import typer
from trtmesh.client.channel import ServerChannel, typed_errors
from trtmesh.kserve import grpc_service_pb2

SERVICE = "/inference.GRPCInferenceService/"


MAX_MESSAGE_BYTES = 2**31 - 1
"""As in Triton: logits of long prompts are large."""


class Compression(StrEnum):
    """Compression of the messages to a server."""

    NONE = "none"
    DEFLATE = "deflate"
    GZIP = "gzip"


@dataclass(frozen=True, slots=True)
class Security:
    """PEM texts for TLS; without root certificates those of gRPC count."""

    root_certificates: bytes | None = None
    private_key: bytes | None = None
    certificate_chain: bytes | None = None

    @classmethod
    def read(cls, *files: Path | None) -> Self:
        """From a file for each text. Raises BadParameter."""
        try:
            return cls(*(file.read_bytes() if file else None for file in files))
        except OSError as error:
            raise typer.BadParameter(f"cannot read {error.filename}: {error.strerror}") from error

    def credentials(self) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(
            self.root_certificates, self.private_key, self.certificate_chain
        )


class TritonConnection(ServerChannel):
    """A connection, open inside `async with`. Failures are TrtmeshErrors."""

    def __init__(
        self,
        address: str,
        security: Security | None = None,
        compression: Compression = Compression.NONE,
    ) -> None:
        credentials = security.credentials() if security else None
        super().__init__(address, max_message_bytes=MAX_MESSAGE_BYTES, credentials=credentials)
        self._compression = {
            Compression.NONE: grpc.Compression.NoCompression,
            Compression.DEFLATE: grpc.Compression.Deflate,
            Compression.GZIP: grpc.Compression.Gzip,
        }[compression]

    async def model_config(self, model: str) -> Any:
        """The ModelConfig of a model."""
        call = self.channel.unary_unary(
            f"{SERVICE}ModelConfig",
            request_serializer=grpc_service_pb2.ModelConfigRequest.SerializeToString,
            response_deserializer=grpc_service_pb2.ModelConfigResponse.FromString,
        )
        with typed_errors():
            response: Any = await call(grpc_service_pb2.ModelConfigRequest(name=model))
        return response.config

    async def stream(
        self, requests: AsyncIterator[Any], timeout_seconds: float | None
    ) -> AsyncGenerator[Any, None]:
        """Each ModelStreamInferResponse, until all requests are over. Leaving early cancels the requests."""
        open_stream: grpc.aio.StreamStreamMultiCallable[Any, Any] = self.channel.stream_stream(
            f"{SERVICE}ModelStreamInfer",
            request_serializer=grpc_service_pb2.ModelInferRequest.SerializeToString,
            response_deserializer=grpc_service_pb2.ModelStreamInferResponse.FromString,
        )
        call = open_stream(requests, timeout=timeout_seconds, compression=self._compression)
        try:
            with typed_errors():
                async for response in call:
                    yield response
        finally:
            call.cancel()
