"""Settings of a tokenizer process."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from trtmesh.chassis.settings import Port
from trtmesh.chassis.tls.settings import SecuredSettings
from trtmesh.tokenizer.chat.speaking import ReasoningFormat, ToolFormat


class TokenizerSettings(SecuredSettings):
    """Settings of a tokenizer process."""

    section: ClassVar[str] = "tokenizer"

    port: Port = 9001
    """Port of the gRPC server."""
    model_dir: Path
    """Directory with tokenizer.json, or older tokenizer files, and tokenizer_config.json."""
    allow_request_templates: bool = False
    """Whether a request may bring a chat template of its own, to run in the process for templates."""
    tool_format: ToolFormat = ToolFormat.AUTO
    """How the model writes calls of tools; auto goes by its chat template."""
    reasoning_format: ReasoningFormat = ReasoningFormat.AUTO
    """How the model writes its reasoning; auto goes by its chat template."""

    @property
    def max_text_bytes(self) -> int:
        """Most bytes of a text with its words, so that their ids fit a message: a word of one byte can take eight, an
        id of four and the frame around it. Half of what fits bounds the time of an encode to a second."""
        return self.max_message_bytes // 16
