"""`/v1/responses`, without state: translated into a request of `/v1/chat/completions`, and answered as items."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from trtmesh.chassis.errors import InvalidField, TrtmeshError
from trtmesh.router.doors.openai.answer import Frame, Gathered, Wanted, Writer
from trtmesh.router.doors.openai.chat import Chats, check_role, parsed_arguments
from trtmesh.router.doors.openai.fields import (
    ANY,
    DIRECT,
    INTEGER,
    LIST,
    NAMES,
    OBJECT,
    TEXT,
    WITHOUT_EFFECT,
    Fields,
    Kind,
)
from trtmesh.router.doors.openai.requested import Requested
from trtmesh.router.doors.openai.response_items import ItemAnswer
from trtmesh.router.metrics import CHAT

PASSED = (
    *(name for name in DIRECT if name != "n"),
    *("seed", "priority", "stop", "stop_token_ids", "logit_bias", "structured_outputs"),
    *("chat_template", "chat_template_kwargs", "documents", "prediction", "stream"),
    *("parallel_tool_calls", "include_reasoning", *WITHOUT_EFFECT),
)
"""Fields with the same meaning as in chats."""

REFUSED = MappingProxyType(
    {
        "previous_response_id": "is not served: no response is kept; send the items before as input",
        "conversation": "is not served: no conversation is kept; send its items as input",
        "background": "is not served: an answer ends with its call",
        "prompt": "is not served: no prompt is kept; send it as instructions and input",
    }
)
"""Fields dependent on state on the server, with the reason of the refusal."""

OWN_NAMES = MappingProxyType(
    {
        "response_format.json_schema": "text.format",
        "response_format": "text.format",
        "max_completion_tokens": "max_output_tokens",
        "max_tokens": "max_output_tokens",
        "reasoning_effort": "reasoning.effort",
        "messages": "input",
        "logprobs": "include",
    }
)
"""Fields of chats, under the names here."""

LOG_PROBS, ENCRYPTED = "message.output_text.logprobs", "reasoning.encrypted_content"
"""Values of `include`. Reasoning arrives as plain text, so the encrypted form adds nothing."""
PARTS = ("input_text", "output_text", "text")
TEXT_OR_LIST = Kind("a text or a list", (str, list))
TEXT_OR_OBJECT = Kind("a text or an object", (str, dict))
REPEATED = ("instructions", "max_output_tokens", "tool_choice", "tools", "text", "reasoning")
"""Fields of the request repeated unchanged in the answer."""


class StatelessResponses:
    path = "/v1/responses"
    operation = CHAT
    id_prefix = "resp_"

    def __init__(self) -> None:
        self._chats = Chats()

    def read(self, requested: Requested, *, is_large: bool) -> Wanted:
        """Raises TrtmeshError."""
        fields = requested.fields
        given = fields.peek(*REPEATED, "metadata", "parallel_tool_calls", "top_logprobs")
        inner = Fields(_as_chat(fields))
        fields.refuse_rest()
        try:
            wanted = self._chats.read(replace(requested, fields=inner), is_large=is_large)
        except TrtmeshError as error:
            raise _renamed(error) from None
        finally:
            named = {**NAMES, **inner.names}
            fields.names |= {path: _name(name) for path, name in named.items()}
        sampling = wanted.request.items[0].config.sampling
        echo = {
            **dict.fromkeys(REPEATED),
            "tool_choice": "auto",
            "text": {"format": {"type": "text"}},
            "metadata": {},
            "parallel_tool_calls": True,
            **given,
            "tools": [
                {"strict": None, "parameters": None, **tool} for tool in given.get("tools", ())
            ],
            "temperature": sampling.temperature,
            "top_p": 1.0 if sampling.top_p is None else sampling.top_p,
            "truncation": "disabled",
            "store": False,
            "background": False,
            "previous_response_id": None,
        }
        return replace(wanted, echo=echo)

    def writer(self, wanted: Wanted, frame: Frame) -> Writer:
        return ItemAnswer(wanted, frame)

    def answer(self, wanted: Wanted, frame: Frame, gathered: Gathered) -> bytes:
        return ItemAnswer(wanted, frame).whole(gathered)


def _name(chat_name: str) -> str:
    """A field of chats, under the name in this API."""
    if chat_name.startswith("tool"):
        return chat_name.replace(".function", "", 1).replace(".allowed_tools", "", 1)
    for theirs, ours in OWN_NAMES.items():
        if chat_name.startswith(theirs):
            return ours + chat_name.removeprefix(theirs)
    return chat_name


def _renamed(error: TrtmeshError) -> TrtmeshError:
    renamed = copy(error).with_traceback(None)
    renamed.fields = tuple(map(_name, error.fields))
    return renamed


def _as_chat(fields: Fields) -> dict[str, Any]:
    """Returns the fields of a chat with the same meaning. Raises InvalidField."""
    for name, why in REFUSED.items():
        fields.refuse(name, why, neutral=False if name == "background" else None)
    fields.refuse("truncation", "is not served: no input is cut", neutral="disabled")
    # The field limits tools on the server; there are none.
    fields.take("max_tool_calls", INTEGER)
    chat = {name: fields.take(name, ANY) for name in PASSED}
    chat["messages"] = _messages(fields)
    chat["max_completion_tokens"] = fields.take("max_output_tokens", INTEGER)
    chat["tools"] = _tools(fields.take("tools", LIST))
    choice = _tool_choice(fields.take("tool_choice", TEXT_OR_OBJECT))
    # Chats refuse a choice without tools; "auto" is valid without them here.
    chat["tool_choice"] = None if choice == "auto" else choice
    _read_text(fields, chat)
    _read_reasoning(fields, chat)
    _read_included(fields, chat)
    if (options := fields.take("stream_options", OBJECT)) is not None:
        told = Fields(options, "stream_options.")
        told.refuse("include_obfuscation", "is not served", neutral=False)
        told.refuse_rest()
    return chat


def _read_text(fields: Fields, chat: dict[str, Any]) -> None:
    """Reads `text`, the form of the answer."""
    told = Fields(fields.take("text", OBJECT) or {}, "text.")
    told.refuse("verbosity", "is not served: ask for it in the instructions", neutral="medium")
    form = told.take("format", OBJECT)
    told.refuse_rest()
    if form is not None and form.get("type") == "json_schema":
        schema = {name: value for name, value in form.items() if name != "type"}
        form = {"type": "json_schema", "json_schema": schema}
    chat["response_format"] = form


def _read_reasoning(fields: Fields, chat: dict[str, Any]) -> None:
    told = Fields(fields.take("reasoning", OBJECT) or {}, "reasoning.")
    chat["reasoning_effort"] = told.take("effort", TEXT)
    for name in ("summary", "generate_summary", "context"):
        told.refuse(name, "is not served: reasoning comes as it is", neutral="auto")
    told.refuse_rest()


def _read_included(fields: Fields, chat: dict[str, Any]) -> None:
    included = fields.take_list("include", TEXT)
    if other := set(included) - {LOG_PROBS, ENCRYPTED}:
        limit = f"a list of {LOG_PROBS} and {ENCRYPTED}"
        raise InvalidField.of("include", min(other), limit)
    top = fields.take("top_logprobs", INTEGER)
    if LOG_PROBS in included or top:
        chat |= {"logprobs": True, "top_logprobs": top}


def _tools(given: Sequence[Any] | None) -> list[Any] | None:
    """Returns the functions in the form of chats. Raises InvalidField for tools to run on the server."""
    if not given:
        return None
    tools = []
    for number, tool in enumerate(given):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if kind != "function":
            problem = "must be function: no other tool is served"
            raise InvalidField(problem, field=f"tools[{number}].type")
        function = {name: value for name, value in tool.items() if name != "type"}
        tools.append({"type": "function", "function": function})
    return tools


def _tool_choice(given: Any) -> Any:
    if not isinstance(given, dict):
        return given
    match given.get("type"):
        case "function":
            return _named(given)
        case "allowed_tools":
            tools = Fields(given, "tool_choice.").take_list("tools", OBJECT)
            allowed = {"mode": given.get("mode"), "tools": list(map(_named, tools))}
            return {"type": "allowed_tools", "allowed_tools": allowed}
    problem = "must be function or allowed_tools: no other tool is served"
    raise InvalidField(problem, field="tool_choice.type")


def _named(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the name of a function in the form of chats."""
    return {"type": tool.get("type"), "function": {"name": tool.get("name")}}


