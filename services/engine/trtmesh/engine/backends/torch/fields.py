"""The fields that the torch backend supports by its settings; all others are refused when set."""

from __future__ import annotations

from trtmesh.v1.generation_fields import supported_by

ADAPTERS = frozenset({"lora.id", "lora.name", "lora.version"})
SUPPORTED_FIELDS = supported_by("torch") - ADAPTERS

DRAFTS = frozenset(field for field in SUPPORTED_FIELDS if field.startswith("draft."))
GUIDES = frozenset(field for field in SUPPORTED_FIELDS if field.startswith("guided_decoding."))
PROMPT_TABLES = frozenset(field for field in SUPPORTED_FIELDS if field.startswith("prompt_tuning."))


def supported_fields(
    *,
    adapters: bool,
    prompt_tables: bool = True,
    guides: bool = True,
    drafts: bool = True,
) -> frozenset[str]:
    """The fields supported with or without the named parts."""
    fields = SUPPORTED_FIELDS
    if not prompt_tables:
        fields -= PROMPT_TABLES
    if not guides:
        fields -= GUIDES
    if not drafts:
        fields -= DRAFTS
    return fields | ADAPTERS if adapters else fields
