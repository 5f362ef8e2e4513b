"""Writes trtmesh/values.schema.json: values.schema.yaml, and the settings of the services from the code."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from trtmesh.engine.settings import EngineSettings
from trtmesh.router.settings import RouterSettings
from trtmesh.tokenizer.settings import TokenizerSettings

SOURCE = Path(__file__).with_name("values.schema.yaml")
PAGE = Path(__file__).with_name("trtmesh") / "values.schema.json"

NAME = re.compile(r'"#/\$defs/settings\.(\w+)"')

OF_EVERY_CHART = "host port metrics_port grace_seconds stop_on_stdin_eof tls"
OF_THE_CHART: dict[type[BaseModel], str] = {
    RouterSettings: (
        f"{OF_EVERY_CHART} min_drain_seconds engines tokenizers http.port admin.host admin.port admin.token_file"
        " api_keys.file adapters.directory adapters.roots adapters.follow adapters.follow_token_file"
    ),
    EngineSettings: f"{OF_EVERY_CHART} backend model_dir model role torch.device foreign worker",
    TokenizerSettings: f"{OF_EVERY_CHART} model_dir",
}
"""The settings that the chart gives itself, and refuses in `settings`."""


def page() -> str:
    schema = yaml.safe_load(SOURCE.read_text(encoding="utf-8"))
    models = [(cls, "validation") for cls in OF_THE_CHART]
    template = "#/$defs/settings.{model}"
    names, generated = models_json_schema(models, ref_template=template)  # type: ignore[arg-type]  # a Literal
    found = {name: _bare(each) for name, each in generated["$defs"].items()}
    for cls, owned in OF_THE_CHART.items():
        whole = found[names[cls, "validation"]["$ref"].removeprefix("#/$defs/settings.")]
        for path in owned.split():
            _drop(whole, path.split("."), found)
        found[cls.__name__.removesuffix("Settings").lower()] = whole
    used = _named(schema, found)
    schema["$defs"] |= {f"settings.{name}": found[name] for name in sorted(used)}
    return json.dumps(schema, indent=1) + "\n"


def _named(schema: Any, found: Mapping[str, Any]) -> set[str]:
    """The settings named by a schema, and by those in turn: not what the chart owns, nor what it replaces."""
    names = set(NAME.findall(json.dumps(schema)))
    return names.union(*(_named(found[name], found) for name in names))


def _drop(whole: dict[str, Any], path: list[str], found: dict[str, Any]) -> None:
    """Removes a setting; none is required, since the chart gives those."""
    for name in path[:-1]:
        whole = found[whole["properties"][name]["$ref"].removeprefix("#/$defs/settings.")]
    whole.pop("required", None)
    del whole["properties"][path[-1]]


def _bare(schema: Any) -> Any:
    """Leaves out what names a property twice, or needs escaping."""
    if isinstance(schema, list):
        return [_bare(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: {name: _bare(each) for name, each in value.items()}
        if key == "properties"
        else _bare(value)
        for key, value in schema.items()
        if key not in ("title", "default", "format", "discriminator")
    }


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
