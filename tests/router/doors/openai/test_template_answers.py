"""Chats with a model whose response template says how its answers are read."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from compat.openai_schemas import check
from compat.plain_http import PlainHttp
from router.doors.openai.test_tools import BODY, CHAT, FIELDS, JSON, STRICT, Talk, gathered
from router.scripted import READY, ScriptedEngine, serving_engine, serving_router, until_states
from router.scripted_tokenizer import ScriptedTokenizer
from tokenizer.chat.response_templates import QWEN_CODER
from tokenizer.serving import served
from tokenizer.tokenizers_zoo import byte_level_bpe, save_model_dir

pytestmark = pytest.mark.slow

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
CALL = "<tool_call>\n<function=get>\n<parameter=a>\n{}\n</parameter>\n</function>\n</tool_call>"
TEXT = f"Let me see.\n</think>\n\nWell.\n\n{CALL.format(1)}\n{CALL.format(2)}<|im_end|>"


@asynccontextmanager
async def talking(tmp_path: Path) -> AsyncIterator[Talk]:
    own = byte_level_bpe()
    directory = save_model_dir(own, tmp_path / "m")
    config = {"response_template": QWEN_CODER, "chat_template": TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    engine = ScriptedEngine(supported_fields=FIELDS)
    async with (
        served(directory) as tokenizer,
        serving_engine(engine) as address,
        serving_router([address], [tokenizer.address], http={"port": 0}) as client,
        PlainHttp(client.http_address) as http,
    ):
        await until_states(client, [READY], [READY])
        yield Talk(engine, ScriptedTokenizer(), http, lambda text: own.encode(text).ids)


async def test_answer_is_told_whole_and_in_parts(tmp_path: Path) -> None:
    async with talking(tmp_path) as talk:
        (choice,) = await talk.whole(BODY, TEXT)
        message = choice["message"]
        assert choice["finish_reason"] == "tool_calls"
        assert (message["content"], message["reasoning"]) == ("Well.", "Let me see.")
        calls = message["tool_calls"]
        arguments = [call["function"]["arguments"] for call in calls]
        assert arguments == ['{"a": 1}', '{"a": 2}']
        assert len({call["id"] for call in calls}) == 2
        for size in (1, 7):
            told = gathered(await talk.parts(BODY, TEXT, size=size))
            assert told.pop("finish_reason") == "tool_calls"
            del message["refusal"]
            assert told == message
            message["refusal"] = None
        plain = BODY | {"tools": None, "include_reasoning": False, "n": 2}
        first, second = await talk.whole(plain, "No.</think>\nFour.", "Yes.</think>Five.")
        texts = [each["message"]["content"] for each in (first, second)]
        assert (texts, first["finish_reason"]) == (["Four.", "Five."], "stop")
        assert "reasoning" not in first["message"]


REFUSED: Sequence[tuple[dict[str, Any], str]] = (
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [STRICT]}, "tool_choice"),
    ({"parallel_tool_calls": False}, "tool_choice"),
    ({"response_format": JSON}, "response_format"),
)
"""Changes of a body, and the parameter that the error names."""


async def test_what_no_grammar_describes_is_refused(tmp_path: Path) -> None:
    async with talking(tmp_path) as talk:
        for change, param in REFUSED:
            reply = await talk.http.post(CHAT, BODY | change)
            check("ErrorResponse", reply.json)
            assert (reply.status, reply.json["error"]["param"]) == (400, param), change
            assert "response_template" in reply.json["error"]["message"]
