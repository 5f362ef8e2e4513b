"""Sequences as tokenizers see them: tokens in, text out."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

from trtmesh.chassis.errors import TrtmeshError
from trtmesh.chassis.frozen import frozen


@frozen
class TextOptions:
    """How ids become text, under the names of OpenDecodeCommand."""

    skip_special_tokens: bool = True
    stop_texts: tuple[str, ...] = ()
    include_stop_text: bool = False
    min_tokens: int = 0
    """Fewest tokens before the one that completes a stop text."""
    prompt_token_ids: tuple[int, ...] = ()
    """The last tokens of the prompt that the text continues."""
    prompt_is_cut: bool = False
    """Whether the prompt has more tokens."""


class Decoder(Protocol):
    """Turns the tokens of sequences into text."""

    def decode(self, sequence: DecodedSequence, token_ids: list[int]) -> None:
        """Requests the text of new tokens; `sequence.on_text` or `sequence.on_stop_text` answers."""

    def finish(self, sequence: DecodedSequence) -> None:
        """Requests the rest of the text; `on_text` answers, then `on_text_complete`."""

    def restart(self, sequence: DecodedSequence) -> None:
        """Forgets all tokens of a sequence and every open request for them."""

    def drop(self, sequence: DecodedSequence) -> None:
        """Forgets the sequence without an answer."""


class DecodedSequence(ABC):
    """A sequence on its way from tokens to text.

    Invariant: the text of `token_ids[:decoded]` arrived, `token_ids[decoded:]` is at the decoder.
    """

    __slots__ = (
        "_decoded_at_loss",
        "decode_handle",
        "decoded",
        "decoder",
        "decoder_losses",
        "model",
        "over",
        "request_id",
        "sequence_index",
        "text_options",
        "token_ids",
    )

    def __init__(
        self, model: str, text_options: TextOptions, request_id: str = "", sequence_index: int = 0
    ) -> None:
        self.model = model
        self.text_options = text_options
        self.request_id = request_id
        self.sequence_index = sequence_index
        self.token_ids: list[int] = []
        self.decoded = 0
        self.decoder: Decoder | None = None
        self.decode_handle = 0
        self.decoder_losses = 0
        """Tokenizers lost in a row without progress."""
        self._decoded_at_loss = 0
        self.over = False
        """Set after the last text, a failure or an abandonment."""

    @property
    @abstractmethod
    def ended(self) -> bool:
        """Whether `token_ids` is complete."""

    @abstractmethod
    def on_text(self, token_count: int, text: str) -> None:
        """Takes the text of the next `token_count` tokens."""

    @abstractmethod
    def on_stop_text(self, token_count: int, text: str, stop_index: int) -> None:
        """A stop text was complete after `token_count` more tokens; later tokens are void."""

    @abstractmethod
    def on_text_complete(self) -> None:
        """The decoder answered `finish`."""

    @abstractmethod
    def on_failure(self, error: TrtmeshError) -> None:
        """No tokenizer decodes the tokens."""

    def note_decoder_lost(self) -> int:
        """Counts a tokenizer lost with text outstanding; returns the number lost in a row without progress."""
        if self.decoded > self._decoded_at_loss:
            self.decoder_losses, self._decoded_at_loss = 0, self.decoded
        if self.decoded < len(self.token_ids) or self.ended:
            self.decoder_losses += 1
        return self.decoder_losses

    def forget_tokens(self) -> None:
        """Starts over without tokens and text."""
        self.token_ids = []
        self.decoded = self._decoded_at_loss = 0
        if self.decoder is not None:
            self.decoder.restart(self)


class WholeText(DecodedSequence):
    """A complete list of ids, and its text as a future."""

    __slots__ = ("_parts", "text")

    def __init__(self, model: str, text_options: TextOptions, token_ids: Sequence[int]) -> None:
        super().__init__(model, text_options)
        self.token_ids = list(token_ids)
        self.text: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._parts: list[str] = []

    @property
    def ended(self) -> bool:
        return True

    def on_text(self, token_count: int, text: str) -> None:
        self.decoded += token_count
        self._parts.append(text)

    def on_stop_text(self, token_count: int, text: str, stop_index: int) -> None:
        self.on_text(token_count, text)
        self.on_text_complete()

    def on_text_complete(self) -> None:
        self.over = True
        if not self.text.done():
            self.text.set_result("".join(self._parts))

    def on_failure(self, error: TrtmeshError) -> None:
        self.over = True
        if not self.text.done():
            self.text.set_exception(error)

    def close(self) -> None:
        """Drops the sequence from its tokenizer."""
        self.over = True
        if self.decoder is not None:
            self.decoder.drop(self)
