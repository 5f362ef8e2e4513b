"""OpenAI's specification as a judge of answers."""

from __future__ import annotations

from functools import cache
from typing import Any

from jsonschema_rs import Validator, validator_for
from public_data import has_public, public_json

SPECIFICATION = "openai_openapi.json"


@cache
def _validator(name: str) -> Validator:
    schemas = _as_2020(public_json(SPECIFICATION)["components"]["schemas"])
    # A stream says null until the end, and so does OpenAI's.
    completion = schemas["CreateCompletionResponse"]["properties"]["choices"]["items"]
    completion["properties"]["finish_reason"]["enum"].append(None)
    completion["properties"]["finish_reason"]["type"] = ["string", "null"]
    reference = f"#/components/schemas/{name}"
    return validator_for({"$ref": reference, "components": {"schemas": schemas}})


def _as_2020(schema: Any) -> Any:
    """OpenAPI 3.0's `nullable`, which the specification still has in places, in words of JSON Schema."""
    if isinstance(schema, list):
        return [_as_2020(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: _as_2020(value) for key, value in schema.items()}
    if made.pop("nullable", None) is True:
        made = {"anyOf": [made, {"type": "null"}]}
    return made


def need_specification() -> None:
    """Skips a test that is about the specification alone, where that is absent."""
    public_json(SPECIFICATION)


def check(name: str, answer: Any) -> None:
    """Fails where an answer is not of the specification's schema. Without the specification, what else a test asserts
    is still tested."""
    if not has_public(SPECIFICATION):
        return
    problems = [
        f"{error.instance_path}: {error.message}" for error in _validator(name).iter_errors(answer)
    ]
    assert problems == [], answer
