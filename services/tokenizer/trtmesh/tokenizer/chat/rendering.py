"""The program for rendering conversations: a process, which can be killed, because templates are programs of strangers.

The result is the same as transformers', without the seconds for an import of transformers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import partial
from typing import Any, BinaryIO

import jinja2
import jinja2.ext
import jinja2.utils
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from trtmesh.tokenizer.chat.frames import (
    DONE,
    INVALID,
    MOST_PROBLEM_CHARACTERS,
    OWN_VARIABLES,
    REFUSED,
    read_frame,
    serve,
)

TAG = "CONTINUE_FINAL_MESSAGE_TAG "
"""Marks the end of a message for the model to continue."""
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")


class GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}`, which marks answers for training: renders the content."""

    tags = {"generation"}  # noqa: RUF012 - jinja's interface

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_held"), [], [], body).set_lineno(line)

    def _held(self, caller: Any) -> str:
        return str(caller())


class TemplateDict:
    """`dict` without the type."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class TemplateNamespace(jinja2.utils.Namespace):
    """`namespace` without names leading into Python."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *given = args
        names = dict(*given, **kwargs)
        for name in names:
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, names)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace has no name {name!r}")


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[GenerationBlock, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)  # noqa: DTZ005 - of the machine, as in transformers
    environment.globals["dict"] = TemplateDict()
    environment.globals["namespace"] = TemplateNamespace
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002 - the filter's parameters
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002
) -> str:
    """The filter without HTML's escapes."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(problem: Any) -> None:
    raise jinja2.TemplateError(str(problem))


class Templates:
    """The compiled templates."""

    def __init__(self, by_name: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        self._by_name = by_name
        self._special_tokens = special_tokens
        self._environment = _environment()
        self._compiled: dict[str, jinja2.Template] = {}

    def render(self, asked: Mapping[str, Any]) -> str:
        """Returns the text of a conversation. Raises any error of the template."""
        source, template = self._template(asked)
        messages = [_plain_message(message) for message in asked["messages"]]
        ending = _mark_end(messages, source) if asked["continue_final_message"] else ""
        render = partial(
            template.render,
            tools=asked["tools"],
            documents=asked["documents"],
            add_generation_prompt=asked["add_generation_prompt"],
            **{**self._special_tokens, **asked["kwargs"]},
        )
        try:
            text = render(messages=messages)
        except TypeError:
            if (written := [_with_written_arguments(each) for each in messages]) == messages:
                raise
            text = render(messages=written)
        return _cut_at_mark(text, ending) if asked["continue_final_message"] else text

    def _template(self, asked: Mapping[str, Any]) -> tuple[str, jinja2.Template]:
        """The conversation's own template or the model's, as text and compiled."""
        if "source" in asked:
            return asked["source"], self._environment.from_string(asked["source"])
        name = asked["template"]
        if name not in self._compiled:
            self._compiled[name] = self._environment.from_string(self._by_name[name])
        return self._by_name[name], self._compiled[name]


def _plain_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message without nulls, rendered as text by templates, and with the reasoning under every usual name."""
    plain = {key: value for key, value in message.items() if value is not None}
    reasoning = next((plain[key] for key in REASONING_FIELDS if key in plain), None)
    if reasoning is not None:
        plain = {"thinking": reasoning, **plain, "reasoning_content": reasoning}
    return plain


def _with_written_arguments(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message with the arguments of calls as text, for templates that concatenate texts."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return dict(message)
    return {**message, "tool_calls": [_with_written(call) for call in calls]}


def _with_written(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), dict):
        return call
    written = json.dumps(function["arguments"], ensure_ascii=False)
    return {**call, "function": {**function, "arguments": written}}


def _mark_end(messages: list[dict[str, Any]], source: str) -> str:
    """Marks the end of the last message. Returns the text of the message."""
    last = messages[-1]
    if (content := last.get("content")) is None or "content" not in source:
        raise ValueError("continue_final_message needs a content of the last message")
    if isinstance(content, str):
        last["content"] = content + TAG
        return content
    for part in reversed(content):
        if "text" in part:
            text = str(part["text"])
            part["text"] = text + TAG
            return text
    raise ValueError("continue_final_message needs a text in the last message")


def _cut_at_mark(text: str, ending: str) -> str:
    """The text up to the end of the last message."""
    if ending.strip() not in text or TAG.strip() not in text:
        raise ValueError("the template leaves out parts of the last message, so it cannot continue")
    end = text.rindex(TAG.strip())
    # A template trimming messages has trimmed the mark too.
    return text[:end] if text.startswith(TAG, end) else text[:end].rstrip()


class InvalidPartError(Exception):
    """A part of a conversation has an invalid form."""


def _conversation(parts: Mapping[str, bytes]) -> dict[str, Any]:
    """The parts as templates get them. Raises InvalidPartError."""
    parsed = {name: _parsed(name, text) for name, text in parts.items()}
    kwargs = parsed.pop("template_kwargs", {})
    if not isinstance(kwargs, dict) or kwargs.keys() & set(OWN_VARIABLES):
        limit = f"must be a JSON object without {', '.join(OWN_VARIABLES)}"
        raise InvalidPartError(f"template_kwargs {limit}")
    for name, values in parsed.items():
        if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
            raise InvalidPartError(f"{name} must be a JSON array of objects")
    if not parsed.get("messages"):
        raise InvalidPartError("messages must have one message or more")
    return {"tools": None, "documents": None, **parsed, "kwargs": kwargs}


def _parsed(name: str, text: bytes) -> Any:
    try:
        return json.loads(text or (b"{}" if name == "template_kwargs" else b""))
    except RecursionError:
        raise InvalidPartError(f"{name} is not JSON: it is nested too deeply") from None
    except ValueError as error:
        raise InvalidPartError(f"{name} is not JSON: {error}") from None


def _begin(first: bytes) -> Callable[[bytes, BinaryIO], bytes]:
    given = json.loads(first)
    return partial(_answer, Templates(given["templates"], given["special_tokens"]))


def _answer(templates: Templates, frame: bytes, incoming: BinaryIO) -> bytes:
    asked = json.loads(frame)
    parts = {name: read_frame(incoming) or b"" for name in asked["parts"]}
    try:
        text = templates.render(asked | _conversation(parts))
        if len(answer := DONE + text.encode()) > asked["most_bytes"]:
            return REFUSED + b"its text has more than %d bytes" % asked["most_bytes"]
    except InvalidPartError as error:
        return INVALID + str(error).encode("utf-8", "replace")
    except Exception as error:  # noqa: BLE001 - templates are programs of strangers
        return REFUSED + _problem_of(error).encode("utf-8", "replace")
    return answer


def _problem_of(error: Exception) -> str:
    """The template's own sentence, or a defect's."""
    own = type(error) is jinja2.TemplateError or type(error) is ValueError
    told = str(error) if own else f"{type(error).__name__}: {error}"
    return told[:MOST_PROBLEM_CHARACTERS]


if __name__ == "__main__":
    serve(_begin)
