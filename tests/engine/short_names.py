"""Settings of a backend by short names."""

from __future__ import annotations

from typing import Any, TypeVar

from trtmesh.chassis.settings import LeafPath, Settings, iterate_leaves

S = TypeVar("S", bound=Settings)


def by_short_names(cls: type[S], **values: Any) -> S:
    """Settings whose names stand without groups that they do not need: `tokens_per_block`, `kv_cache_tokens`."""
    tree: dict[str, Any] = {}
    for name, value in values.items():
        *groups, leaf = _path(cls, name)
        node = tree
        for group in groups:
            node = node.setdefault(group, {})
        node[leaf] = value
    return cls.model_validate(tree)


def _path(cls: type[Settings], name: str) -> LeafPath:
    (path,) = [path for path, _ in iterate_leaves(cls) if name in _names(path)]
    return path


def _names(path: LeafPath) -> list[str]:
    return ["_".join(path[start:]) for start in range(len(path))]
