"""What an entry may be that says where replicas are."""

from __future__ import annotations

import pytest
from chassis.test_addresses import NONE
from trtmesh.chassis.errors import SettingsError
from trtmesh.router.fleet.addresses import check_entries


@pytest.mark.parametrize("entry", [text for text in NONE if text != "file:x:1"])
def test_an_entry_that_is_neither_an_address_nor_a_file_is_refused(entry: str) -> None:
    with pytest.raises(SettingsError, match="engines has the entry"):
        check_entries("engines", ["good:1", entry])


def test_entries_are_addresses_and_files() -> None:
    check_entries("engines", ["good:1", "[::1]:1", "file:/etc/trtmesh/engines", "file:x:1"])
