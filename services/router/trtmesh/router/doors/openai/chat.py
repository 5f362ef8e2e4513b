"""`/v1/chat/completions`: conversations, of which the tokenizer makes prompts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson
from trtmesh.chassis.errors import InvalidField
from trtmesh.chassis.quoting import quoted
from trtmesh.router.doors.openai.answer import Choices, Piece, Wanted
from trtmesh.router.doors.openai.fields import (
    BOOLEAN,
    INTEGER,
    LIST,
    OBJECT,
    TEXT,
    Fields,
    joined,
    read_config,
)
from trtmesh.router.doors.openai.log_probs import TokenTexts, chat_shape
from trtmesh.router.doors.openai.requested import Requested
from trtmesh.v1 import chat_pb2
from trtmesh.v1 import generation_pb2 as pb
from trtmesh.v1 import router_pb2 as router_pb

ROLES = ("system", "developer", "user", "assistant", "tool", "function")


class Chats(Choices):
    """The endpoint."""

    path = "/v1/chat/completions"
    id_prefix = "chatcmpl-"
    whole, chunk = "chat.completion", "chat.completion.chunk"

    def read(self, requested: Requested, *, is_large: bool) -> Wanted:
        """Raises TrtmeshError."""
        fields = requested.fields
        _refuse_unserved(fields)
        config = read_config(fields, requested.defaults)
        # The first of them counts.
        for name in ("max_tokens", "max_completion_tokens"):
            if (most := fields.take(name, INTEGER)) is not None:
                fields.put(config, "stopping.max_tokens", name, most)
        _read_log_probs(fields, config.output, config)
        item = router_pb.GenerateItem(chat=conversation(requested))
        return requested.wanted([item], config, is_large=is_large)

    def opening(self, choice: int) -> dict[str, Any]:
        return _part(choice, {"role": "assistant", "content": ""})

    def part(self, piece: Piece, texts: TokenTexts) -> dict[str, Any]:
        delta = {"content": piece.text} if piece.text else {}
        found = None if piece.scored is None else chat_shape(piece.scored, texts)
        return _part(piece.choice, delta, found, piece.finish_reason)

    def choice(self, piece: Piece, texts: TokenTexts) -> dict[str, Any]:
        return {
            "index": piece.choice,
            "message": {"role": "assistant", "content": piece.text, "refusal": None},
            "logprobs": None if piece.scored is None else chat_shape(piece.scored, texts),
            "finish_reason": piece.finish_reason,
        }


def _part(
    choice: int,
    delta: Mapping[str, str],
    log_probs: Mapping[str, Any] | None = None,
    finish_reason: str | None = None,
) -> dict[str, Any]:
    return {
        "index": choice,
        "delta": delta,
        "logprobs": log_probs,
        "finish_reason": finish_reason,
    }


def _refuse_unserved(fields: Fields) -> None:
    for name in ("tools", "functions", "function_call"):
        fields.refuse(name, "is not served: no answer here is read as a call of a tool")
    fields.refuse("tool_choice", "is not served, as there are no tools", neutral="none")
    # Without tools there is nothing to call at once.
    fields.take("parallel_tool_calls", BOOLEAN)
    fields.refuse("modalities", "must be text alone", neutral=["text"])
    fields.refuse("audio", "is not served: models here write text")
    fields.refuse("web_search_options", "is not served: nothing here searches the web")


def _read_log_probs(fields: Fields, output: pb.OutputConfig, config: pb.GenerationConfig) -> None:
    output.log_probs = fields.take_flag("logprobs")
    if (top := fields.take("top_logprobs", INTEGER)) is not None:
        if not output.log_probs:
            raise InvalidField("belongs to a request with logprobs", field="top_logprobs")
        fields.put(config, "output.top_log_probs", "top_logprobs", top)


def conversation(requested: Requested) -> chat_pb2.Chat:
    """The conversation of a body. Raises InvalidField or NoTokenizer."""
    fields = requested.fields
    fields.call("messages", "prompt", "prompt.text", "text", "items", "chat.messages")
    messages = [
        _message(f"messages[{number}]", message)
        for number, message in enumerate(fields.need("messages", LIST))
    ]
    template = fields.take("chat_template", TEXT)
    if any(m["role"] == "developer" for m in messages) and not requested.names_developers(template):
        # The older name of the same.
        messages = [m | {"role": "system"} if m["role"] == "developer" else m for m in messages]
    chat = chat_pb2.Chat(messages=orjson.dumps(messages).decode(), template=template)
    if documents := fields.take_list("documents", OBJECT):
        chat.documents = orjson.dumps(documents).decode()
    if kwargs := fields.take("chat_template_kwargs", OBJECT):
        chat.template_kwargs = orjson.dumps(kwargs).decode()
    chat.continue_final_message = fields.take_flag("continue_final_message")
    begins = fields.take("add_generation_prompt", BOOLEAN)
    if begins is not None:
        chat.add_generation_prompt = begins
    return chat


def _message(name: str, given: Any) -> dict[str, Any]:
    """A message as templates expect it: a text as content, and an object as arguments of a call. Raises
    InvalidField."""
    if not OBJECT.has(given):
        raise InvalidField("must be an object", field=name)
    message = {key: value for key, value in given.items() if value is not None}
    role = message.get("role")
    if role not in ROLES:
        told = quoted(role) if isinstance(role, str) else "missing"
        raise InvalidField(f"is {told} but must be one of {', '.join(ROLES)}", field=f"{name}.role")
    if LIST.has(message.get("content")):
        message["content"] = joined(f"{name}.content", message["content"])
    elif "content" in message and not TEXT.has(message["content"]):
        raise InvalidField("must be a text or a list of parts", field=f"{name}.content")
    if (refusal := message.pop("refusal", None)) is not None:
        message.setdefault("content", refusal)
    if "tool_calls" in message:
        calls = message["tool_calls"]
        if not LIST.has(calls):
            raise InvalidField("must be a list", field=f"{name}.tool_calls")
        message["tool_calls"] = [
            _call(f"{name}.tool_calls[{number}]", call) for number, call in enumerate(calls)
        ]
    return message


def _call(name: str, call: Any) -> dict[str, Any]:
    """A call of a tool, with its arguments parsed."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise InvalidField("must have a function", field=name)
    arguments = function.get("arguments")
    if TEXT.has(arguments):
        try:
            arguments = orjson.loads(arguments or "{}")
        except orjson.JSONDecodeError:
            problem = "must be the text of a JSON object"
            raise InvalidField(problem, field=f"{name}.function.arguments") from None
    return {**call, "function": {**function, "arguments": arguments}}
