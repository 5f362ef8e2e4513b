"""Client of a KServe server, over grpc.aio with the protocol's own messages."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
from trtmesh.client.channel import ServerChannel, typed_errors
from trtmesh.kserve import grpc_service_pb2

SERVICE = "/inference.GRPCInferenceService/"


class TritonConnection(ServerChannel):
    """A connection, open inside `async with`. Failures are TrtmeshErrors."""

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
    ) -> AsyncIterator[Any]:
        """Each ModelStreamInferResponse, until all requests are over. Leaving early cancels the requests."""
        open_stream: grpc.aio.StreamStreamMultiCallable[Any, Any] = self.channel.stream_stream(
            f"{SERVICE}ModelStreamInfer",
            request_serializer=grpc_service_pb2.ModelInferRequest.SerializeToString,
            response_deserializer=grpc_service_pb2.ModelStreamInferResponse.FromString,
        )
        call = open_stream(requests, timeout=timeout_seconds)
        try:
            with typed_errors():
                async for response in call:
                    yield response
        finally:
            call.cancel()
