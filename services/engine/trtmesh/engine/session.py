"""Opens a router's stream and carries commands and events until one side is done."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

import grpc
from trtmesh.chassis.errors import (
    InvalidField,
    InvalidRequest,
    SchemaMismatch,
    TokenizerMismatch,
)
from trtmesh.chassis.service import SCHEMA_REVISION
from trtmesh.engine.connection import Connection
from trtmesh.engine.worker import Worker
from trtmesh.v1 import engine_pb2 as epb

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[
    epb.EngineServiceConnectRequest, epb.EngineServiceConnectResponse
]


async def serve_stream(loaded: Callable[[], Worker], context: Context) -> None:
    """Serves one router until it half-closes or goes, or raises what ends the stream."""
    # Read even where all is refused: a write that fails hides the status from the router.
    opening = await context.read()
    if not isinstance(opening, epb.EngineServiceConnectRequest):
        return
    worker = loaded()
    connection = Connection(worker, _hello(worker, opening))
    log.info("router %s connected", connection.router)
    try:
        for command in opening.commands[1:]:
            connection.execute(command)
        await _first_done(_read(connection, context), _write(connection, worker, context))
    finally:
        # Before anything is awaited, so that the blocks are free within a step.
        connection.close()
        log.info("router %s is gone", connection.router)


def _hello(worker: Worker, opening: epb.EngineServiceConnectRequest) -> epb.HelloCommand:
    if not opening.commands or opening.commands[0].WhichOneof("command") != "hello":
        raise InvalidRequest("the first command of a stream must be hello")
    hello = opening.commands[0].hello
    if hello.schema_revision != SCHEMA_REVISION:
        raise SchemaMismatch(
            f"router {hello.router} speaks schema revision {hello.schema_revision} and worker {worker.name}"
            f" {SCHEMA_REVISION}; run equal versions"
        )
    own, other = worker.info.tokenizer_fingerprint, hello.tokenizer_fingerprint
    if own and other and own != other:
        raise TokenizerMismatch(
            f"router {hello.router} has tokenizer {other} and worker {worker.name} {own}; serve one model's files"
        )
    if hello.unacknowledged_steps < 1:
        raise InvalidField.of(
            "hello.unacknowledged_steps", hello.unacknowledged_steps, "at least 1"
        )
    return hello


async def _read(connection: Connection, context: Context) -> None:
    while True:
        request = await context.read()
        if not isinstance(request, epb.EngineServiceConnectRequest):
            return
        for command in request.commands:
            connection.execute(command)


async def _write(connection: Connection, worker: Worker, context: Context) -> None:
    outbox = connection.outbox
    while True:
        await outbox.filled.wait()
        outbox.filled.clear()
        while response := outbox.take(worker.streams.step_count):
            await context.write(response)
            connection.sent()
        if connection.farewell:
            raise connection.farewell


async def _first_done(*loops: Coroutine[Any, Any, None]) -> None:
    """Waits until one of the loops ends and raises its error; the others are cancelled."""
    tasks = [asyncio.ensure_future(loop) for loop in loops]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()
