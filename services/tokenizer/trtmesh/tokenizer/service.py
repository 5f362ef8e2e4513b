"""The tokenizer as a gRPC service."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterable, Sequence

import grpc
from trtmesh.chassis.errors import Draining, ModelUnusable, NoTokenizer, TrtmeshError
from trtmesh.chassis.process_facts import unix_ms
from trtmesh.chassis.progress import tell_progress
from trtmesh.chassis.revisions import SCHEMA_REVISION
from trtmesh.chassis.rpc import RpcContext, ServedContext
from trtmesh.chassis.service import Runtime
from trtmesh.chassis.spellings import Speller
from trtmesh.chassis.tokenizer_loading import for_words
from trtmesh.tokenizer.chat.answers import TemplateReader
from trtmesh.tokenizer.chat.renderer import ChatRenderer
from trtmesh.tokenizer.chat.speaking import ToolFormat, reasoning_format, tool_format
from trtmesh.tokenizer.decoding.states import Workload
from trtmesh.tokenizer.detokenizers.stop_vocabulary import StopVocabularies
from trtmesh.tokenizer.encoding import BatchEncoder, Encoder, encode_in_this_thread_alone
from trtmesh.tokenizer.metrics import TokenizerMetrics
from trtmesh.tokenizer.router_stream import (
    STREAM_LIMITS,
    DirectTexts,
    RouterStream,
    Shared,
    StreamLimits,
)
from trtmesh.tokenizer.settings import TokenizerSettings
from trtmesh.tokenizer.vocabulary import Vocabulary, load_vocabulary
from trtmesh.v1 import tokenizer_pb2 as pb
from trtmesh.v1 import tokenizer_pb2_grpc as pb_grpc

log = logging.getLogger(__name__)

FINAL_WRITE_SECONDS = 1.0
"""How long streams may take to send their last events when the process stops."""


class TokenizerService(pb_grpc.TokenizerServiceServicer):
    """Loads a tokenizer and serves any number of routers."""

    service_names: Sequence[str] = ("trtmesh.v1.TokenizerService",)

    def __init__(
        self, settings: TokenizerSettings, runtime: Runtime, limits: StreamLimits = STREAM_LIMITS
    ) -> None:
        self._settings = settings
        self._runtime = runtime
        self._limits = limits
        self._metrics = TokenizerMetrics()
        runtime.registry.register(self._metrics)
        self._tracer = runtime.tracer
        self._workload = Workload()
        self._instance = secrets.token_hex(8)
        self._shared: Shared | None = None
        self._streams: dict[asyncio.Task[None], RouterStream] = {}

    def register(self, server: grpc.aio.Server) -> None:
        pb_grpc.add_TokenizerServiceServicer_to_server(self, server)

    async def start(self) -> None:
        encode_in_this_thread_alone()
        tell_progress("reads the tokenizer")
        vocabulary = await asyncio.to_thread(load_vocabulary, self._settings.model_dir)
        stops = StopVocabularies(vocabulary.detokenizer, vocabulary.special_tokens)
        speller = Speller(for_words(vocabulary.tokenizer))
        most = self._settings.max_text_bytes
        batches = BatchEncoder(vocabulary.tokenizer, speller, stops, most)
        encoder = Encoder(batches, self._metrics)
        renderer = ChatRenderer(
            vocabulary.chat_templates,
            most,
            takes_templates=self._settings.allow_request_templates,
        )
        templates = vocabulary.chat_templates
        reader = TemplateReader(templates.response_template, most)
        self._tool_format = await self._usable(
            tool_format(templates, self._settings.tool_format), reader
        )
        self._shared = Shared(
            self._limits,
            vocabulary,
            encoder,
            renderer,
            reader,
            self._workload,
            self._metrics,
            self._tracer,
        )
        log.info(
            "tokenizer %s: %s, %d ids, %s decoding, fingerprint %s",
            vocabulary.model,
            vocabulary.kind,
            vocabulary.size,
            vocabulary.detokenizer.name,
            vocabulary.fingerprint,
        )

    async def _usable(self, found: ToolFormat, reader: TemplateReader) -> ToolFormat:
        """Returns the format, or NONE in place of a response template that cannot be followed. Raises ModelUnusable
        where the settings ask for the template."""
        if found is not ToolFormat.RESPONSE_TEMPLATE:
            return found
        try:
            await reader.read(pb.AnswerText(is_end=True))
        except TrtmeshError as error:
            await reader.close()
            if self._settings.tool_format is found:
                problem = f"tool_format response_template: {error.message}"
                raise ModelUnusable(f"{self._settings.model_dir}: {problem}") from None
            log.warning("calls of tools are not read: %s", error.message)
            return ToolFormat.NONE
        return found

    async def drain(self) -> None:
        await self._workload.drain()

    async def stop(self) -> None:
        for stream in self._streams.values():
            stream.finish(Draining("this tokenizer stops; use another", retry_after_ms=0))
        if self._streams:
            await asyncio.wait(self._streams, timeout=FINAL_WRITE_SECONDS)
        if self._shared is not None:
            self._shared.encoder.close()
            await self._shared.renderer.close()
            await self._shared.reader.close()

    # A coroutine that writes: a generator cancelled inside a write would wait for the garbage collector.
    async def Connect(  # type: ignore[override]
        self,
        request_iterator: AsyncIterable[pb.TokenizerServiceConnectRequest],
        context: ServedContext,
    ) -> None:
        stream = RouterStream(self._ready())
        task = asyncio.current_task()
        assert task is not None
        self._streams[task] = stream
        try:
            await stream.serve(context)
        finally:
            del self._streams[task]

    async def GetTokenizer(
        self, request: pb.GetTokenizerRequest, context: RpcContext
    ) -> pb.GetTokenizerResponse:
        vocabulary = self._ready().vocabulary
        described = _describe(vocabulary, self._settings, self._instance, self._tool_format)
        described.process.CopyFrom(self._runtime.process)
        described.unix_ms = unix_ms()
        return described

    def direct_texts(self) -> DirectTexts:
        """The texts of a router in this process, beside its stream. Call after `start`."""
        return DirectTexts(self._ready())

    def _ready(self) -> Shared:
        if self._shared is None:
            raise NoTokenizer(f"the tokenizer in {self._settings.model_dir} is still loading")
        return self._shared


def _describe(
    vocabulary: Vocabulary, settings: TokenizerSettings, instance: str, tools: ToolFormat
) -> pb.GetTokenizerResponse:
    reasoning = reasoning_format(vocabulary.chat_templates, settings.reasoning_format)
    return pb.GetTokenizerResponse(
        model=vocabulary.model,
        fingerprint=vocabulary.fingerprint,
        vocabulary_size=vocabulary.size,
        bos_id=vocabulary.bos_id,
        eos_id=vocabulary.eos_id,
        pad_id=vocabulary.pad_id,
        special_ids=vocabulary.special_ids,
        chat_template=vocabulary.chat_templates.default,
        kind=vocabulary.kind,
        schema_revision=SCHEMA_REVISION,
        max_text_bytes=settings.max_text_bytes,
        instance=instance,
        door_fingerprint=f"{vocabulary.door_fingerprint} {tools} {reasoning}",
        defaults=vocabulary.defaults,
        tool_format=tools,
        reasoning_format=reasoning,
    )
