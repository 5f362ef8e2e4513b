"""The output format of a model, according to the chat templates: the form of tool calls, and whether reasoning comes
first."""

from __future__ import annotations

from enum import StrEnum

from trtmesh.tokenizer.chat.templates import DEFAULT, WITH_TOOLS, ChatTemplates

OTHERS = ("<function=", "<arg_key>", "<param")
"""Of models with calls between `<tool_call>` in another form than JSON."""


class ToolFormat(StrEnum):
    """Forms of calls."""

    AUTO = "auto"
    """As the chat template shows."""
    NONE = "none"
    HERMES = "hermes"
    LLAMA3_JSON = "llama3_json"
    MISTRAL = "mistral"
    """A name before the arguments, as from version 11 of Mistral's tokenizers."""
    RESPONSE_TEMPLATE = "response_template"
    """As the response template of the model says, by transformers' parser."""
    MISTRAL_LIST = "mistral_list"
    """A list, as before."""


class ReasoningFormat(StrEnum):
    """Forms of reasoning."""

    AUTO = "auto"
    NONE = "none"
    THINK = "think"
    """`<think>...</think>` before the answer."""


def tool_format(templates: ChatTemplates, asked: ToolFormat) -> ToolFormat:
    """The form of calls; NONE where none is known."""
    if asked is not ToolFormat.AUTO:
        return asked
    template = templates.by_name.get(WITH_TOOLS, templates.by_name.get(DEFAULT, ""))
    if "[TOOL_CALLS]" in template:
        return ToolFormat.MISTRAL if "[ARGS]" in template else ToolFormat.MISTRAL_LIST
    if "<tool_call>" in template and not any(each in template for each in OTHERS):
        return ToolFormat.HERMES
    if "<|start_header_id|>" in template and '"parameters": ' in template:
        return ToolFormat.LLAMA3_JSON
    return ToolFormat.RESPONSE_TEMPLATE if templates.response_template else ToolFormat.NONE


def reasoning_format(templates: ChatTemplates, asked: ReasoningFormat) -> ReasoningFormat:
    """The form of reasoning; NONE where there is none."""
    if asked is not ReasoningFormat.AUTO:
        return asked
    thinks = "</think>" in templates.by_name.get(DEFAULT, "")
    return ReasoningFormat.THINK if thinks else ReasoningFormat.NONE
