"""Client of a KServe server, over grpc.aio with the protocol's own messages."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from enum import StrEnum
from typing import Any

import grpc
from trtmesh.chassis.bearer import ApiKey
from trtmesh.chassis.tls.client import ClientTls
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


class TritonConnection(ServerChannel):
    """A connection, open inside `async with`. Failures are TrtmeshErrors."""

    def __init__(
        self,
        address: str,
        tls: ClientTls | None = None,
        compression: Compression = Compression.NONE,
        api_key: ApiKey | None = None,
    ) -> None:
        super().__init__(address, max_message_bytes=MAX_MESSAGE_BYTES, tls=tls, secret=api_key)
        self._compression = {
            Compression.NONE: grpc.Compression.NoCompression,
            Compression.DEFLATE: grpc.Compression.Deflate,
            Compression.GZIP: grpc.Compression.Gzip,
        }[compression]

    async def model_config(self, model: str) -> Any:
        """The ModelConfig of a model."""
        request = grpc_service_pb2.ModelConfigRequest(name=model)
        response = await self._ask("ModelConfig", request, grpc_service_pb2.ModelConfigResponse)
        return response.config

    async def release(self) -> str:
        """Name and version of the server."""
        request = grpc_service_pb2.ServerMetadataRequest()
        told = await self._ask("ServerMetadata", request, grpc_service_pb2.ServerMetadataResponse)
        return f"{told.name} {told.version}"

    async def infer(self, request: Any) -> Any:
        """The ModelInferResponse of a request that is not streamed."""
        return await self._ask("ModelInfer", request, grpc_service_pb2.ModelInferResponse)

    async def _ask(self, method: str, request: Any, response: Any) -> Any:
        call: grpc.aio.UnaryUnaryMultiCallable[Any, Any] = self.channel.unary_unary(
            f"{SERVICE}{method}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=response.FromString,
        )
        with typed_errors(self.address):
            return await call(request, metadata=self.metadata, compression=self._compression)

    async def stream(
        self, requests: AsyncIterator[Any], timeout_seconds: float | None
    ) -> AsyncGenerator[Any, None]:
        """Each ModelStreamInferResponse, until all requests are over. Leaving early cancels the requests."""
        open_stream: grpc.aio.StreamStreamMultiCallable[Any, Any] = self.channel.stream_stream(
            f"{SERVICE}ModelStreamInfer",
            request_serializer=grpc_service_pb2.ModelInferRequest.SerializeToString,
            response_deserializer=grpc_service_pb2.ModelStreamInferResponse.FromString,
        )
        call = open_stream(
            requests,
            timeout=timeout_seconds,
            metadata=self.metadata,
            compression=self._compression,
        )
        try:
            with typed_errors(self.address):
                async for response in call:
                    yield response
        finally:
            call.cancel()
