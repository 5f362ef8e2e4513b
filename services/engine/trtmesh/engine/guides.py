"""What the guides of all backends have in common."""

from __future__ import annotations

import json
import re

from trtmesh.chassis.errors import InvalidField
from trtmesh.chassis.json_text import load_json

FIELD = "guided_decoding.guide"
SPECIAL = re.compile(r"([\\.^$|?*+()\[\]{}])")
"""Characters with a meaning in a regular expression."""


def regex_of_choices(guide: str) -> str:
    """A regular expression for the texts of GUIDE_TYPE_CHOICE. Raises InvalidField."""
    try:
        texts = load_json(guide)
    except json.JSONDecodeError as error:
        raise InvalidField(f"is not JSON: {error}", field=FIELD) from None
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        raise InvalidField("must be a JSON array of texts, of at least one", field=FIELD)
    return "|".join(SPECIAL.sub(r"\\\1", text) for text in texts)
