"""The certificates of a process, read again when their files change."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from trtmesh.chassis.errors import SettingsError
from trtmesh.chassis.fair.turns import Handshakes
from trtmesh.chassis.resting_file import RestingFile
from trtmesh.chassis.tls.client import H2, ClientTls, PeerTls
from trtmesh.chassis.tls.pem import OwnCertificate, PemFile, first_end, server_context
from trtmesh.chassis.tls.settings import TlsSettings

log = logging.getLogger(__name__)

HTTP_1_1 = "http/1.1"
"""ALPN's name of HTTP/1.1."""

HANDSHAKES_PER_SECOND = 100.0
"""Most handshakes begun in a second; others wait."""

RELOAD_SECONDS = 2.0
"""Interval between checks of the files for changes."""


@dataclass(frozen=True, slots=True)
class ServerTls:
    """TLS of a port."""

    context: Callable[[], ssl.SSLContext]
    """The context for a new connection."""
    handshakes: Handshakes
    protocols: Sequence[str]
    """The protocols of the port by their names in ALPN, the one for clients of several first."""
    client_names: frozenset[str]


@dataclass(frozen=True, slots=True)
class _Contexts:
    """Everything made from a reading of the files."""

    servers: Mapping[Sequence[str], ssl.SSLContext]
    """By protocols; empty without a certificate."""
    peers: PeerTls | None
    expiry: Mapping[str, float]


class Certificates:
    """TLS of a process. New connections take the current contexts; running connections keep theirs."""

    def __init__(self, settings: TlsSettings, section: str) -> None:
        """Raises SettingsError for missing or unsuitable files."""
        self._settings = settings
        self._prefix = f"{section}.tls."
        self._refuse_ineffective()
        # Before the files are read: a change meanwhile is then seen.
        paths = (settings.certificate, settings.key, settings.client_ca, settings.ca)
        self._files = RestingFile(*(path for path in paths if path is not None))
        self._contexts = self._load()
        self._handshakes = Handshakes(HANDSHAKES_PER_SECOND)

    def server(self, *protocols: str) -> ServerTls | None:
        """Returns the TLS of a port for H2, HTTP_1_1 or, in this order, HTTP_1_1 and H2; None for plain text."""
        if not self._contexts.servers:
            return None
        return ServerTls(
            lambda: self._contexts.servers[protocols],
            self._handshakes,
            protocols,
            frozenset(self._settings.client_names),
        )

    @property
    def peers(self) -> PeerTls | None:
        """TLS of connections to other processes; None for plain text."""
        return self._contexts.peers

    @property
    def expiry(self) -> Mapping[str, float]:
        """Unix time at which the first certificate of the own file ends, by file; empty without one."""
        return self._contexts.expiry

    @property
    def peer_files(self) -> ClientTls | None:
        """The same for grpc.aio."""
        settings = self._settings
        if settings.ca is None:
            return None
        names = (self._prefix + "ca", self._prefix + "certificate", self._prefix + "key")
        return ClientTls(settings.ca, settings.certificate, settings.key, settings.peer_name, names)

    async def follow(self) -> NoReturn:
        """Reads changed files again until cancelled. Unusable files leave the former contents in place."""
        while True:
            await asyncio.sleep(RELOAD_SECONDS)
            # Certificate and key change in sequence.
            if not await asyncio.to_thread(self._files.is_due):
                continue
            try:
                self._contexts = await asyncio.to_thread(self._load)
            except SettingsError as error:
                # A traceback would add nothing.
                log.error("the former certificates stay in use: %s", error)  # noqa: TRY400
            except Exception:
                # Broad on purpose: no content of the files may end the process.
                log.exception("the former certificates stay in use")
            else:
                log.info("took the changed certificates for new connections")

    def _refuse_ineffective(self) -> None:
        """Raises SettingsError for settings without effect."""
        given = self._settings.model_fields_set
        needs = {
            "key": "certificate",
            "client_ca": "certificate",
            "client_certificates": "client_ca",
            "client_names": "client_ca",
            "peer_name": "ca",
        }
        for name, other in needs.items():
            if (
                name in given
                and getattr(self._settings, name)
                and not getattr(self._settings, other)
            ):
                raise SettingsError(
                    f"has no effect without {self._prefix}{other}", setting=self._prefix + name
                )

    def _load(self) -> _Contexts:
        settings = self._settings
        peers = self.peer_files
        servers: dict[Sequence[str], ssl.SSLContext] = {}
        expiry: dict[str, float] = {}
        if settings.certificate is not None:
            certificate = self._file("certificate", settings.certificate)
            key = self._file("key", settings.key) if settings.key else certificate
            ca = self._file("client_ca", settings.client_ca) if settings.client_ca else None
            required = settings.client_certificates == "required"
            # Browsers offer both, and speak HTTP/2 where it is chosen.
            for protocols in ((H2,), (HTTP_1_1,), (HTTP_1_1, H2)):
                own = OwnCertificate(certificate, key)
                servers[protocols] = server_context(own, ca, protocols, required=required)
            expiry[str(certificate.path)] = first_end(certificate.certificates())
        return _Contexts(servers, peers.peer_tls() if peers else None, expiry)

    def _file(self, name: str, path: Path) -> PemFile:
        return PemFile(path, self._prefix + name)
