"""Names the caller of each call by API key, client certificate or neither."""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeAlias

from trtmesh.chassis.errors import SettingsError, Unauthenticated
from trtmesh.chassis.resting_file import RestingFile
from trtmesh.chassis.settings import Settings
from trtmesh.chassis.tasks import next_tick
from trtmesh.router.callers.identity import ANONYMOUS, Identity
from trtmesh.router.callers.key_file import ListedKey, digest_of, read_keys
from trtmesh.router.callers.limits import RateLimit
from trtmesh.router.metrics import UNLISTED, RouterMetrics

log = logging.getLogger(__name__)

SETTING = "router.api_keys.file"
LOOK_SECONDS = 0.5
"""Interval between two looks at the file."""
LARGEST_FILE = 2**24
"""Most bytes of the file."""
INDEX_BYTES = 8
"""Part of a digest by which a key is found; the whole digest is then compared in constant time."""

Headers: TypeAlias = Iterable[tuple[str, str | bytes]]
"""Metadata of a gRPC call or headers of an HTTP request."""


class ApiKeySettings(Settings):
    """API keys of clients, on all doors but health and metrics."""

    file: Path | None = None
    """File with a line per API key (`trtmesh keys`), read again after changes. Unset checks no key; keys from callers
    then only tell the callers apart."""
    optional: bool = False
    """Whether to serve callers without a key too, under the name `anonymous`; a wrong key is always refused."""


@dataclass(frozen=True, slots=True)
class _Holder:
    """A listed key with the identity of its callers."""

    key: ListedKey
    identity: Identity


class Callers:
    """The callers of a router. Raises SettingsError for an unusable file."""

    def __init__(self, settings: ApiKeySettings, limits: RateLimit, metrics: RouterMetrics) -> None:
        if settings.optional and settings.file is None:
            raise SettingsError(
                "has no effect without router.api_keys.file; leave it out",
                setting="router.api_keys.optional",
            )
        self._file = settings.file
        self._optional = settings.optional or settings.file is None
        self._limits = limits
        self._metrics = metrics
        self._anonymous = Identity(ANONYMOUS, limits)
        self._holders: Mapping[bytes, _Holder] = {}
        self.problem = ""
        """Why the file is not in use as it is now, or ''."""
        if self._file is not None:
            self._resting = RestingFile(self._file)
            self._holders = self._start(self._file)

    @property
    def check_keys(self) -> bool:
        """Whether calls with a wrong key are refused."""
        return self._file is not None

    @property
    def keys(self) -> int:
        """The number of listed keys."""
        return len(self._holders)

    def identify(self, headers: Headers, certificate: str = "") -> Identity:
        """The caller with these headers and the verified client certificate of this name, if any.

        Raises Unauthenticated.
        """
        keys = shown_keys(headers)
        if len(keys) > 1:
            # A proxy in between may have checked one and not the other.
            raise self._refused("the call has several API keys; send one")
        if keys:
            (key,) = keys
            return self._of_key(key, certificate)
        if not self._optional:
            raise self._refused(
                "the call has no API key; send it as `authorization: Bearer KEY` or `x-api-key: KEY`"
            )
        return (
            Identity(_of_certificate(certificate), self._limits) if certificate else self._anonymous
        )

    def _of_key(self, key: str, certificate: str) -> Identity:
        digest = digest_of(key)
        if self._file is None:
            # Who draws a new key for each call is a new owner each time, and must not be a new account.
            account = _of_certificate(certificate) if certificate else ANONYMOUS
            return Identity(f"{UNLISTED}:{digest.hex()[:24]}", self._limits, account)
        holder = self._holders.get(digest[:INDEX_BYTES])
        if holder is None or not hmac.compare_digest(holder.key.digest, digest):
            raise self._refused("the API key of the call is not known to this router")
        if holder.key.expires is not None and holder.key.is_expired(datetime.now(UTC)):
            raise self._refused(f"the API key of the call expired at {holder.key.expires}")
        return holder.identity

    def _refused(self, problem: str) -> Unauthenticated:
        error = Unauthenticated(problem)
        self._metrics.note_refusal(error.reason, ANONYMOUS)
        return error

    async def watch(self) -> None:
        """Reads the file again after each change, until cancelled."""
        if self._file is None:
            return
        while True:
            await next_tick(LOOK_SECONDS)
            # Half of a file that is being written would revoke keys.
            if await asyncio.to_thread(self._resting.is_due):
                await self._read_again(self._file)

    async def _read_again(self, file: Path) -> None:
        former = self._holders
        try:
            self._holders = self._holders_of(await asyncio.to_thread(_read, file))
        except (OSError, ValueError) as error:
            self.problem = _problem(error)
        else:
            self.problem = ""
        if self.problem:
            log.error("cannot use %s, the former API keys stay in use: %s", file, self.problem)
            return
        holders = self._holders
        log.info(
            "%s has %d API keys: %d added, %d removed",
            *(file, len(holders), len(holders.keys() - former.keys())),
            len(former.keys() - holders.keys()),
        )

    def _start(self, file: Path) -> Mapping[bytes, _Holder]:
        try:
            return self._holders_of(_read(file))
        except (OSError, ValueError) as error:
            raise SettingsError(f"is {str(file)!r}: {_problem(error)}", setting=SETTING) from None

    def _holders_of(self, keys: Iterable[ListedKey]) -> Mapping[bytes, _Holder]:
        return {key.digest[:INDEX_BYTES]: _Holder(key, self._identity_of(key)) for key in keys}

    def _identity_of(self, key: ListedKey) -> Identity:
        own = RateLimit.model_validate(key.limits)
        changes = {name: getattr(own, name) for name in key.limits}
        return Identity(key.name, self._limits.model_copy(update=changes))


def shown_keys(headers: Headers) -> set[str]:
    """Returns the API keys in headers: in `x-api-key`, else in `authorization`."""
    own: set[str] = set()
    bearer: set[str] = set()
    for spelt, value in headers:
        name = spelt.lower()
        if name == "x-api-key":
            own.add(_text(value))
        elif name == "authorization":
            bearer.add(_bearer_token(_text(value)))
    own.discard("")
    bearer.discard("")
    return own or bearer


def _bearer_token(value: str) -> str:
    """The token of an `authorization`; '' for another scheme."""
    scheme, _, token = value.partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def _of_certificate(name: str) -> str:
    return f"certificate:{name}"


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode("latin-1")


def _read(file: Path) -> Iterable[ListedKey]:
    """Raises OSError or ValueError."""
    with file.open("rb") as opened:
        data = opened.read(LARGEST_FILE + 1)
    if len(data) > LARGEST_FILE:
        raise ValueError(f"it has more than {LARGEST_FILE} bytes")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start} is not UTF-8") from None
    return read_keys(text)


def _problem(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
