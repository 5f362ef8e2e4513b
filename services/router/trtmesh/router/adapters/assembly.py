"""Assembles a content from the parts of a stream, in bounded memory."""

from __future__ import annotations

from typing import Self

from trtmesh.chassis import adapter_content
from trtmesh.chassis.adapter_content import FILE_NAMES, MOST_CONFIG_BYTES, AdapterContent
from trtmesh.chassis.errors import InvalidField, InvalidRequest
from trtmesh.v1 import router_admin_pb2 as pb


def check_size(size: int) -> None:
    """Raises InvalidField for the size of a content above the limit."""
    most = adapter_content.MAX_ADAPTER_BYTES
    if size > most:
        raise InvalidField.of("size", size, f"at most {most} bytes")


class Assembly:
    """A content whose parts arrive."""

    def __init__(self, kind: int, config_bytes: int, weights_bytes: int) -> None:
        self._kind = kind
        self._config_bytes = config_bytes
        self._size = config_bytes + weights_bytes
        self._data = bytearray()

    @classmethod
    def of(cls, first: pb.UploadAdapterRequest | pb.FetchAdapterResponse) -> Self:
        """Begins with the first message. Raises InvalidField."""
        if first.format not in FILE_NAMES:
            limit = "ADAPTER_FORMAT_PEFT or ADAPTER_FORMAT_ARRAYS"
            raise InvalidField.of("format", first.format, limit)
        for field, size in (
            ("config_bytes", first.config_bytes),
            ("weights_bytes", first.weights_bytes),
        ):
            if not size:
                raise InvalidField.of(field, size, "at least 1")
        if first.config_bytes > MOST_CONFIG_BYTES:
            limit = f"at most {MOST_CONFIG_BYTES}"
            raise InvalidField.of("config_bytes", first.config_bytes, limit)
        check_size(first.config_bytes + first.weights_bytes)
        return cls(first.format, first.config_bytes, first.weights_bytes)

    def add(self, data: bytes) -> None:
        """Takes the next bytes. Raises InvalidRequest for more than announced."""
        self._data += data
        if len(self._data) > self._size:
            raise self._wrong_size("more than")

    def content(self) -> AdapterContent:
        """The whole content. Raises InvalidRequest for less than announced."""
        if len(self._data) < self._size:
            raise self._wrong_size(f"{len(self._data)} of")
        whole = memoryview(self._data)
        config, weights = whole[: self._config_bytes], whole[self._config_bytes :]
        return AdapterContent(self._kind, bytes(config), bytes(weights))

    def _wrong_size(self, got: str) -> InvalidRequest:
        return InvalidRequest(
            f"the content has {got} the {self._size} bytes that its first message announced",
            value=str(len(self._data)),
            limit=str(self._size),
        )
