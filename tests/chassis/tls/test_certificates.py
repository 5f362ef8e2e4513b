"""Files of certificates: what is refused, and why."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path
from typing import Any

import pytest
from certificates import DAY, Authority
from chassis.tls.conftest import Paper
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from trtmesh.chassis.errors import SettingsError
from trtmesh.chassis.tls.certificates import Certificates
from trtmesh.chassis.tls.client import CA, KEY, SERVER_NAME, TLS, ClientTls
from trtmesh.chassis.tls.settings import TlsSettings


def why_refused(settings: TlsSettings) -> SettingsError:
    with pytest.raises(SettingsError) as caught:
        Certificates(settings, "engine")
    return caught.value


@pytest.mark.parametrize(
    ("setting", "file", "why"),
    [
        ("certificate", "missing.pem", "No such file or directory"),
        ("certificate", "server.key", "it has no certificate in PEM"),
        ("certificate", "broken.pem", ""),
        ("key", "server.crt", "it has no private key in PEM"),
        ("key", "client.key", "it is not the key of the certificate in"),
        ("key", "locked.key", "its key has a passphrase"),
        ("client_ca", "server.key", "it has no certificate in PEM"),
        ("client_ca", "broken.pem", ""),
        ("ca", "missing.pem", "No such file or directory"),
    ],
)
def test_an_error_names_setting_file_and_reason(
    paper: Paper, setting: str, file: str, why: str
) -> None:
    directory = paper.authority.directory
    (directory / "broken.pem").write_text(
        "-----BEGIN CERTIFICATE-----\nbm90aGluZw==\n-----END CERTIFICATE-----\n"
    )
    key = serialization.load_pem_private_key(paper.server.key.read_bytes(), None)
    (directory / "locked.key").write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"word"),
        )
    )
    error = why_refused(paper.settings(**{setting: directory / file}))
    assert error.setting == f"engine.tls.{setting}"
    assert error.problem.startswith(f"is {directory / file}, which cannot be used: ")
    assert why in error.problem
    assert len(error.problem) < 300 + 2 * len(str(directory))


@pytest.mark.parametrize(
    ("given", "setting", "missing"),
    [
        ({"key": Path("k")}, "key", "certificate"),
        ({"client_ca": Path("c")}, "client_ca", "certificate"),
        ({"client_certificates": "optional"}, "client_certificates", "client_ca"),
        ({"client_names": ("a",)}, "client_names", "client_ca"),
        ({"peer_name": "a"}, "peer_name", "ca"),
    ],
)
def test_refuses_settings_without_effect(given: dict[str, Any], setting: str, missing: str) -> None:
    error = why_refused(TlsSettings(**given))
    assert str(error) == f"engine.tls.{setting} has no effect without engine.tls.{missing}"


def test_a_file_may_hold_certificate_and_key(paper: Paper) -> None:
    both = paper.authority.directory / "both.pem"
    both.write_bytes(paper.server.key.read_bytes() + paper.server.certificate.read_bytes())
    assert Certificates(TlsSettings(certificate=both), "engine").server("h2") is not None


def test_without_settings_there_is_no_tls() -> None:
    certificates = Certificates(TlsSettings(), "engine")
    assert certificates.server("h2") is None
    assert certificates.peers is None
    assert certificates.peer_files is None


def test_only_strong_versions_and_suites(paper: Paper) -> None:
    secure = Certificates(paper.settings(), "engine").server("h2")
    assert secure is not None
    context = secure.context()
    assert context.minimum_version is ssl.TLSVersion.TLSv1_2
    assert all("ECDHE" in each["name"] or "TLS_" in each["name"] for each in context.get_ciphers())
    assert all(each["aead"] for each in context.get_ciphers())


def test_clients_read_the_environment(paper: Paper, tmp_path: Path) -> None:
    assert ClientTls.of_environment({}) is None
    assert ClientTls.of_environment({TLS: "1"}) == ClientTls(
        settings=(CA, "TRTMESH_TLS_CERTIFICATE", KEY)
    )
    named = ClientTls.of_environment({CA: str(paper.authority.ca), SERVER_NAME: "mesh"})
    assert named is not None
    assert (named.ca, named.server_name) == (paper.authority.ca, "mesh")
    wrong = ClientTls.of_environment({CA: str(tmp_path / "missing.pem")})
    assert wrong is not None
    with pytest.raises(SettingsError, match=r"TRTMESH_TLS_CA is .*missing\.pem"):
        wrong.credentials()


def test_a_key_needs_its_certificate(paper: Paper) -> None:
    with pytest.raises(SettingsError, match="key needs certificate"):
        ClientTls(paper.authority.ca, key=paper.client.key).credentials()


def test_errors_show_no_key(paper: Paper) -> None:
    other = Authority(paper.authority.directory / "other").issue("other")
    error = why_refused(paper.settings(key=other.key))
    for pair in (other, paper.server):
        assert pair.key.read_text().splitlines()[1] not in str(error)


async def test_takes_a_change_from_before_it_follows(
    paper: Paper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trtmesh.chassis.tls.certificates.RELOAD_SECONDS", 0.01)
    certificates = Certificates(paper.settings(), "engine")
    secure = certificates.server("h2")
    assert secure is not None
    before = secure.context()
    paper.authority.issue("server")
    following = asyncio.create_task(certificates.follow())
    try:
        async with asyncio.timeout(60):
            while secure.context() is before:  # noqa: ASYNC110 - files set no event
                await asyncio.sleep(0.01)
    finally:
        following.cancel()


async def test_a_certificate_waits_for_its_key(
    paper: Paper, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pair replaced file by file: one error while it does not fit, and the former pair until it does."""
    monkeypatch.setattr("trtmesh.chassis.tls.certificates.RELOAD_SECONDS", 0.01)
    certificates = Certificates(paper.settings(), "engine")
    secure = certificates.server("h2")
    assert secure is not None
    before = secure.context()
    other = paper.authority.issue("other")
    following = asyncio.create_task(certificates.follow())
    try:
        async with asyncio.timeout(60):
            paper.server.certificate.write_bytes(other.certificate.read_bytes())
            while "stay in use" not in caplog.text:  # noqa: ASYNC110 - logs set no event
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)
            assert secure.context() is before
            paper.server.key.write_bytes(other.key.read_bytes())
            while secure.context() is before:  # noqa: ASYNC110 - files set no event
                await asyncio.sleep(0.01)
    finally:
        following.cancel()
    assert caplog.text.count("stay in use") == 1


@pytest.mark.parametrize("days", [1, 13, 365 * 30], ids="{} days".format)
def test_the_first_end_of_a_file_is_known(paper: Paper, days: int) -> None:
    """Beyond 2049 a date has another form."""
    authority = paper.authority
    long = authority.issue("long", valid=365 * 40 * DAY)
    short = authority.issue("short", valid=days * DAY)
    chain = authority.directory / "chain.pem"
    chain.write_bytes(long.certificate.read_bytes() + short.certificate.read_bytes())
    certificates = Certificates(paper.settings(certificate=chain, key=long.key), "engine")
    ends = [
        each.not_valid_after_utc.timestamp()
        for each in x509.load_pem_x509_certificates(chain.read_bytes())
    ]
    assert certificates.expiry == {str(chain): min(ends)}


def test_a_process_without_a_certificate_has_no_end() -> None:
    assert Certificates(TlsSettings(), "engine").expiry == {}
