"""Guides for tests, and texts of tiny models' tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from engine.torch.harness import configure
from tokenizers import Tokenizer
from trtmesh.chassis.vocabulary import GenerationConfig, GuidedDecoding
from trtmesh.v1 import generation_pb2 as pb


def guided(
    kind: str, guide: str | None = None, max_whitespace: int | None = None, **values: Any
) -> GenerationConfig:
    """A config with a guide, and fields by leaf names."""
    asked = GuidedDecoding(pb.GuideType.Value(f"GUIDE_TYPE_{kind}"), guide, max_whitespace)
    return replace(configure(**values), guided_decoding=asked)


def text_of(model: Path, token_ids: Sequence[int]) -> str:
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    return str(tokenizer.decode(list(token_ids)))


def one_of(depth: int) -> dict[str, Any]:
    if not depth:
        return {"type": "integer"}
    parts = [
        {
            "type": "object",
            "properties": {"k": {"const": k}, "a": one_of(depth - 1)},
            "required": ["k"],
        }
        for k in range(2)
    ]
    return {"oneOf": parts}


def schema(value: Any) -> tuple[str, str]:
    return "JSON_SCHEMA", json.dumps(value)


def ambiguous(number: int) -> tuple[str, str]:
    return "EBNF_GRAMMAR", f"start: a\na: a a | /[a-z{number} ]/ | a a a"


def conjunction(size: int) -> str:
    return "start: T\nT: " + " & ".join(f"/.*a{{0,{n}}}b.*/" for n in range(size))


def tag(form: dict[str, Any]) -> tuple[str, str]:
    return "STRUCTURAL_TAG", json.dumps({"type": "structural_tag", "format": form})


def separated(depth: int) -> dict[str, Any]:
    content = separated(depth - 1) if depth else {"type": "const_string", "value": "a" * 1000}
    own = {"type": "tag", "begin": "", "content": content, "end": ""}
    return {"type": "tags_with_separator", "tags": [own], "separator": ","}


MANY = [
    {"type": "json_schema", "json_schema": {"type": "integer", "multipleOf": number}}
    for number in range(9000, 9999)
]


def triggers(count: int, letter: str) -> tuple[str, str]:
    begins = [f"{letter}{number:05d}" for number in range(count)]
    structures = [{"begin": begin, "schema": {}, "end": "!"} for begin in begins]
    return "STRUCTURAL_TAG", json.dumps({"structures": structures, "triggers": begins})


ATTACKS = {
    "deep oneOf": [schema(one_of(8))],
    "many values": [schema({"enum": [f"value {n}" for n in range(10_000)]})],
    "long texts": [schema({"type": "string", "maxLength": 10**6})] * 3,
    "long arrays": [schema({"type": "array", "minItems": 10**5, "maxItems": 10**6})],
    "expressions": [("REGEX", text) for text in ("((a{1000}){1000})", "(.*a.{200}|.*b.{200})*")],
    "a hundred": [schema({"properties": {f"p{n}": {"type": "integer"}}}) for n in range(100)],
    "triggers": [triggers(count, letter) for count in (32, 1500) for letter in "xyz"],
    "nested tags": [tag(separated(depth)) for depth in range(14, 20)],
    "many schemas": [tag({"type": "sequence", "elements": MANY[n:]}) for n in range(3)],
    "patterns": [
        schema({"allOf": [{"pattern": f"a{{0,{n}}}b"} for n in range(30)]}),
        schema({"patternProperties": {f"^x{n}y[a-z]+$": {} for n in range(900)}}),
    ],
    "multiples": [
        schema({"multipleOf": 9_973_000}),
        schema({"allOf": [{"multipleOf": 99.73}, {"multipleOf": 100}]}),
        schema({"multipleOf": -62_615_533}),
    ],
    "conjunction": [("EBNF_GRAMMAR", conjunction(number)) for number in (26, 27)],
    "ambiguous": [ambiguous(number) for number in range(32)],
}
"""Hostile guides: each is refused, ends or goes on."""
