"""Certificate authorities and certificates for tests, made on the spot."""

from __future__ import annotations

import datetime as dt
import ipaddress
from dataclasses import dataclass, field
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

DAY = dt.timedelta(days=1)

OTHER_USES = (
    *("digital_signature", "content_commitment", "key_encipherment", "data_encipherment"),
    *("key_agreement", "encipher_only", "decipher_only"),
)
SIGNS_CERTIFICATES = x509.KeyUsage(
    key_cert_sign=True, crl_sign=True, **dict.fromkeys(OTHER_USES, False)
)


@dataclass(frozen=True)
class KeyPair:
    """Files of a certificate and its key."""

    certificate: Path
    key: Path


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


@dataclass
class Authority:
    """An authority with its files in `directory`."""

    directory: Path
    name: str = "authority"
    _key: ec.EllipticCurvePrivateKey = field(
        default_factory=lambda: ec.generate_private_key(ec.SECP256R1())
    )

    def __post_init__(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        own = (
            self._builder(self.name, self._key, DAY)
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .add_extension(SIGNS_CERTIFICATES, critical=True)
            .add_extension(self._identity, critical=False)
        )
        self._write(self.ca, own)

    @property
    def _identity(self) -> x509.SubjectKeyIdentifier:
        return x509.SubjectKeyIdentifier.from_public_key(self._key.public_key())

    @property
    def ca(self) -> Path:
        return self.directory / f"{self.name}.pem"

    def issue(
        self,
        name: str,
        alternatives: tuple[str, ...] = (),
        valid: dt.timedelta = DAY,
        file: str = "",
    ) -> KeyPair:
        """A certificate for `name`, 127.0.0.1 and localhost. A negative `valid` is expired."""
        key = ec.generate_private_key(ec.SECP256R1())
        names = x509.SubjectAlternativeName(
            [
                x509.IPAddress(ipaddress.ip_address("127.0.0.1")),
                *(x509.DNSName(each) for each in ("localhost", *alternatives)),
            ]
        )
        issuer = x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(self._identity)
        made = (
            self._builder(name, key, valid)
            .add_extension(names, critical=False)
            .add_extension(issuer, critical=False)
        )
        pair = KeyPair(
            self.directory / f"{file or name}.crt", self.directory / f"{file or name}.key"
        )
        self._write(pair.certificate, made)
        pair.key.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        return pair

    def _builder(
        self, name: str, key: ec.EllipticCurvePrivateKey, valid: dt.timedelta
    ) -> x509.CertificateBuilder:
        now = dt.datetime.now(dt.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(_name(name))
            .issuer_name(_name(self.name))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - 2 * DAY)
            .not_valid_after(now + valid)
        )

    def _write(self, file: Path, builder: x509.CertificateBuilder) -> None:
        signed = builder.sign(self._key, hashes.SHA256())
        file.write_bytes(signed.public_bytes(serialization.Encoding.PEM))
