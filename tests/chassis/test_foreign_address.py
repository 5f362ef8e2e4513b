"""Addresses of engines, ours and foreign."""

from __future__ import annotations

import pytest
from trtmesh.chassis.addresses import Address, ForeignAddress, host_of, parse_engine


@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm"])
def test_foreign_engine_has_its_contract_before_its_address(engine: str) -> None:
    parsed = parse_engine(f"{engine}://[::1]:50051")
    assert parsed == ForeignAddress(engine, Address("::1", 50051))
    assert str(parsed) == f"{engine}://[::1]:50051"
    assert host_of(parsed) == Address("::1", 50051)


def test_our_engine_has_its_address_alone() -> None:
    assert parse_engine("engine:9101") == Address("engine", 9101)
    assert host_of(Address("engine", 9101)) == Address("engine", 9101)


@pytest.mark.parametrize(
    "text",
    ["vlm://a:1", "://a:1", "http://a:1", "vllm://a", "vllm://", "vllm://a:1/path", "vllm:a:1"],
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not host:port|does not begin with one of"):
        parse_engine(text)
