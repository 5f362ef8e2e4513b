"""Opens a router's stream and carries commands and events until one side ends."""

from __future__ import annotations

import logging
from collections.abc import Callable

from trtmesh.chassis.errors import InvalidField, InvalidRequest, SchemaMismatch, TokenizerMismatch
from trtmesh.chassis.fingerprint import tokenizer_fits
from trtmesh.chassis.rpc import RpcContext
from trtmesh.chassis.service import SCHEMA_REVISION
from trtmesh.chassis.tasks import until_first_ends
from trtmesh.engine.service.loaded_engine import LoadedEngine
from trtmesh.engine.service.router_session import RouterSession
from trtmesh.v1 import engine_pb2 as epb

log = logging.getLogger(__name__)


async def serve_stream(loaded: Callable[[], LoadedEngine], context: RpcContext) -> None:
    """Serves one router until it half-closes or disconnects. Raises the error of the stream."""
    # Read before any refusal: a failed write would hide the status from the router.
    opening = await context.read()
    if not isinstance(opening, epb.EngineServiceConnectRequest):
        return
    engine = loaded()
    session = RouterSession(engine, _hello(engine, opening))
    log.info("router %s connected", session.router)
    try:
        for command in opening.commands[1:]:
            session.execute(command)
        await until_first_ends(_read(session, context), _write(session, engine, context))
    finally:
        # Before any await: the blocks are free within a step.
        session.close()
        log.info("router %s is gone", session.router)


def _hello(engine: LoadedEngine, opening: epb.EngineServiceConnectRequest) -> epb.HelloCommand:
    if not opening.commands or opening.commands[0].WhichOneof("command") != "hello":
        raise InvalidRequest("the first command of a stream must be hello")
    hello = opening.commands[0].hello
    if hello.schema_revision != SCHEMA_REVISION:
        raise SchemaMismatch(
            f"router {hello.router} speaks schema revision {hello.schema_revision} and worker {engine.name}"
            f" {SCHEMA_REVISION}; run equal versions"
        )
    own, other = engine.info.tokenizer_fingerprint, hello.tokenizer_fingerprint
    if not tokenizer_fits(own, other):
        known = own or "none beside its weights"
        raise TokenizerMismatch(
            f"router {hello.router} has tokenizer {other} and worker {engine.name} {known}; serve one model's files,"
            " the tokenizer files included"
        )
    if hello.unacknowledged_steps < 1:
        raise InvalidField.of(
            "hello.unacknowledged_steps", hello.unacknowledged_steps, "at least 1"
        )
    return hello


async def _read(session: RouterSession, context: RpcContext) -> None:
    while True:
        request = await context.read()
        if not isinstance(request, epb.EngineServiceConnectRequest):
            return
        for command in request.commands:
            session.execute(command)


async def _write(session: RouterSession, engine: LoadedEngine, context: RpcContext) -> None:
    outbox = session.outbox
    while True:
        await outbox.filled.wait()
        outbox.filled.clear()
        while response := outbox.take(engine.streams.step_count):
            await context.write(response)
            session.sent()
        outbox.check_open()
