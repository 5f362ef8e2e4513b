"""The floor of a Python gRPC server: grpc.aio sends one token message per stream and step, nothing else.

The messages equal the router's, so no router over grpc.aio can cost less. Prints its port.
"""

from __future__ import annotations

# gRPC reads the environment when it is first imported.
import trtmesh.chassis.environment  # noqa: F401  # isort: skip

import asyncio
import sys
from typing import Any

import grpc
import uvloop
from trtmesh.v1 import generation_pb2 as pb
from trtmesh.v1 import router_pb2 as router_pb


class BareService:
    """Answers Generate with `max_tokens` tokens, one at each step."""

    def __init__(self) -> None:
        self.waiting: list[asyncio.Future[None]] = []

    async def generate(
        self, request: router_pb.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        for offset in range(request.config.stopping.max_tokens):
            step: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self.waiting.append(step)
            await step
            response = router_pb.GenerateResponse()
            tokens = response.events.add().tokens
            tokens.token_offset = offset
            tokens.token_ids.append(65)
            tokens.text = "a"
            await context.write(response)
        end = router_pb.ItemFinished(reason=pb.FINISH_REASON_LENGTH)
        event = router_pb.GenerateEvent(item_finished=end)
        await context.write(router_pb.GenerateResponse(events=[event]))

    async def step_for_ever(self, step_seconds: float) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            due += step_seconds
            await asyncio.sleep(max(0.0, due - loop.time()))
            waiting, self.waiting = self.waiting, []
            for step in waiting:
                if not step.done():
                    step.set_result(None)


async def main(step_ms: float) -> None:
    service = BareService()
    server = grpc.aio.server()
    generate = grpc.unary_stream_rpc_method_handler(
        service.generate,
        request_deserializer=router_pb.GenerateRequest.FromString,
        response_serializer=router_pb.GenerateResponse.SerializeToString,
    )
    handlers = grpc.method_handlers_generic_handler(
        "trtmesh.v1.MeshService", {"Generate": generate}
    )
    server.add_generic_rpc_handlers((handlers,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(port, flush=True)
    await service.step_for_ever(step_ms / 1000)


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main(float(sys.argv[1])))
