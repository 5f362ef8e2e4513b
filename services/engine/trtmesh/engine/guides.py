"""What the guides of all backends have in common."""

from __future__ import annotations

import json
import re
from dataclasses import replace

from trtmesh.chassis.errors import InvalidField, UnsupportedField
from trtmesh.chassis.json_text import load_json
from trtmesh.chassis.vocabulary import GuidedDecoding
from trtmesh.v1 import generation_pb2 as pb

FIELD = "guided_decoding.guide"
SPECIAL = re.compile(r"([\\.^$|?*+()\[\]{}])")
"""Characters with a meaning in a regular expression."""


def plain(asked: GuidedDecoding) -> GuidedDecoding:
    """The guide for engines without choices: a regular expression in their place. Raises InvalidField without a guide
    that the type needs, or with one that it does not take."""
    if asked.guide_type == pb.GUIDE_TYPE_JSON:
        if asked.guide:
            problem = "is set, but JSON has none; a schema has the type JSON_SCHEMA"
            raise InvalidField(problem, field=FIELD)
        return asked
    if not asked.guide_type or not asked.guide:
        field = FIELD if asked.guide_type else "guided_decoding.guide_type"
        state = "empty" if asked.guide_type and asked.guide is not None else "not set"
        raise InvalidField(f"is {state}, but the grammar needs it", field=field)
    if asked.guide_type == pb.GUIDE_TYPE_CHOICE:
        regex = regex_of_choices(asked.guide)
        return replace(asked, guide_type=int(pb.GUIDE_TYPE_REGEX), guide=regex)
    return asked


def check_new(asked: GuidedDecoding | None, emitted_tokens: int) -> None:
    """Raises UnsupportedField for a guided sequence that began elsewhere, in an engine of others."""
    if asked is not None and emitted_tokens:
        raise UnsupportedField(
            "is set for a sequence that began elsewhere, but the engine would begin its grammar anew; send the item"
            " again",
            field="guided_decoding",
        )


def regex_of_choices(guide: str) -> str:
    """A regular expression for the texts of GUIDE_TYPE_CHOICE. Raises InvalidField."""
    try:
        texts = load_json(guide)
    except json.JSONDecodeError as error:
        raise InvalidField(f"is not JSON: {error}", field=FIELD) from None
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        raise InvalidField("must be a JSON array of texts, of at least one", field=FIELD)
    return "|".join(SPECIAL.sub(r"\\\1", text) for text in texts)
