"""The tools of a request: those that the model may or must call, and the grammar that enforces this."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import orjson
from trtmesh.chassis.errors import InvalidField
from trtmesh.router.doors.openai.answer_parser import THINK, THOUGHT, Reading
from trtmesh.router.doors.openai.call_formats import FORMATS, CallFormat
from trtmesh.router.doors.openai.fields import LIST, OBJECT, TEXT, Fields, Kind
from trtmesh.v1 import generation_pb2 as pb

NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,64}")
ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
RESPONSE_TEMPLATE = "response_template"
"""The tool format of models whose answers a tokenizer reads."""
MODES = ("none", "auto", "required")
PLACE = re.compile(r"at (/\S*?)/json_schema(/\S*)? (.*)", re.DOTALL)
"""Matches what an engine says of a schema within structural tags: its path, that of the problem in it, and the rest."""
TAG = re.compile(r".*/tags/(\d+)/")
"""Matches the path of a tool's schema. The innermost tags are those of the tools, in their order."""

Form = dict[str, Any]
"""A format of structural tags."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that a model may call."""

    name: str
    schema: Mapping[str, Any]
    """Of its arguments."""
    is_strict: bool
    told: Mapping[str, Any]
    """The tool as the chat template gets it."""


@dataclass(frozen=True, slots=True)
class ToolUse:
    told: Sequence[Mapping[str, Any]]
    """All of them, as the template gets them."""
    callable: Sequence[Tool]
    must_call: bool
    calls_one: bool
    """Whether there may be no second call."""
    formats: Sequence[CallFormat]
    """Those of the model; none where a tokenizer reads the answers."""

    @property
    def needs_guide(self) -> bool:
        """Whether a grammar must enforce the tool choice."""
        is_strict = any(tool.is_strict for tool in self.callable)
        is_limited = len(self.callable) < len(self.told)
        return self.must_call or self.calls_one or is_strict or is_limited


def read_tools(fields: Fields, tool_format: str) -> ToolUse | None:
    """The tools, unless the request has none or the model is to call none. Raises InvalidField."""
    for name, other in (("functions", "tools"), ("function_call", "tool_choice")):
        fields.refuse(name, f"is not served: send {other}")
    given = fields.take("tools", LIST)
    choice = fields.take("tool_choice", Kind("a mode or an object", (str, dict)))
    at_once = fields.take_flag("parallel_tool_calls", default=True)
    if given is None:
        if choice not in (None, "none"):
            raise InvalidField("belongs to a request with tools", field="tool_choice")
        return None
    if not given:
        raise InvalidField("must have one tool or more", field="tools")
    tools = [_tool(f"tools[{number}]", each) for number, each in enumerate(given)]
    for number, _ in enumerate(tools):
        path = f"tools[{number}].function.parameters"
        fields.call(path, path)
    by_name = {tool.name: tool for tool in tools}
    if len(by_name) < len(tools):
        raise InvalidField("have a name twice", field="tools")
    mode, names = _chosen(choice, by_name)
    if mode == "none":
        return None
    if tool_format not in FORMATS and tool_format != RESPONSE_TEMPLATE:
        raise InvalidField(
            "are not served: the chat template of the model shows no form of calls that is known here"
            " (tokenizer.tool_format), and tokenizer_config.json has no response_template that could be followed; add"
            " one for transformers' parser",
            field="tools",
        )
    is_named = isinstance(choice, dict) and choice["type"] == "function"
    told, usable = [tool.told for tool in tools], [by_name[name] for name in names]
    formats = FORMATS.get(tool_format, ())
    use = ToolUse(told, usable, mode == "required", is_named or not at_once, formats)
    if not formats and use.needs_guide:
        raise InvalidField(
            "may only be auto, and without strict, allowed_tools and parallel_tool_calls: a response_template says"
            " how to read calls, and not how to make the model write them",
            field="tool_choice",
        )
    return use


def _tool(path: str, given: Any) -> Tool:
    if not OBJECT.has(given):
        raise InvalidField("must be an object", field=path)
    function = _function(f"{path}.", given)
    about = Fields(function, f"{path}.function.")
    name = about.need("name", TEXT)
    if not NAME.fullmatch(name):
        raise InvalidField.of(
            f"{path}.function.name", name, "1 to 64 letters, digits and any of _ . : / -"
        )
    about.take("description", TEXT)
    schema = about.take("parameters", OBJECT)
    strict = about.take_flag("strict")
    about.refuse_rest()
    kept = {key: value for key, value in function.items() if key != "strict" and value is not None}
    return Tool(name, schema or ANY_OBJECT, strict, {"type": "function", "function": kept})


