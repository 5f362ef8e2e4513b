"""The configuration file: sections of settings in YAML."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml
from trtmesh.chassis.errors import SettingsError

SECTIONS = frozenset({"mesh", "router", "tokenizer", "engine"})
"""Sections of a configuration file; `mesh` belongs to `trtmesh up`."""


def read_config_file(file: Path) -> dict[str, dict[str, object]]:
    """Reads the sections of a YAML configuration file. Raises SettingsError."""
    try:
        content = load_yaml(file.read_text(encoding="utf-8")) or {}
    except OSError as error:
        raise SettingsError(
            f"cannot read the configuration file {file}: {error.strerror}"
        ) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SettingsError(f"the configuration file {file} is not YAML: {error}") from error
    if not isinstance(content, dict):
        raise SettingsError(f"the configuration file {file} must be a mapping of sections")
    for name, section in content.items():
        if name not in SECTIONS:
            raise SettingsError(
                f"the configuration file {file} has an unknown section {name!r}"
                f"{suggestion(str(name), SECTIONS)}; sections are {', '.join(sorted(SECTIONS))}"
            )
        if not isinstance(section, dict):
            raise SettingsError(f"section {name!r} of {file} must be a mapping, not {section!r}")
    return content


def load_yaml(text: str) -> Any:
    """Parses YAML without objects; refuses duplicate keys. Raises yaml.YAMLError."""
    return yaml.load(text, _Loader)  # noqa: S506 - it is a safe one


class _Loader(yaml.SafeLoader):
    """Refuses duplicate keys; SafeLoader silently keeps the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:  # noqa: FBT001, FBT002 - PyYAML's
        seen: set[object] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{key.value!r} stands here twice", key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def suggestion(
    name: str, known: Sequence[str] | Mapping[str, object] | frozenset[str] | set[str]
) -> str:
    """The end of a message about `name`: which of `known` was probably meant, or nothing."""
    close = get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""
