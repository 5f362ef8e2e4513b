"""The public surface of the SDK is a list under test."""

from __future__ import annotations

from types import ModuleType

import trtmesh.client


def test_all_is_sorted_complete_and_true() -> None:
    exported = trtmesh.client.__all__
    assert exported == sorted(exported, key=lambda name: (not name.isupper(), name))
    assert all(hasattr(trtmesh.client, name) for name in exported)
    public = {
        name
        for name, value in vars(trtmesh.client).items()
        if not name.startswith("_") and not isinstance(value, ModuleType)
    }
    assert public == set(exported)
