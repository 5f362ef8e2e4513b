"""`/v1/chat/completions`: conversations, rendered into prompts by the tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

import orjson
from trtmesh.chassis.errors import InvalidField, InvalidRequest
from trtmesh.chassis.quoting import quoted
from trtmesh.router.doors.http.json_bodies import parse_text
from trtmesh.router.doors.openai.answer import ByTemplate, Choices, Piece, Wanted
from trtmesh.router.doors.openai.answer_parts import CallArguments, CallBegun, Content, Reasoning
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
from trtmesh.router.doors.openai.tools import (
    RESPONSE_TEMPLATE,
    ToolUse,
    guided,
    read_tools,
    reading_of,
)
from trtmesh.router.metrics import CHAT
from trtmesh.v1 import chat_pb2
from trtmesh.v1 import generation_pb2 as pb
from trtmesh.v1 import router_pb2 as router_pb

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
GUIDE = ("guided_decoding.guide", "guided_decoding.guide_type")
ROLES = ("system", "developer", "user", "assistant", "tool", "function")


class Chats(Choices):
    path = "/v1/chat/completions"
    operation = CHAT
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
        with_reasoning = fields.take_flag("include_reasoning", default=True)
        talk = conversation(requested)
        output, by_template = config.output, _read_by_template(requested, talk, config)
        has_markers = by_template or (talk.tools and talk.tools.formats[0].ends)
        if has_markers and not output.HasField("skip_special_tokens"):
            output.skip_special_tokens = False
        item = router_pb.GenerateItem(chat=talk.chat)
        if by_template is not None:
            wanted = requested.wanted([item], config, is_large=is_large)
            wanted = replace(wanted, by_template=by_template, tools=talk.tools)
            return replace(wanted, with_reasoning=with_reasoning)
        reading = reading_of(talk.tools, reasons=requested.about.reasoning_format == "think")
        if not reading.reasons:
            # Otherwise the rendered prompt decides.
            reading = guided(config.guided_decoding, talk.tools, reading)
            if reading.is_guided:
                fields.call("tools", *GUIDE)
        wanted = requested.wanted([item], config, is_large=is_large)
        if not reading.reasons and talk.tools is None:
            return wanted
        return replace(wanted, reading=reading, tools=talk.tools, with_reasoning=with_reasoning)

    def opening(self, choice: int) -> dict[str, Any]:
        return _part(choice, {"role": "assistant", "content": ""})

    def part(self, piece: Piece, texts: TokenTexts) -> dict[str, Any]:
        delta = _delta(piece)
        found = None if piece.scored is None else chat_shape(piece.scored, texts)
        return _part(piece.choice, delta, found, piece.finish_reason)

    def choice(self, piece: Piece, texts: TokenTexts) -> dict[str, Any]:
        told = _delta(piece)
        for call in told.get("tool_calls", ()):
            del call["index"]
        content = None if told else ""
        return {
            "index": piece.choice,
            "message": {"role": "assistant", "content": content, "refusal": None, **told},
            "logprobs": None if piece.scored is None else chat_shape(piece.scored, texts),
            "finish_reason": piece.finish_reason,
        }


def _delta(piece: Piece) -> dict[str, Any]:
    """Returns the addition of a piece to a message. Reasoning has two names, each read by some clients."""
    texts: dict[str, list[str]] = {"content": [piece.text], "reasoning": []}
    calls: dict[int, dict[str, Any]] = {}
    for said in piece.said:
        match said:
            case Content(text):
                texts["content"].append(text)
            case Reasoning(text):
                texts["reasoning"].append(text)
            case CallBegun(index, name, call_id):
                function = {"name": name, "arguments": ""}
                calls[index] = {"index": index, "id": call_id, "type": "function"}
                calls[index] |= {"function": function}
            case CallArguments(index, text):
                call = calls.setdefault(index, {"index": index, "function": {"arguments": ""}})
                call["function"]["arguments"] += text
    delta: dict[str, Any] = {name: "".join(parts) for name, parts in texts.items() if any(parts)}
    if "reasoning" in delta:
        delta["reasoning_content"] = delta["reasoning"]
    return delta | {"tool_calls": list(calls.values())} if calls else delta


def _part(
    choice: int,
    delta: Mapping[str, Any],
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
    fields.refuse("modalities", "must be text alone", neutral=["text"])
    fields.refuse("verbosity", "is not served: ask for it in the messages", neutral="medium")
    fields.refuse("audio", "is not served: models here write text")
    fields.refuse("web_search_options", "is not served: nothing here searches the web")


def _read_log_probs(fields: Fields, output: pb.OutputConfig, config: pb.GenerationConfig) -> None:
    output.log_probs = fields.take_flag("logprobs")
    if (top := fields.take("top_logprobs", INTEGER)) is not None:
        if not output.log_probs:
            raise InvalidField("belongs to a request with logprobs", field="top_logprobs")
        fields.put(config, "output.top_log_probs", "top_logprobs", top)


class Talk(NamedTuple):
    """A conversation."""

    chat: chat_pb2.Chat
    tools: ToolUse | None
    """The functions offered to the model."""


def _read_by_template(
    requested: Requested, talk: Talk, config: pb.GenerationConfig
) -> ByTemplate | None:
    """Returns how a tokenizer reads the answer, or None where this door does. Raises InvalidField."""
    if requested.about.tool_format != RESPONSE_TEMPLATE:
        return None
    if not config.guided_decoding.guide_type:
        return ByTemplate(talk.chat.tools)
    if talk.tools is not None:
        problem = (
            "does not go with tools of a model with a response_template; leave one of them out"
        )
        raise InvalidField(problem, field="response_format")
    # A guide describes the answer without markers.
    return None


def conversation(requested: Requested) -> Talk:
    """The conversation of a body. Raises InvalidField or NoTokenizer."""
    fields = requested.fields
    fields.call(
        "messages", "prompt", "prompt.text", "prompt.token_ids", "text", "items", "chat.messages"
    )
    tools = read_tools(fields, requested.about.tool_format)
    messages = [
        _message(f"messages[{number}]", message)
        for number, message in enumerate(fields.need("messages", LIST))
    ]
    _name_answers(messages)
    template = fields.take("chat_template", TEXT)
    own = template or requested.about.chat_template
    if "developer" not in own:
        # `system` is the older name of the role.
        messages = [m | {"role": "system"} if m["role"] == "developer" else m for m in messages]
    chat = chat_pb2.Chat(messages=orjson.dumps(messages).decode(), template=template)
    if documents := fields.take_list("documents", OBJECT):
        chat.documents = orjson.dumps(documents).decode()
    if tools is not None:
        chat.tools = orjson.dumps(tools.told).decode()
    if kwargs := _effort(fields, own) | (fields.take("chat_template_kwargs", OBJECT) or {}):
        chat.template_kwargs = orjson.dumps(kwargs).decode()
    chat.continue_final_message = fields.take_flag("continue_final_message")
    begins = fields.take("add_generation_prompt", BOOLEAN)
    if begins is not None:
        chat.add_generation_prompt = begins
    return Talk(chat, tools)


def _effort(fields: Fields, template: str) -> dict[str, Any]:
    """Variables for the effort of reasoning, if the template has any. Raises InvalidField."""
    if (effort := fields.take("reasoning_effort", TEXT)) is None:
        return {}
    if effort not in EFFORTS:
        raise InvalidField.of("reasoning_effort", effort, f"one of {', '.join(EFFORTS)}")
    thinks = effort != "none"
    variables = {"reasoning_effort": effort, "enable_thinking": thinks, "thinking": thinks}
    known = {name: value for name, value in variables.items() if name in template}
    if thinks and not known:
        problem = "is not known to the chat template of the model; leave it out"
        raise InvalidField(problem, field="reasoning_effort")
    return known


def _name_answers(messages: Sequence[dict[str, Any]]) -> None:
    """Adds the name of the tool to each tool message, as required by some templates."""
    names: dict[str, str] = {}
    for message in messages:
        for call in message.get("tool_calls", ()):
            names[str(call.get("id"))] = call["function"]["name"]
        if message["role"] == "tool" and (name := names.get(str(message.get("tool_call_id")))):
            message.setdefault("name", name)


def _message(name: str, given: Any) -> dict[str, Any]:
    """Returns a message in the form for templates: text as content, and objects as arguments of calls. Raises
    InvalidField."""
    if not OBJECT.has(given):
        raise InvalidField("must be an object", field=name)
    message = {key: value for key, value in given.items() if value is not None}
    check_role(name, message.get("role"))
    if LIST.has(message.get("content")):
        message["content"] = joined(f"{name}.content", message["content"])
    elif "content" in message and not TEXT.has(message["content"]):
        raise InvalidField("must be a text or a list of parts", field=f"{name}.content")
    if (refusal := message.pop("refusal", None)) is not None:
        message.setdefault("content", refusal)
    calls = message.pop("tool_calls", [])
    if not LIST.has(calls):
        raise InvalidField("must be a list", field=f"{name}.tool_calls")
    if calls:
        # Many templates concatenate content and text.
        message.setdefault("content", "")
        message["tool_calls"] = [
            _call(f"{name}.tool_calls[{number}]", call) for number, call in enumerate(calls)
        ]
    return message


def _call(name: str, call: Any) -> dict[str, Any]:
    """Returns a tool call in the form for templates, with parsed arguments. Raises InvalidField."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise InvalidField("must have a function", field=name)
    told = Fields(function, f"{name}.function.")
    arguments = parsed_arguments(f"{name}.function.arguments", function.get("arguments"))
    return {**call, "function": {"name": told.need("name", TEXT), "arguments": arguments}}


def parsed_arguments(name: str, given: Any) -> Any:
    """The arguments of a call as an object. Raises InvalidField."""
    if TEXT.has(given):
        with suppress(InvalidRequest):
            given = parse_text(given or "{}")
    if not OBJECT.has(given):
        raise InvalidField("must be the text of a JSON object", field=name)
    return given


def check_role(name: str, role: Any) -> None:
    """Raises InvalidField for an unknown role."""
    if role not in ROLES:
        told = "missing" if role is None else quoted(str(role))
        raise InvalidField(f"is {told} but must be one of {', '.join(ROLES)}", field=f"{name}.role")
