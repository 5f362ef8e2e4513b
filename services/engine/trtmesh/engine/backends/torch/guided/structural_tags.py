"""Structural tags: free text in which a trigger begins a tag, with JSON of its schema up to its end.

In the notation of TensorRT-LLM 1.x: `{"structures": [{"begin": "<f=a>", "schema": {}, "end": "</f>"}], "triggers":
["<f="]}`, with or without `"type": "structural_tag"`; or in that of xgrammar, whose formats contain each other:
`{"type": "structural_tag", "format": {"type": "or", "elements": [...]}}`. Triggers are texts; special tokens are none.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

from trtmesh.chassis.errors import InvalidField
from trtmesh.chassis.json_text import load_json
from trtmesh.engine.backends.torch.guided.schemas import Schema, read_schema
from trtmesh.engine.guides import FIELD

SHAPE = '{"structures": [{"begin": "...", "schema": {...}, "end": "..."}], "triggers": ["..."]}'
MOST_DEPTH = 16
"""Of formats in each other."""
MOST_FREE_TEXTS = 4
"""A place in a text may belong to each of them, and their readings multiply."""
FLAGS = ("at_least_one", "stop_after_first")
FORMATS: Mapping[str, tuple[Mapping[str, type], Collection[str]]] = MappingProxyType(
    {
        "const_string": ({"value": str}, ()),
        "json_schema": ({"json_schema": dict}, ()),
        "sequence": ({"elements": list}, ()),
        "or": ({"elements": list}, ()),
        "tag": ({"begin": str, "content": dict, "end": str}, ()),
        "triggered_tags": ({"triggers": list, "tags": list}, FLAGS[1:]),
        "tags_with_separator": ({"tags": list, "separator": str}, FLAGS),
    }
)
"""Members of each format, and flags that it may have."""


def tag_grammar(text: str, options: Schema) -> str:
    """A grammar in Lark's notation; `options` are the library's for JSON. Raises InvalidField."""
    from llguidance import StructTag

    try:
        given = load_json(text)
    except json.JSONDecodeError as error:
        raise InvalidField(f"is not JSON: {error}", field=FIELD) from None
    if _has(given, {"format": dict}, ["type"]) and given.get("type") == "structural_tag":
        return FormatGrammar(options).of(given["format"])
    if not _has(given, {"structures": list, "triggers": list}, ["type"]):
        raise InvalidField(f"must be {SHAPE}", field=FIELD)
    if given.get("type", "structural_tag") != "structural_tag" or not given["structures"]:
        raise InvalidField(f"must be {SHAPE}, with a structure", field=FIELD)
    tags = []
    for index, each in enumerate(given["structures"]):
        if not _has(each, {"begin": str, "schema": dict, "end": str}):
            raise InvalidField(f"at /structures/{index} must be as in {SHAPE}", field=FIELD)
        begin = each["begin"]
        trigger = next(
            (
                own
                for own in given["triggers"]
                if isinstance(own, str) and own and begin.startswith(own)
            ),
            None,
        )
        if trigger is None:
            problem = f"at /structures/{index}/begin starts with none of the triggers"
            raise InvalidField(problem, field=FIELD)
        schema = read_schema(json.dumps(each["schema"])) | {"x-guidance": options}
        tags.append(StructTag(trigger=trigger, begin=begin, grammar=schema, end=each["end"]))
    return StructTag.to_grammar(tags, assume_special=False)


class FormatGrammar:
    """A grammar of formats in each other, in Lark's notation."""

    def __init__(self, options: Schema) -> None:
        self._options = options
        self._rules = ["%llguidance {}", r"TEXT: /(.|\n)*/"]
        self._free_texts = 0

    def of(self, form: Any) -> str:
        """Raises InvalidField."""
        start = self._of(form, "/format")
        return "\n".join([*self._rules, f"start: {start}"])

    def _of(self, form: Any, path: str) -> str:
        """An expression of the grammar. Raises InvalidField."""
        kind = form.get("type") if isinstance(form, dict) else None
        members, flags = FORMATS.get(kind, ({}, ())) if isinstance(kind, str) else ({}, ())
        if kind not in FORMATS or not _has(form, {"type": str, **members}, flags):
            told = "; ".join(
                " ".join((name, *members, *flags)) for name, (members, flags) in FORMATS.items()
            )
            raise InvalidField(f"at {path} must be a format: {told}", field=FIELD)
        if path.count("/") > MOST_DEPTH:
            raise InvalidField(f"at {path} is nested too deeply", field=FIELD)
        match kind:
            case "const_string":
                return json.dumps(form["value"])
            case "json_schema":
                schema = read_schema(json.dumps(form["json_schema"]))
                return f"%json {json.dumps(schema | {'x-guidance': self._options})}"
            case "tag":
                return self._tag(form, path, form["begin"])
            case "triggered_tags":
                return self._triggered(form, path)
            case "tags_with_separator":
                return self._separated(form, path)
        parts = self._each(form["elements"], path)
        return f"({(' ' if kind == 'sequence' else ' | ').join(parts)})"

    def _each(self, forms: list[Any], path: str) -> list[str]:
        if not forms:
            raise InvalidField(f"at {path} must have one format or more", field=FIELD)
        return [self._of(each, f"{path}/{index}") for index, each in enumerate(forms)]

    def _tag(self, tag: dict[str, Any], path: str, begin: str) -> str:
        """A tag of which this part of the beginning is to come."""
        if tag["content"] == {"type": "any_text"}:
            # Up to the first place where the end stands.
            self._count_free_text(path)
            return self._rule("[lazy]", f"{json.dumps(begin)} TEXT {json.dumps(tag['end'])}")
        return f"{json.dumps(begin)} {self._of(tag['content'], path)} {json.dumps(tag['end'])}"

    def _triggered(self, form: dict[str, Any], path: str) -> str:
        self._each(form["tags"], path)
        self._count_free_text(path)
        tags: dict[str, list[str]] = {}
        for index, tag in enumerate(form["tags"]):
            begin = tag.get("begin", "")
            triggers = (each for each in form["triggers"] if isinstance(each, str) and each)
            trigger = next((each for each in triggers if begin.startswith(each)), None)
            if trigger is None:
                problem = f"at {path}/{index}/begin starts with none of the triggers"
                raise InvalidField(problem, field=FIELD)
            rest = self._tag(tag, f"{path}/{index}", begin[len(trigger) :])
            tags.setdefault(trigger, []).append(rest)
        either = " | ".join(
            f"{self._rule('[lazy]', f'TEXT {json.dumps(trigger)}')} ({' | '.join(rests)})"
            for trigger, rests in tags.items()
        )
        return f"({either} | TEXT)" if form.get("stop_after_first") else f"(({either})* TEXT)"

    def _separated(self, form: dict[str, Any], path: str) -> str:
        tag = f"({' | '.join(self._each(form['tags'], path))})"
        more = "" if form.get("stop_after_first") else f" ({json.dumps(form['separator'])} {tag})*"
        return f"({tag}{more})" + ("" if form.get("at_least_one") else "?")

    def _count_free_text(self, path: str) -> None:
        self._free_texts += 1
        if self._free_texts > MOST_FREE_TEXTS:
            problem = f"at {path} brings the free texts above {MOST_FREE_TEXTS}"
            raise InvalidField(problem, field=FIELD)

    def _rule(self, attributes: str, expression: str) -> str:
        name = f"rule_{len(self._rules)}"
        self._rules.append(f"{name}{attributes}: {expression}")
        return name


def _has(value: Any, kinds: dict[str, type], more: Collection[str] = ()) -> bool:
    """Whether a value is an object with these members, and no others but `more`."""
    if not isinstance(value, dict) or value.keys() - set(more) != kinds.keys():
        return False
    return all(isinstance(value[name], kind) for name, kind in kinds.items())
