"""Structural tags: free text in which a trigger begins a tag, with JSON of its schema up to its end.

In the notation of TensorRT-LLM 1.x: `{"structures": [{"begin": "<f=a>", "schema": {}, "end": "</f>"}], "triggers":
["<f="]}`, with or without `"type": "structural_tag"`. Triggers are texts; special tokens are none.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

from trtmesh.chassis.errors import InvalidField
from trtmesh.chassis.json_text import load_json
from trtmesh.engine.backends.torch.guided.schemas import Schema, read_schema
from trtmesh.engine.guides import FIELD

SHAPE = '{"structures": [{"begin": "...", "schema": {...}, "end": "..."}], "triggers": ["..."]}'


def tag_grammar(text: str, options: Schema) -> str:
    """A grammar in Lark's notation; `options` are the library's for JSON. Raises InvalidField."""
    from llguidance import StructTag

    try:
        given = load_json(text)
    except json.JSONDecodeError as error:
        raise InvalidField(f"is not JSON: {error}", field=FIELD) from None
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


def _has(value: Any, kinds: dict[str, type], more: Collection[str] = ()) -> bool:
    """Whether a value is an object with these members, and no others but `more`."""
    if not isinstance(value, dict) or value.keys() - set(more) != kinds.keys():
        return False
    return all(isinstance(value[name], kind) for name, kind in kinds.items())
