"""Says why a value is invalid, in the words of YAML and flags: pydantic's words name types of Python."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_WORDS: Mapping[str, str] = {
    "bool": "must be true or false",
    "dataclass_type": "must be a mapping",
    "dict_type": "must be a mapping",
    "extra_forbidden": "is unknown",
    "finite_number": "must be finite",
    "float": "must be a number",
    "greater_than": "must be above {gt}",
    "greater_than_equal": "must be at least {ge}",
    "int": "must be a whole number",
    "json_invalid": "must be JSON: {error}",
    "less_than": "must be below {lt}",
    "less_than_equal": "must be at most {le}",
    "list_type": "must be a list",
    "literal_error": "must be {expected}",
    "mapping_type": "must be a mapping",
    "missing": "is missing",
    "model_type": "must be a mapping",
    "path_type": "must be a path",
    "string_pattern_mismatch": "must match {pattern}",
    "string_too_long": "must have at most {max_length} characters",
    "string_too_short": "must have at least {min_length} characters",
    "string_type": "must be a text",
    "too_long": "must have at most {max_length} entries",
    "too_short": "must have at least {min_length} entries",
    "tuple_type": "must be a list",
    "unexpected_keyword_argument": "is unknown",
    "value_error": "{error}",
}
"""Problems by pydantic's type of error, or by the first word of the type: `int` for int_parsing."""


def problem_of(error: Mapping[str, Any]) -> str:
    """Returns the problem of an error of pydantic, as the continuation of a sentence about the value."""
    kind = error["type"]
    words = _WORDS.get(kind) or _WORDS.get(kind.partition("_")[0])
    if words is None:
        return str(error["msg"]).replace("Input should", "must", 1)
    given = {name: _plain(each) for name, each in error.get("ctx", {}).items()}
    if kind == "value_error":
        return str(error["ctx"]["error"])
    return words.format(**given)


def _plain(value: object) -> str:
    """A limit, or a list of words, without the marks of Python."""
    return f"{value:g}" if isinstance(value, float) else str(value).replace("'", "")


def joined(subject: str, problem: str) -> str:
    """Returns a sentence with the value and the problem."""
    return f"{subject} but {problem}" if problem.startswith("must ") else f"{subject}: {problem}"
