"""Settings of a tokenizer process."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Self

from pydantic import Field, model_validator
from trtmesh.chassis.settings import Port, ServiceSettings

Count = Annotated[int, Field(ge=1, le=1_000_000)]


class TokenizerSettings(ServiceSettings):
    """What a tokenizer can be told."""

    section: ClassVar[str] = "tokenizer"

    port: Port = 9001
    """Port of the gRPC server."""
    model_dir: Path
    """Directory with tokenizer.json, or older tokenizer files, and tokenizer_config.json."""
    max_text_bytes: Annotated[int, Field(ge=1, le=2**30)] = 4 * 2**20
    """Longest text and words of one encode, in bytes of UTF-8; a longer one is refused with INVALID_FIELD."""
    long_text_bytes: Annotated[int, Field(ge=1, le=2**30)] = 16 * 2**10
    """Size from which an encode takes the lane of long texts, and from 16 times that on the lane of huge ones."""
    encode_threads: Annotated[int, Field(ge=1, le=256)] = 2
    """Threads that encode short texts; one more encodes long ones, and one more huge ones."""
    max_batch_bytes: Annotated[int, Field(ge=1, le=2**30)] = 64 * 2**10
    """Most text that one thread takes from the queue at once; a text of any size goes alone."""
    max_queued_encodes: Count = 8192
    """Most encodes of short texts that wait; one more is refused with QUEUE_FULL."""
    max_queued_long_encodes: Count = 1024
    """Most encodes of long texts that wait, and of huge ones; one more is refused with QUEUE_FULL."""
    max_handles: Count = 65_536
    """Most decode states of one stream; one more fails with QUEUE_FULL."""
    max_unsent_events: Count = 1024
    """Events that may wait for a router to read them before no more of its commands are read."""

    @model_validator(mode="after")
    def _an_answer_fits_a_message(self) -> Self:
        # A word of one byte can take eight in the answer: an id of four and the frame around it.
        if self.max_text_bytes * 8 > self.max_message_bytes:
            raise ValueError(
                f"max_text_bytes is {self.max_text_bytes} but must be at most an eighth of max_message_bytes, "
                f"which is {self.max_message_bytes}, for the ids of the text to fit"
            )
        return self
