"""Settings of a tokenizer process."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Self

from pydantic import model_validator
from trtmesh.chassis.settings import Port
from trtmesh.chassis.tls.settings import SecuredSettings
from trtmesh.tokenizer.chat.speaking import ReasoningFormat, ToolFormat
from trtmesh.tokenizer.encoding import EncodingSettings


class TokenizerSettings(SecuredSettings):
    """Settings of a tokenizer process."""

    section: ClassVar[str] = "tokenizer"

    port: Port = 9001
    """Port of the gRPC server."""
    model_dir: Path
    """Directory with tokenizer.json, or older tokenizer files, and tokenizer_config.json."""
    encoding: EncodingSettings = EncodingSettings()
    allow_request_templates: bool = False
    """Whether a request may bring a chat template of its own, to run in the process for templates."""
    tool_format: ToolFormat = ToolFormat.AUTO
    """How the model writes calls of tools; auto goes by its chat template."""
    reasoning_format: ReasoningFormat = ReasoningFormat.AUTO
    """How the model writes its reasoning; auto goes by its chat template."""

    @model_validator(mode="after")
    def _an_answer_fits_a_message(self) -> Self:
        # A word of one byte can take eight in the answer: an id of four and the frame around it.
        if self.encoding.max_text_bytes * 8 > self.max_message_bytes:
            raise ValueError(
                f"encoding.max_text_bytes is {self.encoding.max_text_bytes} but must be at most an eighth of"
                f" max_message_bytes, which is {self.max_message_bytes}, for the ids of the text to fit"
            )
        return self
