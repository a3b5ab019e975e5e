"""Fixtures of the tests of connections."""

import datetime as dt
import ipaddress
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from tests.support import servers
from tests.support.connections import PASSWORD, SECRET


@pytest.fixture(autouse=True)
def _no_secret_is_logged(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    caplog.set_level(logging.DEBUG)
    yield
    for when in ("setup", "call"):
        for record in caplog.get_records(when):
            assert SECRET not in f"{record.getMessage()} {record.__dict__}"


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new certificate for this computer that nobody but itself vouches for, and its key."""
    if "redis" not in servers.PROGRAMS:
        pytest.skip("no server here knows TLS")
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "scrapy_bloom")])
    now, day = dt.datetime.now(dt.timezone.utc), dt.timedelta(days=1)
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - day)
        .not_valid_after(now + day)
        .add_extension(x509.SubjectAlternativeName([address]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    encoding, none = serialization.Encoding.PEM, serialization.NoEncryption()
    path = tmp_path_factory.mktemp("tls") / "certificate.pem"
    path.write_bytes(
        made.public_bytes(encoding)
        + key.private_bytes(encoding, serialization.PrivateFormat.PKCS8, none)
    )
    return path


@pytest.fixture(scope="session")
def tls_server(certificate: Path) -> Iterator[servers.Server]:
    server = servers.Server("redis", certificate=certificate)
    yield server
    server.end()


@pytest.fixture(scope="session")
def tls_cluster(certificate: Path) -> Iterator[servers.Cluster]:
    """One that asks for a password, too."""
    cluster = servers.Cluster("redis", certificate=certificate)
    for node in cluster.nodes:
        node.client.config_set("requirepass", PASSWORD)
    yield cluster
    cluster.end()


@pytest.fixture(scope="session")
def own_cluster() -> Iterator[servers.Cluster]:
    """Return a server that tests may disturb if they restore it."""
    cluster = servers.Cluster()
    yield cluster
    cluster.end()
