"""Valid and invalid addresses."""

from __future__ import annotations

import pytest
from trtmesh.chassis.addresses import Address


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("engines:9000", "engines", 9000),
        ("engine-0.engine_pods.svc.:1", "engine-0.engine_pods.svc.", 1),
        ("10.0.0.1:65535", "10.0.0.1", 65535),
        ("[fd00::1]:9000", "fd00::1", 9000),
        ("[fe80::1%eth0]:9000", "fe80::1%eth0", 9000),
        ("maschine-zwölf:9000", "maschine-zwölf", 9000),
    ],
)
def test_address_is_a_host_and_a_port(text: str, host: str, port: int) -> None:
    assert Address.parse(text) == (host, port)
    assert str(Address.parse(text)) == text


NONE = [
    "", "host", "host:", ":1", "host:0", "host:65536", "host:x", "host:-1", "host: 1", "host:٣",
    "fd00::1:9000", "[fd00::1]", "[fd00::1]:", "[host]:1", "[]:1", "[10.0.0.1]:1", "a b:1",
    "/etc/passwd:1", "unix:/run/x:1", "http://host:1", "file:", "file:x:1",
]  # fmt: skip


@pytest.mark.parametrize("text", [*NONE, "file:/etc/passwd"])
def test_invalid_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not host:port"):
        Address.parse(text)
