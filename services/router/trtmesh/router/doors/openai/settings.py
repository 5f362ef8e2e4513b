"""Settings of the OpenAI door."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field
from trtmesh.chassis.settings import Settings, parse_json_text


class OpenAiSettings(Settings):
    """The door for OpenAI's clients, at the HTTP port."""

    model_defaults: bool = True
    """Whether the model's generation_config.json gives temperature, top_p, top_k, min_p, repetition_penalty and, for
    conversations, the most tokens where a request does not."""
    unknown_fields: Literal["refuse", "report"] = "refuse"
    """What becomes of a field that the door does not know: `refuse` answers 400, `report` leaves it out and names it in
    the header `x-ignored-fields`. One that would limit the answer is refused anyway."""
    aliases: Annotated[Mapping[str, str], BeforeValidator(parse_json_text)] = Field(
        default_factory=dict
    )
    """Further names of models and adapters, each with what it means. JSON in a flag or a variable."""
