"""The fields that the torch backend supports by its settings; all others are refused when set."""

from __future__ import annotations

from trtmesh.v1.generation_fields import FILTERS, supported_by

ADAPTERS = frozenset({"lora.id", "lora.name", "lora.version"})
SUPPORTED_FIELDS = supported_by("torch") - ADAPTERS

FILTERING = frozenset(f"sampling.{name}" for name in FILTERS)
TOP_K = frozenset({"sampling.top_k"})
TOP_P = frozenset(field for field in FILTERING if field.startswith("sampling.top_p"))
BEAMS = frozenset(field for field in SUPPORTED_FIELDS if field.startswith("beam_search."))
DRAFTS = frozenset(field for field in SUPPORTED_FIELDS if field.startswith("draft."))
GUIDES = frozenset(field for field in SUPPORTED_FIELDS if field.startswith("guided_decoding."))
PROMPT_TABLES = frozenset(field for field in SUPPORTED_FIELDS if field.startswith("prompt_tuning."))

# Fields without effect in a decoding mode. Not the seed, which is always sent.
_REFUSED = {
    "auto": frozenset[str](),
    "top_k": BEAMS | TOP_P,
    "top_p": BEAMS | TOP_K,
    "top_k_top_p": BEAMS,
    "beam_search": FILTERING | {"sampling.temperature"},
}


def supported_fields(
    decoding_mode: str,
    *,
    adapters: bool,
    prompt_tables: bool = True,
    guides: bool = True,
    drafts: bool = True,
) -> frozenset[str]:
    """The fields supported in a mode of Triton's parameter `decoding_mode`, with or without the named parts."""
    fields = SUPPORTED_FIELDS - _REFUSED[decoding_mode]
    if not prompt_tables:
        fields -= PROMPT_TABLES
    if not guides:
        fields -= GUIDES
    if not drafts:
        fields -= DRAFTS
    return fields | ADAPTERS if adapters else fields