def _function(path: str, given: Mapping[str, Any]) -> Mapping[str, Any]:
    """The function of a tool of this type. Raises InvalidField."""
    told = Fields(given, path)
    if (kind := told.need("type", TEXT)) != "function":
        raise InvalidField.of(f"{path}type", kind, "function")
    function: Mapping[str, Any] = told.need("function", OBJECT)
    told.refuse_rest()
    return function


def _chosen(choice: Any, known: Collection[str]) -> tuple[str, Sequence[str]]:
    """The mode, and the names of the tools that may be called. Raises InvalidField."""
    if not OBJECT.has(choice):
        mode = choice or "auto"
        if mode not in MODES:
            limit = f"one of {', '.join(MODES)}, or an object"
            raise InvalidField.of("tool_choice", mode, limit)
        return mode, list(known)
    told = Fields(choice, "tool_choice.")
    match told.need("type", TEXT):
        case "function":
            names = [_name("tool_choice.function", told.need("function", OBJECT), known)]
            mode = "required"
        case "allowed_tools":
            path = "tool_choice.allowed_tools."
            allowed = Fields(told.need("allowed_tools", OBJECT), path)
            if (mode := allowed.need("mode", TEXT)) not in MODES[1:]:
                raise InvalidField.of(f"{path}mode", mode, "auto or required")
            functions = [
                _function(f"{path}tools[{number}].", each)
                for number, each in enumerate(allowed.take_list("tools", OBJECT))
            ]
            if not functions:
                raise InvalidField("must have one tool or more", field=f"{path}tools")
            names = [_name(f"{path}tools", each, known) for each in functions]
            allowed.refuse_rest()
        case kind:
            raise InvalidField.of("tool_choice.type", kind, "function or allowed_tools")
    told.refuse_rest()
    return mode, names


def _name(path: str, function: Mapping[str, Any], known: Collection[str]) -> str:
    name = Fields(function, f"{path}.").need("name", TEXT)
    if name not in known:
        raise InvalidField.of(f"{path}.name", name, "the name of one of the tools")
    return str(name)


def reading_of(use: ToolUse | None, *, reasons: bool) -> Reading:
    """How to read the answers of a model."""
    if use is None:
        return Reading(reasons)
    names = frozenset(tool.name for tool in use.callable)
    return Reading(reasons, formats=use.formats, tools=names)


def guided(config: pb.GuidedDecodingConfig, use: ToolUse | None, reading: Reading) -> Reading:
    """Changes the guide of the config where the tools need one, or where reasoning must end before a guide begins: the
    guide then describes the reasoning, and behind it the calls or what the config asked for. Returns how to read the
    answer. Raises InvalidField for a guide that cannot be combined with the tools."""
    has_calls = use is not None and (use.needs_guide or bool(config.guide_type))
    if not has_calls and not (config.guide_type and reading.is_thinking):
        return reading
    content = _content(config)
    if use is None:
        answer = content
    elif use.must_call:
        answer = _calls(use)
    else:
        answer = _free(use, content)
    if reading.is_thinking:
        answer = _sequence(_thought(""), answer)
    elif reading.reasons and use is not None and (use.must_call or content is not None):
        may_think = {"type": "or", "elements": [_thought(THINK), _text("")]}
        answer = _sequence(may_think, answer)
    config.guide_type = pb.GUIDE_TYPE_STRUCTURAL_TAG
    config.guide = orjson.dumps({"type": "structural_tag", "format": answer}).decode()
    must_call = use is not None and use.must_call
    return replace(reading, is_guided=has_calls, must_call=must_call)


def about_schema(error: InvalidField, use: ToolUse | None) -> InvalidField:
    """What an engine says of a guide that `guided` made, as an error about the tool or the format with the problem."""
    if (found := PLACE.fullmatch(error.problem)) is None:
        told = error.sentence(lambda _: "")
        problem = f"have no grammar that the engine follows, as it {told}; send fewer tools, or shorter schemas"
        return error if use is None else InvalidField(problem, field="tools")
    path, inner, rest = found.groups()
    field = "response_format"
    if use is not None and (tag := TAG.match(path)):
        names = [each["function"]["name"] for each in use.told]
        number = names.index(use.callable[int(tag[1])].name)
        field = f"tools[{number}].function.parameters"
    return InvalidField(f"at {inner or '/'} {rest}", field=field)


