"""Addresses of foreign engines, with another contract: `vllm://host:port`."""

from __future__ import annotations

from typing import NamedTuple

from trtmesh.chassis.addresses import Address

ENGINES = ("vllm", "sglang", "trtllm")
"""Engines supported by a bridge."""

MARK = "://"


class ForeignAddress(NamedTuple):
    """The engine at an address; the engine decides the contract."""

    engine: str
    address: Address

    @classmethod
    def parse(cls, text: str) -> ForeignAddress:
        """Parses engine://host:port. Raises ValueError."""
        engine, mark, address = text.partition(MARK)
        if not mark or engine not in ENGINES:
            known = ", ".join(f"{each}{MARK}" for each in ENGINES)
            raise ValueError(f"{text!r} does not begin with one of {known}")
        return cls(engine, Address.parse(address))

    def __str__(self) -> str:
        return f"{self.engine}{MARK}{self.address}"


def is_foreign(text: str) -> bool:
    """Whether an address names an engine's contract, known or not."""
    return MARK in text


def parse_engine(text: str) -> Address | ForeignAddress:
    """Parses the address of an engine, host:port, or of a foreign engine. Raises ValueError."""
    return ForeignAddress.parse(text) if is_foreign(text) else Address.parse(text)


def host_of(parsed: Address | ForeignAddress) -> Address:
    """Returns the host and port of an engine, without the contract."""
    return parsed.address if isinstance(parsed, ForeignAddress) else parsed
