"""The optional secret of the admin API.

Router and client read the token from a file or from the environment variable TRTMESH_ADMIN_TOKEN. Calls send it as
`authorization: Bearer <token>`. The token never appears in an error message, a log line or a `repr`.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from trtmesh.chassis.errors import SettingsError

ADMIN_TOKEN_VARIABLE = "TRTMESH_ADMIN_TOKEN"  # noqa: S105 - the name of a variable
ADMIN_TOKEN_METADATA_KEY = "authorization"  # noqa: S105 - the name of a metadata key
MAX_TOKEN_LENGTH = 4096


@dataclass(frozen=True, slots=True)
class AdminToken:
    """Printable ASCII without spaces: a single word of a metadata value."""

    _text: str = field(repr=False)

    @classmethod
    def of(cls, text: str, source: str = "the admin token") -> AdminToken:
        """Parses a token. Raises SettingsError with `source` but without the text."""
        token = text.strip()
        if not token:
            raise SettingsError(f"{source} is empty; give it a token, or unset it")
        if len(token) > MAX_TOKEN_LENGTH or not all("!" <= char <= "~" for char in token):
            raise SettingsError(
                f"{source} is not 1 to {MAX_TOKEN_LENGTH} printable ASCII characters without spaces"
            )
        return cls(token)

    @property
    def metadata(self) -> tuple[str, str]:
        """Metadata key and value."""
        return ADMIN_TOKEN_METADATA_KEY, f"Bearer {self._text}"

    def is_in(self, metadata: Iterable[tuple[str, str | bytes]]) -> bool:
        """Whether a call has the token, compared in constant time."""
        expected = self.metadata[1].encode()
        shown = [value for key, value in metadata if key == ADMIN_TOKEN_METADATA_KEY]
        return len(shown) == 1 and hmac.compare_digest(_bytes(shown[0]), expected)


def read_admin_token(file: Path | None, environ: Mapping[str, str]) -> AdminToken | None:
    """The token of `file`, else of the environment; None without either. Raises SettingsError for an invalid token,
    because ignoring it would leave the API open."""
    if file is not None:
        return AdminToken.of(_read(file), f"the admin token file {file}")
    if ADMIN_TOKEN_VARIABLE in environ:
        variable = f"environment variable {ADMIN_TOKEN_VARIABLE}"
        return AdminToken.of(environ[ADMIN_TOKEN_VARIABLE], variable)
    return None


def _read(file: Path) -> str:
    try:
        with file.open(encoding="ascii", errors="replace") as lines:
            # One character over the limit, and the end of the line.
            return lines.read(MAX_TOKEN_LENGTH + 2)
    except OSError as error:
        raise SettingsError(f"cannot read the admin token file {file}: {error.strerror}") from error


def _bytes(value: str | bytes) -> bytes:
    return value if isinstance(value, bytes) else value.encode()
