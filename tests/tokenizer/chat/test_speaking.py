"""How a model speaks, as its chat template shows."""

from __future__ import annotations

import pytest
from tokenizer.chat.chat_templates import CHATML, GEMMA, LLAMA_3, PHI, QWEN
from trtmesh.tokenizer.chat.speaking import (
    ReasoningFormat,
    ToolFormat,
    reasoning_format,
    tool_format,
)
from trtmesh.tokenizer.chat.templates import ChatTemplates

R1 = "{% if add_generation_prompt %}{{'<|Assistant|><think>\n'}}{% endif %}{{ m.split('</think>')[-1] }}"
MISTRAL = '{{ "[AVAILABLE_TOOLS]" }}{{ "[TOOL_CALLS][" + tool.function | tojson + "]" }}'
AUTO = ToolFormat.AUTO, ReasoningFormat.AUTO


@pytest.mark.parametrize(
    ("by_name", "tools", "reasoning"),
    [
        ({"default": CHATML}, "none", "none"),
        ({"default": GEMMA}, "none", "none"),
        ({"default": PHI}, "none", "none"),
        ({"default": LLAMA_3}, "llama3_json", "none"),
        ({"default": QWEN}, "hermes", "think"),
        ({"default": QWEN + "<function="}, "none", "think"),
        ({"default": R1}, "none", "think"),
        ({"default": MISTRAL}, "mistral_list", "none"),
        ({"default": MISTRAL.replace("[", "[ARGS]", 1)}, "mistral", "none"),
        ({"default": CHATML, "tool_use": "<tool_call>"}, "hermes", "none"),
        ({}, "none", "none"),
    ],
)
def test_template_shows_how_a_model_speaks(
    by_name: dict[str, str], tools: str, reasoning: str
) -> None:
    templates = ChatTemplates(by_name, {})
    asked_tools, asked_reasoning = AUTO
    assert tool_format(templates, asked_tools) == tools
    assert reasoning_format(templates, asked_reasoning) == reasoning


def test_operator_knows_better() -> None:
    templates = ChatTemplates({"default": QWEN}, {})
    assert tool_format(templates, ToolFormat.MISTRAL) == "mistral"
    assert reasoning_format(templates, ReasoningFormat.NONE) == "none"
