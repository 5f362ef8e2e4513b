"""Options of `trtmesh generate` for guided decoding."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import typer
from trtmesh.cli.option_groups import option
from trtmesh.cli.prompts import read_text
from trtmesh.client import GuidedDecodingConfig, GuideType

PANEL = "Guided decoding, one of"


@dataclass(frozen=True, slots=True)
class GuideOptions:
    """The guide of a request."""

    json_object: bool = option("The output is a JSON object.", default=False, panel=PANEL)
    json_schema: str | None = option("JSON schema, or @FILE with one.", panel=PANEL)
    regex: str | None = option("Regular expression of the whole output.", panel=PANEL)
    grammar: str | None = option("Grammar as GBNF or Lark, or @FILE with one.", panel=PANEL)
    choice: list[str] | None = option("Text that the output may be; repeatable.", panel=PANEL)

    def message(self) -> GuidedDecodingConfig | None:
        """Raises BadParameter for several guides."""
        given = {
            GuideType.GUIDE_TYPE_JSON: "" if self.json_object else None,
            GuideType.GUIDE_TYPE_JSON_SCHEMA: self.json_schema,
            GuideType.GUIDE_TYPE_REGEX: self.regex,
            GuideType.GUIDE_TYPE_EBNF_GRAMMAR: self.grammar,
            GuideType.GUIDE_TYPE_CHOICE: json.dumps(self.choice) if self.choice else None,
        }
        guides = {kind: guide for kind, guide in given.items() if guide is not None}
        if not guides:
            return None
        if len(guides) > 1:
            raise typer.BadParameter(
                "give one of --json-object, --json-schema, --regex, --grammar and --choice"
            )
        ((kind, guide),) = guides.items()
        if kind == GuideType.GUIDE_TYPE_JSON:
            return GuidedDecodingConfig(guide_type=kind)
        if guide.startswith("@") and kind != GuideType.GUIDE_TYPE_REGEX:
            guide = read_text(Path(guide[1:]))
        return GuidedDecodingConfig(guide_type=kind, guide=guide)