def _messages(fields: Fields) -> list[dict[str, Any]]:
    """The instructions and the input as messages. Raises InvalidField."""
    messages: list[dict[str, Any]] = []
    if (instructions := fields.take("instructions", TEXT)) is not None:
        messages.append({"role": "system", "content": instructions})
    given = fields.need("input", TEXT_OR_LIST)
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}]
    turns = _Turns(messages)
    for number, item in enumerate(given):
        turns.add(f"input[{number}]", item)
    return messages


class _Turns:
    """Makes messages of items: reasoning, text and calls of a turn become one message."""

    def __init__(self, messages: list[dict[str, Any]]) -> None:
        self._messages = messages
        self._turn: dict[str, Any] | None = None
        """The model's message for the next items."""

    def add(self, name: str, item: Any) -> None:
        """Raises InvalidField."""
        if not OBJECT.has(item):
            raise InvalidField("must be an object", field=name)
        told = Fields(item, f"{name}.")
        match told.take("type", TEXT) or "message":
            case "message":
                self._add_message(told, name)
            case "reasoning":
                parts = told.take("content", LIST) or told.take("summary", LIST) or []
                if text := _joined(f"{name}.content", parts, ("reasoning_text", "summary_text")):
                    self._of_model("reasoning_content")["reasoning_content"] = text
            case "function_call":
                call = {
                    "id": told.need("call_id", TEXT),
                    "type": "function",
                    "function": {
                        "name": told.need("name", TEXT),
                        "arguments": parsed_arguments(
                            f"{name}.arguments", told.need("arguments", TEXT)
                        ),
                    },
                }
                self._of_model().setdefault("tool_calls", []).append(call)
            case "function_call_output":
                self._turn = None
                called, output = told.need("call_id", TEXT), told.need("output", TEXT_OR_LIST)
                content = _text_of(f"{name}.output", output)
                self._messages.append({"role": "tool", "tool_call_id": called, "content": content})
            case kind:
                known = "message, reasoning, function_call or function_call_output"
                raise InvalidField.of(f"{name}.type", kind, known)

    def _add_message(self, told: Fields, name: str) -> None:
        role = told.need("role", TEXT)
        check_role(name, role)
        content = _text_of(f"{name}.content", told.need("content", TEXT_OR_LIST))
        if role == "assistant":
            self._of_model("content", "tool_calls")["content"] = content
        else:
            self._turn = None
            self._messages.append({"role": role, "content": content})

    def _of_model(self, *before: str) -> dict[str, Any]:
        """Returns the model's message of this turn. Begins another message if this message has a field of `before`, not
        allowed before the next item."""
        if self._turn is None or self._turn.keys() & set(before):
            self._turn = {"role": "assistant"}
            self._messages.append(self._turn)
        return self._turn


def _text_of(name: str, content: str | list[Any]) -> str:
    return content if isinstance(content, str) else _joined(name, content, PARTS)


def _joined(name: str, parts: Sequence[Any], kinds: Sequence[str]) -> str:
    """The text of parts. Raises InvalidField."""
    texts = []
    for number, part in enumerate(parts):
        told: Mapping[str, Any] = part if isinstance(part, dict) else {}
        text = told.get("refusal" if told.get("type") == "refusal" else "text")
        if told.get("type") not in (*kinds, "refusal") or not TEXT.has(text):
            problem = "must be a part with a text: models here read text alone"
            raise InvalidField(problem, field=f"{name}[{number}]")
        texts.append(str(text))
    return "\n".join(texts)
