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


ADDRESSES = frozenset({"router.engines", "router.tokenizers", "mesh.engines_at"})
"""Settings with lists of addresses, and files of addresses."""

FILE_ENTRY = "file:"
"""Begins the name of a file among ADDRESSES."""

LISTS = ADDRESSES | {
    *("mesh.model", "router.adapters.roots"),
    *("router.foreign.model_dirs", "engine.foreign.model_dirs"),
}
"""Settings given as a list or as a text with commas."""

PATHS = frozenset(
    {
        *LISTS,
        *("mesh.adapters", "mesh.triton_model_repo", "mesh.log_dir"),
        *("router.admin.token_file", "router.api_keys.file", "router.record.file"),
        *("router.receipts.file", "router.receipts.key_file"),
        *("router.adapters.directory", "router.adapters.follow_token_file"),
        *("tokenizer.model_dir", "engine.model_dir"),
        *("engine.torch.adapters.prefetch_directory", "engine.torch.draft_model"),
        "engine.tensorrt_llm.engine_dir",
        *(
            f"{service}.tls.{name}"
            for service in ("router", "tokenizer", "engine")
            for name in ("certificate", "key", "client_ca", "ca")
        ),
    }
)
"""Settings with names of files and directories. In a file, relative paths begin at the file's directory."""


def read_config_file(file: Path) -> dict[str, dict[str, object]]:
    """Reads the sections of a YAML configuration file, with whole paths. Raises SettingsError."""
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
    return {
        name: {key: _placed(value, f"{name}.{key}", file.parent) for key, value in section.items()}
        for name, section in content.items()
    }


def _placed(value: Any, name: str, directory: Path) -> Any:
    """The value of a setting, or the settings of a group, with whole paths."""
    if isinstance(value, dict):
        return {key: _placed(each, f"{name}.{key}", directory) for key, each in value.items()}
    if name not in PATHS:
        return value
    if isinstance(value, list):
        return [_placed(each, name, directory) for each in value]
    if not isinstance(value, str):
        return value
    if name in LISTS:
        return ",".join(_place(each.strip(), name, directory) for each in value.split(","))
    return _place(value, name, directory)


def _place(text: str, name: str, directory: Path) -> str:
    mark = FILE_ENTRY if name in ADDRESSES else ""
    path = text.removeprefix(mark)
    if not path or (mark and path == text):
        return text
    return f"{mark}{directory.absolute() / path}"


def load_yaml(text: str) -> Any:
    """Parses YAML without objects; refuses duplicate keys. Raises yaml.YAMLError."""
    try:
        return yaml.load(text, _Loader)  # noqa: S506 - it is a safe one
    except RecursionError:
        raise yaml.YAMLError("it is nested too deeply") from None


class _Loader(yaml.SafeLoader):
    """Refuses duplicate keys; SafeLoader silently keeps the last."""

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
    """Returns the end of a message about `name`: the probably intended name of `known`, or ''."""
    close = get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""
