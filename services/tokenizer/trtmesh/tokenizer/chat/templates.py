"""The chat templates of a model directory, and the special tokens for templates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtmesh.chassis.errors import InvalidField, InvalidRequest, ModelUnusable

TEMPLATE_FILE = "chat_template.jinja"
NAMED_TEMPLATES = "additional_chat_templates"
"""A folder of further named templates."""
DEFAULT, WITH_TOOLS = "default", "tool_use"

SPECIAL_TOKENS = (
    *("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"),
)
"""Special tokens passed to templates, as in transformers."""


@dataclass(frozen=True, slots=True)
class ChatTemplates:
    """Templates by name, and special tokens by theirs."""

    by_name: Mapping[str, str]
    special_tokens: Mapping[str, str]
    response_template: Mapping[str, Any] | None = None
    """How to read answers, in the notation of transformers, if the model says."""

    @property
    def default(self) -> str | None:
        """The template of a conversation without tools, if any."""
        return self.by_name.get(DEFAULT)

    def find(self, name: str, *, with_tools: bool) -> str:
        """The name of a conversation's template; '' lets its tools decide. Raises InvalidRequest."""
        if not self.by_name:
            raise InvalidRequest(
                "cannot be made a prompt: the model has no chat template; send a prompt, or add the file"
                f" {TEMPLATE_FILE} to the directory of its tokenizer",
                field="chat",
            )
        known = ", ".join(sorted(self.by_name))
        if name and name not in self.by_name:
            raise InvalidField.of("chat.template_name", name, f"one of {known}")
        if not name:
            name = WITH_TOOLS if with_tools and WITH_TOOLS in self.by_name else DEFAULT
        if name not in self.by_name:
            raise InvalidField(f"is needed: the model has {known}", field="chat.template_name")
        return name


def read_templates(
    model_dir: Path, config: Mapping[str, Any], special_tokens: Mapping[str, str]
) -> ChatTemplates:
    """The template files, else the templates of `config`, the content of tokenizer_config.json. Raises
    ModelUnusable."""
    given = config.get("chat_template")
    named: dict[str, str] = {}
    for entry in given if isinstance(given, list) else [{"name": DEFAULT, "template": given}]:
        if isinstance(entry, dict) and isinstance(entry.get("template"), str):
            named[str(entry.get("name"))] = entry["template"]
    files = {DEFAULT: model_dir / TEMPLATE_FILE}
    files |= {file.stem: file for file in sorted((model_dir / NAMED_TEMPLATES).glob("*.jinja"))}
    named |= {name: _read(file) for name, file in files.items() if file.is_file()}
    own = config.get("response_template")
    return ChatTemplates(named, special_tokens, own if isinstance(own, dict) else None)


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ModelUnusable(f"{file} cannot be read as text: {error}") from error
