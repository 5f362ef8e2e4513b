"""A scripted tokenizer over a real socket."""

from __future__ import annotations

import asyncio
from itertools import islice
from typing import Any

import grpc
from router.scripted import Context, Mortal, serving
from trtmesh.chassis.revisions import SCHEMA_REVISION
from trtmesh.v1 import tokenizer_pb2 as tpb
from trtmesh.v1 import tokenizer_pb2_grpc


class ScriptedTokenizer(Mortal, tokenizer_pb2_grpc.TokenizerServiceServicer):
    """A tokenizer with one letter per token, chr(id), and delayable answers."""

    def __init__(self, **description: Any) -> None:
        values: dict[str, Any] = {
            "model": "m",
            "fingerprint": "f1",
            "vocabulary_size": 128,
            "schema_revision": SCHEMA_REVISION,
        }
        self.description = tpb.GetTokenizerResponse(**values | description)
        self.commands: list[tpb.TokenizerCommand] = []
        self.streams = 0
        self.breaks_on_encode = False
        self.breaks_on_token: int | None = None
        self.forgets_a_text = False
        self.spells = True
        self.text_end = ""
        """The end of every conversation."""
        self.texts: dict[int, str] = {}
        """Tokens with a longer text."""
        self.stop_token: int | None = None
        """The last token of a stop text, for sequences that have one."""
        self.last_text = "."
        """Text held back to the end shows a missing wait for the end."""
        self.characters_of_id = 1
        """Characters of a text that make an id, that of the first."""
        self.omits: int | None = None
        """Ids that it claims to leave out of every text."""
        self.deaf_to: set[str] = set()
        """Kinds of commands, and texts, that get no answer."""
        self.broken = 0
        """Streams broken by a token."""
        self.answering = asyncio.Event()
        self.answering.set()

    @property
    def encodes(self) -> list[tpb.EncodeCommand]:
        return [c.encode for c in self.commands if c.HasField("encode")]

    @property
    def decodes(self) -> list[tpb.DecodeCommand]:
        return [c.decode for c in self.commands if c.HasField("decode")]

    @property
    def cancelled(self) -> list[int]:
        return [handle for c in self.commands for handle in c.cancel_encode.handles]

    async def GetTokenizer(self, request: Any, context: Context) -> tpb.GetTokenizerResponse:
        return self.description

    # mypy-protobuf types generators only; grpc.aio also accepts a coroutine with writes.
    async def Connect(self, request_iterator: Any, context: Context) -> None:  # type: ignore[override]
        self.streams += 1
        self._began(context)
        async for request in request_iterator:
            self.commands += request.commands
            for command in request.commands:
                await self._handle(command, context)

    async def _handle(self, command: tpb.TokenizerCommand, context: Context) -> None:
        event = tpb.TokenizerEvent()
        if {str(command.WhichOneof("command")), command.encode.text} & self.deaf_to:
            return
        if command.HasField("encode"):
            if self.breaks_on_encode:
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "message too large")
            self._encode(command.encode, event.encoded)
        elif command.HasField("decode"):
            decode = command.decode
            if self.breaks_on_token in decode.token_ids:
                self.broken += 1
                await context.abort(grpc.StatusCode.UNAVAILABLE, "the process died")
            ids = iter(decode.token_ids)
            event.decoded.handles.extend(decode.handles)
            stopping = {c.open_decode.handle for c in self.commands if c.open_decode.stop_texts}
            for handle, count in zip(decode.handles, decode.token_counts, strict=True):
                taken = [*islice(ids, count)]
                text = "".join(map(self._text, taken))
                if self.stop_token in taken and handle in stopping:
                    event.decoded.stops.add(handle=handle, token_count=count)
                is_last = handle in decode.finished_handles
                event.decoded.texts.append(text + self.last_text * is_last)
            if self.forgets_a_text:
                del event.decoded.texts[-1]
        else:
            return
        await self.answering.wait()
        await context.write(tpb.TokenizerServiceConnectResponse(events=[event]))

    def _text(self, token: int) -> str:
        return self.texts.get(token, chr(token))

    def _encode(self, command: tpb.EncodeCommand, encoded: tpb.Encoded) -> None:
        encoded.handle = command.handle
        text = command.chat.messages if command.HasField("chat") else command.text
        encoded.text_end = self.text_end
        ids = text[:: self.characters_of_id]
        omitted = len(ids) if 0 < command.max_token_ids < len(ids) else 0
        if omitted := omitted if self.omits is None else self.omits:
            encoded.omitted_token_ids = omitted
            return
        encoded.token_ids.extend(map(ord, ids))
        for word in command.words:
            whole = [token for token, text in self.texts.items() if text == word]
            encoded.words.add(ids=whole or map(ord, word))
        for word in command.spelled_words if self.spells else ():
            encoded.spelled_words.add().spellings.add(ids=map(ord, word))


def serving_tokenizer(tokenizer: ScriptedTokenizer) -> Any:
    return serving(tokenizer_pb2_grpc.add_TokenizerServiceServicer_to_server, tokenizer)