def _content(config: pb.GuidedDecodingConfig) -> Form | None:
    """The format of a guide for the text of an answer, if there is one. Raises InvalidField."""
    match config.guide_type:
        case pb.GUIDE_TYPE_UNSPECIFIED:
            return None
        case pb.GUIDE_TYPE_JSON:
            return _json(ANY_OBJECT)
        case pb.GUIDE_TYPE_JSON_SCHEMA:
            return _json(orjson.loads(config.guide))
        case pb.GUIDE_TYPE_CHOICE:
            return {"type": "or", "elements": [_text(each) for each in orjson.loads(config.guide)]}
    problem = "must be JSON or a choice where the model calls tools or reasons"
    raise InvalidField(problem, field="structured_outputs")


def _free(use: ToolUse, content: Form | None) -> Form:
    """Returns the format of calls or else free text. Raises InvalidField where a grammar cannot allow both."""
    form = use.formats[0]
    if content is None:
        return _triggered(use)
    if form.may_lack_marker:
        # Calls have no marker that tells them from other JSON.
        problem = "does not go with tools that the model may call; set tool_choice, or leave it out"
        raise InvalidField(problem, field="response_format")
    return {"type": "or", "elements": [content, _calls(use, form.specials)]}


def _calls(use: ToolUse, specials: Sequence[str] = ()) -> Form:
    """One call or more, and nothing else, with `specials` as tokens."""
    form = use.formats[0]
    if not form.separator:
        tags = _tags(use, specials, form.opening, form.closing)
        return _list(use, tags, form.between)
    calls = _list(use, _tags(use, specials), form.separator)
    return _sequence(*_spelled(form.opening, specials), calls, _text(form.closing))


def _triggered(use: ToolUse) -> Form:
    """Free text with calls. A model that may call writes the special tokens of calls, which match no text."""
    form = use.formats[0]
    tags = _tags(use, form.specials, form.opening, form.closing)
    if form.bracket:
        calls = _list(use, _tags(use, form.specials), form.separator)
        tags = [_tag(_spelled(form.opening, form.specials), calls, form.closing)]
    told: Form = {"type": "triggered_tags", "triggers": [form.trigger]}
    if form.specials:
        told = {"type": "token_triggered_tags", "trigger_tokens": form.specials[:1]}
    return told | {"tags": tags, "stop_after_first": use.calls_one}


def _tags(
    use: ToolUse, specials: Sequence[str], opening: str = "", closing: str = ""
) -> list[Form]:
    """A tag for each tool. Where the model need not call, only the arguments of strict tools follow their schema."""
    form, tags = use.formats[0], []
    for tool in use.callable:
        schema = tool.schema if tool.is_strict or use.must_call else ANY_OBJECT
        begin = _spelled(opening + form.head(tool.name), specials)
        tags.append(_tag(begin, _json(schema), form.tail + closing))
    return tags


def _spelled(text: str, specials: Sequence[str]) -> list[Form]:
    """A text in parts, of which `specials` are tokens."""
    parts = re.split(f"({'|'.join(map(re.escape, specials))})", text) if specials else [text]
    return [
        {"type": "token", "token": part} if part in specials else _text(part)
        for part in parts
        if part
    ]


def _list(use: ToolUse, tags: list[Form], separator: str) -> Form:
    told = {"type": "tags_with_separator", "tags": tags, "separator": separator}
    return told | {"at_least_one": True, "stop_after_first": use.calls_one}


def _thought(begin: str) -> Form:
    return _sequence(_tag([_text(begin)], {"type": "any_text"}, THOUGHT), _text("\n\n"))


def _tag(begin: Sequence[Form], content: Form, end: str) -> Form:
    first, *rest = begin
    content = _sequence(*rest, content) if rest else content
    return {"type": "tag", "begin": first.get("value", first), "content": content, "end": end}


def _json(schema: Any) -> Form:
    return {"type": "json_schema", "json_schema": schema}


def _text(value: str) -> Form:
    return {"type": "const_string", "value": value}


def _sequence(*elements: Form | None) -> Form:
    return {"type": "sequence", "elements": elements}
