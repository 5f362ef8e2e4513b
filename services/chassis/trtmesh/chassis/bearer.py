"""Secrets of calls, sent as `authorization: Bearer <secret>`.

They come from a file or from an environment variable, and never appear in an error message, a log line or a `repr`.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Self

from trtmesh.chassis.errors import SettingsError

BEARER_METADATA_KEY = "authorization"
MAX_LENGTH = 4096


@dataclass(frozen=True, slots=True)
class Bearer:
    """Printable ASCII without spaces: a single word of a metadata value."""

    what: ClassVar[str]
    """The kind of secret, for errors."""
    variable: ClassVar[str]
    """The environment variable."""

    _text: str = field(repr=False)

    @classmethod
    def of(cls, text: str, source: str = "") -> Self:
        """Parses a secret. Raises SettingsError with `source` but without the text."""
        source, secret = source or f"the {cls.what}", text.strip()
        if not secret:
            raise SettingsError(f"{source} is empty; give it a {cls.what}, or unset it")
        if len(secret) > MAX_LENGTH or not all("!" <= char <= "~" for char in secret):
            raise SettingsError(
                f"{source} is not 1 to {MAX_LENGTH} printable ASCII characters without spaces"
            )
        return cls(secret)

    @classmethod
    def read(cls, file: Path | None, environ: Mapping[str, str]) -> Self | None:
        """Returns the secret of `file`, else of the environment, or None. Raises SettingsError for an invalid secret,
        because ignoring the secret would leave a door open, or a call without a key."""
        if file is not None:
            source = f"the {cls.what} file {file}"
            return cls.of(_read(file, source), source)
        if cls.variable in environ:
            return cls.of(environ[cls.variable], f"environment variable {cls.variable}")
        return None

    def __len__(self) -> int:
        """Its characters."""
        return len(self._text)

    @property
    def metadata(self) -> tuple[str, str]:
        """Metadata key and value."""
        return BEARER_METADATA_KEY, f"Bearer {self._text}"

    def is_in(self, metadata: Iterable[tuple[str, str | bytes]]) -> bool:
        """Whether a call has the secret, compared in constant time."""
        expected = self.metadata[1].encode()
        shown = [value for key, value in metadata if key == BEARER_METADATA_KEY]
        return len(shown) == 1 and hmac.compare_digest(_bytes(shown[0]), expected)


class AdminToken(Bearer):
    """The optional secret of the admin API."""

    what = "admin token"
    variable = "TRTMESH_ADMIN_TOKEN"


class ApiKey(Bearer):
    what = "API key"
    variable = "TRTMESH_API_KEY"


def _read(file: Path, source: str) -> str:
    try:
        with file.open(encoding="ascii", errors="replace") as lines:
            # A character beyond the limit, and the end of the line.
            return lines.read(MAX_LENGTH + 2)
    except OSError as error:
        raise SettingsError(f"cannot read {source}: {error.strerror}") from error


def _bytes(value: str | bytes) -> bytes:
    return value if isinstance(value, bytes) else value.encode()
