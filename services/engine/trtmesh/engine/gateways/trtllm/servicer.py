"""TrtllmService: the engine behind gateways with the contract of smg-grpc-proto."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import grpc
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import trtllm_service_pb2 as tpb
from smg_grpc_proto.generated import trtllm_service_pb2_grpc as tpb_grpc
from trtmesh.chassis.errors import (
    AlreadyExists,
    Exhausted,
    QueueFull,
    SlowClient,
    TrtmeshError,
    UnsupportedCall,
)
from trtmesh.chassis.json_text import load_json
from trtmesh.chassis.logs import rebind_request_id
from trtmesh.chassis.rpc import ServedContext, refuse
from trtmesh.chassis.service import Runtime
from trtmesh.engine.backend import HeldAdapter
from trtmesh.engine.gateways.trtllm.call import GenerateCall
from trtmesh.engine.gateways.trtllm.kv_feed import (
    FellBehind,
    KvSubscription,
    OutOfRange,
    first_number,
)
from trtmesh.engine.gateways.trtllm.request import AskedGeneration, contract_name, parse_generate
from trtmesh.engine.gateways.trtllm.texts import Texts
from trtmesh.engine.gateways.trtllm.tokenizer_files import chunks, tokenizer_archive
from trtmesh.engine.service.streams import LoadedEngine
from trtmesh.engine.service.submission import MAX_HANDLES, never_fits

FEATURES = {
    "beam_search": "beam_search.beam_width",
    "guided_decoding": "guided_decoding.guide_type",
    "logprobs": "output.log_probs",
    "lora": "lora.id",
    "prompt_logprobs": "output.prompt_log_probs",
    "context_logits": "output.context_logits",
    "generation_logits": "output.generation_logits",
}
"""Words of `supported_features`, by the needed field."""

UNREAD_SECONDS = 120.0
"""Longest time in which a client does not read an answer."""

MOST_SUBSCRIBERS = 32
"""Each costs a snapshot at the start, and keeps all unread by the client."""


class TrtllmService(tpb_grpc.TrtllmServiceServicer):
    """Implements Gateway: translates calls into items of the engine, and their output into answers."""

    service_name = "trtllm.TrtllmService"

    def __init__(
        self,
        loaded: Callable[[], LoadedEngine],
        runtime: Runtime,
        sessions: set[asyncio.Task[None]],
    ) -> None:
        """`loaded` raises Unavailable before the model is there; `sessions` gets the tasks of the streams."""
        self._loaded = loaded
        self._runtime = runtime
        self._sessions = sessions
        self._calls: dict[str, GenerateCall] = {}
        self._subscribers = 0
        self._texts: Texts | None = None
        self._numbers_from = first_number(time.time())
        self._archive: bytes | None = None
        self._packing = asyncio.Lock()

    def register(self, server: grpc.aio.Server) -> None:
        tpb_grpc.add_TrtllmServiceServicer_to_server(self, server)

    async def load(self, model_dir: Path | None) -> None:
        """Loads the tokenizer of the model, if any."""
        self._texts = await asyncio.to_thread(Texts.load, model_dir)

    async def Generate(self, request: tpb.GenerateRequest, context: ServedContext) -> None:
        with self._session():
            rebind_request_id(request.request_id)
            try:
                engine = self._loaded()
                with self._call(request, engine) as call:
                    while answers := await call.next():
                        for answer in answers:
                            await _write(context, answer)
            except TrtmeshError as error:
                await refuse(context, error, error.sentence(contract_name))

    async def Abort(self, request: tpb.AbortRequest, context: ServedContext) -> tpb.AbortResponse:
        call = self._calls.get(request.request_id)
        if call is None:
            return tpb.AbortResponse(success=False, message="no such request is running")
        call.abort()
        return tpb.AbortResponse(success=True, message="stopped")

    async def Embed(self, request: tpb.EmbedRequest, context: ServedContext) -> tpb.EmbedResponse:
        rebind_request_id(request.request_id)
        raise UnsupportedCall("this worker generates and does not embed")

    async def HealthCheck(
        self, request: tpb.HealthCheckRequest, context: ServedContext
    ) -> tpb.HealthCheckResponse:
        # After any answer a gateway asks for the model.
        self._loaded()
        problems = self._runtime.health.problems
        text = "; ".join(f"{component}: {problem}" for component, problem in problems.items())
        return tpb.HealthCheckResponse(status=text or "OK")

    async def GetModelInfo(
        self, request: tpb.GetModelInfoRequest, context: ServedContext
    ) -> tpb.GetModelInfoResponse:
        engine = self._loaded()
        info, sizes = engine.info, _sizes(engine.settings.model_dir)
        longest = info.max_sequence_tokens - 1
        return tpb.GetModelInfoResponse(
            model_id=info.model,
            max_input_len=min(longest, info.max_prompt_tokens or longest),
            max_seq_len=info.max_sequence_tokens,
            max_batch_size=info.max_batch_size,
            vocab_size=info.vocabulary_size,
            hidden_size=sizes.get("hidden_size", 0),
            num_layers=sizes.get("num_hidden_layers", 0),
            num_heads=sizes.get("num_attention_heads", 0),
            supported_features=[
                word for word, field in FEATURES.items() if field in info.supported_fields
            ],
        )

    async def GetServerInfo(
        self, request: tpb.GetServerInfoRequest, context: ServedContext
    ) -> tpb.GetServerInfoResponse:
        # Sizes stay 0: backends spread a model over devices in ways of their own, and do not report how.
        return tpb.GetServerInfoResponse(
            version=version("trtmesh"), backend=self._loaded().info.backend
        )

    async def GetTokenizer(
        self, request: common_pb2.GetTokenizerRequest, context: ServedContext
    ) -> None:
        engine = self._loaded()
        # Packed once: calls share the archive, however slowly clients read.
        async with self._packing:
            if self._archive is None:
                self._archive = await asyncio.to_thread(
                    tokenizer_archive, engine.settings.model_dir
                )
        for chunk in chunks(self._archive):
            await _write(context, chunk)

    async def SubscribeKvEvents(
        self, request: common_pb2.SubscribeKvEventsRequest, context: ServedContext
    ) -> None:
        """`load_records_before_first_batch` changes nothing: the snapshot comes at once as the first batch."""
        with self._session():
            engine = self._loaded()
            with self._subscriber():
                try:
                    subscription = KvSubscription(
                        engine, self._numbers_from, request.start_sequence_number
                    )
                except OutOfRange:
                    await context.abort(
                        grpc.StatusCode.OUT_OF_RANGE,
                        f"events after {request.start_sequence_number} are not kept; start at 0",
                    )
                try:
                    await self._feed(subscription, engine, context)
                finally:
                    subscription.close()

    @contextmanager
    def _subscriber(self) -> Iterator[None]:
        """Counts a subscriber. Raises Exhausted at the limit."""
        if self._subscribers >= MOST_SUBSCRIBERS:
            raise Exhausted(
                f"{self._subscribers} subscribers of KV events are connected; end one of them first",
                limit=f"at most {MOST_SUBSCRIBERS}",
            )
        self._subscribers += 1
        try:
            yield
        finally:
            self._subscribers -= 1

    async def _feed(
        self, subscription: KvSubscription, engine: LoadedEngine, context: ServedContext
    ) -> None:
        # Clients take a subscription without headers for dead.
        await context.send_initial_metadata(())
        try:
            while batches := await subscription.next():
                for batch in batches:
                    await _write(context, batch)
        except FellBehind:
            await context.abort(
                grpc.StatusCode.DATA_LOSS, "events were dropped, which were not read; start at 0"
            )

    @contextmanager
    def _session(self) -> Iterator[None]:
        task = asyncio.current_task()
        assert task is not None
        self._sessions.add(task)
        try:
            yield
        finally:
            self._sessions.discard(task)

    @contextmanager
    def _call(self, request: tpb.GenerateRequest, engine: LoadedEngine) -> Iterator[GenerateCall]:
        """A running item, stopped on exit."""
        try:
            asked = self._parsed(request, engine)
            call = GenerateCall(engine, asked, self._texts)
        except TrtmeshError as error:
            engine.metrics.errors[error.reason] += 1
            raise
        try:
            self._submit(call, engine)
            self._calls[asked.request_id] = call
            yield call
        finally:
            if self._calls.get(asked.request_id) is call:
                del self._calls[asked.request_id]
            call.close()

    def _parsed(self, request: tpb.GenerateRequest, engine: LoadedEngine) -> AskedGeneration:
        room = engine.settings.max_message_bytes // 2
        versions = _versions(engine.held_adapters)
        asked = parse_generate(request, engine.info, self._texts, versions, room)
        if asked.request_id in self._calls:
            raise AlreadyExists(
                "names a running request; take another, or abort that one first",
                field="request_id",
                value=asked.request_id,
            )
        self._check_room(asked.sequences)
        return asked

    def _check_room(self, sequences: int) -> None:
        """Calls may wait for slow clients after the engine is done, so the engine's queue does not bound calls."""
        most = MAX_HANDLES
        if sequences > most:
            raise never_fits(sequences, most)
        present = sum(call.sequences for call in self._calls.values())
        if present + sequences > most:
            raise QueueFull.of(most, f"the open calls have {present} sequences")

    def _submit(self, call: GenerateCall, engine: LoadedEngine) -> None:
        try:
            call.submit()
        except TrtmeshError as error:
            engine.metrics.errors[error.reason] += 1
            raise


def _versions(held: Iterable[HeldAdapter]) -> Mapping[int, Sequence[str]]:
    versions = defaultdict[int, list[str]](list)
    for each in held:
        if each.error is None:
            versions[each.adapter.id].append(each.adapter.version)
    return versions


async def _write(context: ServedContext, answer: Any) -> None:
    """Raises SlowClient where the client does not read in time."""
    try:
        async with asyncio.timeout(UNREAD_SECONDS):
            await context.write(answer)
    except TimeoutError:
        raise SlowClient(f"the client did not read an answer within {UNREAD_SECONDS:g} s") from None


def _sizes(model_dir: Path | None) -> dict[str, int]:
    """The sizes in the model's config.json, of the text model if there are several."""
    try:
        config = load_json((model_dir / "config.json").read_text("utf-8")) if model_dir else {}
    except (OSError, ValueError):
        return {}
    parts = config.get("text_config", config)
    return {name: value for name, value in parts.items() if isinstance(value, int)}
