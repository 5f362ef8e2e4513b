"""The tokenizer inside this process: short texts and tokens by direct calls, all else by its stream."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Protocol

from trtmesh.chassis.errors import TrtmeshError
from trtmesh.chassis.grpc.client import Connection
from trtmesh.chassis.service import Runtime, Service
from trtmesh.chassis.settings import ServiceSettings
from trtmesh.router.links.local import LOCAL, LocalService
from trtmesh.router.links.replica import LinkRules
from trtmesh.router.tokenizers.decoding import DecodedSequence, TextOptions
from trtmesh.router.tokenizers.tokenizer import EncodeJob, Pool, Tokenizer
from trtmesh.v1 import tokenizer_pb2 as pb

MOST_OPENED_TOKENS = 4096
"""Most tokens of sequences opened by calls in a pass of the event loop, which take a millisecond."""


class StopFound(Protocol):
    """A stop text that tokens completed."""

    @property
    def stop_index(self) -> int: ...

    @property
    def token_count(self) -> int: ...


class DirectTexts(Protocol):
    """A tokenizer, as called by a router in the same process."""

    def encode(self, command: pb.EncodeCommand) -> pb.Encoded | None:
        """Encodes a lone short text; None for any other text. Raises the error of the text."""

    def open(
        self, handle: int, request_id: str, options: TextOptions, delivered: Sequence[int]
    ) -> None:
        """Opens a sequence. The first `decode` raises the failure, if any."""

    def decode(
        self, handle: int, token_ids: list[int], *, finished: bool
    ) -> tuple[str, StopFound | None]:
        """Decodes new tokens of a sequence. Raises the failure of the sequence."""

    def close(self, handles: Iterable[int]) -> None:
        """Drops sequences."""

    def end(self) -> None:
        """Drops all sequences."""


class TextService(Service, Protocol):
    """A tokenizer service that can be called directly."""

    def direct_texts(self) -> DirectTexts:
        """The texts of a router. Call after `start`."""


class LocalTexts(LocalService):
    """A tokenizer service of this process."""

    def __init__(self, service: TextService, settings: ServiceSettings, runtime: Runtime) -> None:
        super().__init__(service, settings, runtime)
        self.direct_texts = service.direct_texts


class LocalTokenizer(Tokenizer):
    """The tokenizer of this process."""

    def __init__(self, local: LocalTexts, rules: LinkRules, pool: Pool) -> None:
        super().__init__(LOCAL, rules, pool, local)
        self._direct_texts = local.direct_texts
        self._texts: DirectTexts | None = None
        """Of the stream under way."""
        self._direct: set[int] = set()
        """Handles of sequences decoded by calls."""
        self._opened_tokens = 0
        """Of sequences opened by calls in this pass."""

    async def serve_stream(self, connection: Connection) -> None:
        self._texts = texts = self._direct_texts()
        try:
            await super().serve_stream(connection)
        finally:
            self._texts = None
            texts.end()

    def encode(self, job: EncodeJob) -> None:
        try:
            encoded = self._texts.encode(job.command) if self._texts is not None else None
        except TrtmeshError as error:
            job.done.set_exception(error)
            return
        if encoded is None:
            super().encode(job)
        else:
            job.done.set_result(encoded)

    def open(self, sequence: DecodedSequence) -> None:
        texts, size = self._texts, len(sequence.token_ids)
        if texts is None or self._opened_tokens + size > MOST_OPENED_TOKENS:
            super().open(sequence)
            return
        if size:
            if not self._opened_tokens:
                asyncio.get_running_loop().call_soon(self._next_pass)
            self._opened_tokens += size
        handle = sequence.decode_handle = self._free_handle(self._sequences)
        self._sequences[handle] = sequence
        self._direct.add(handle)
        sequence.decoder = self
        delivered = sequence.token_ids[: sequence.decoded]
        texts.open(handle, sequence.request_id, sequence.text_options, delivered)
        if sequence.decoded < len(sequence.token_ids):
            self.decode(sequence, sequence.token_ids[sequence.decoded :])
        if sequence.ended and not sequence.over:
            self.finish(sequence)

    def _next_pass(self) -> None:
        self._opened_tokens = 0

    def decode(self, sequence: DecodedSequence, token_ids: list[int]) -> None:
        if sequence.decode_handle in self._direct:
            self._decode_now(sequence, token_ids, finished=False)
        else:
            super().decode(sequence, token_ids)

    def finish(self, sequence: DecodedSequence) -> None:
        if sequence.decode_handle in self._direct:
            self._decode_now(sequence, [], finished=True)
        else:
            super().finish(sequence)

    def _decode_now(
        self, sequence: DecodedSequence, token_ids: list[int], *, finished: bool
    ) -> None:
        """Gives a sequence the text of its tokens."""
        if self._texts is None:
            # The stream ends, and `lost` gives the sequence to another tokenizer.
            return
        handle = sequence.decode_handle
        try:
            text, stop = self._texts.decode(handle, token_ids, finished=finished)
        except TrtmeshError as error:
            self._on_decode_failed(handle, error)
            return
        if stop is None:
            sequence.on_text(len(token_ids), text)
        else:
            sequence.on_stop_text(stop.token_count, text, stop.stop_index)
        if finished:
            sequence.on_text_complete()

    def drop(self, sequence: DecodedSequence) -> None:
        handle = sequence.decode_handle
        if handle not in self._direct:
            super().drop(sequence)
            return
        self._direct.remove(handle)
        del self._sequences[handle]
        if self._texts is not None:
            self._texts.close((handle,))

    def lost(self, problem: str) -> None:
        self._direct.clear()
        super().lost(problem)
