"""The server's certificate, and who may connect."""

import asyncio
import shutil
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from crossdock.router.access.tls import Certificate, TlsError

PEMS = Path(__file__).parent / "certificates"
AUTHORITY = PEMS / "authority.pem"
HALF = (PEMS / "renewed.pem").read_bytes()[:850]
Subject = Callable[..., Awaitable[str]]


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """Where a server finds its certificate."""
    return Path(shutil.copy(PEMS / "server.pem", tmp_path / "installed.pem"))


async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"hello")
    await writer.drain()
    writer.close()


@pytest.fixture
async def connect() -> AsyncIterator[Subject]:
    """Connect to a server with this certificate; whose it says it is, or that it refuses to talk."""
    servers: dict[int, asyncio.Server] = {}

    async def subject_of(certificate: Certificate, client_pem: Path | None = None) -> str:
        if id(certificate) not in servers:
            servers[id(certificate)] = await asyncio.start_server(greet, "127.0.0.1", 0, ssl=certificate.context)
        port = servers[id(certificate)].sockets[0].getsockname()[1]
        context = ssl.create_default_context(cafile=AUTHORITY)
        if client_pem is not None:
            context.load_cert_chain(client_pem)
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
        [[(_, subject)]] = writer.get_extra_info("peercert")["subject"]
        try:
            said = await reader.read()
        except ssl.SSLError:  # or it just closes, whatever comes first
            said = b""
        writer.close()
        return subject if said == b"hello" else "refused"

    yield subject_of
    for server in servers.values():
        server.close()


async def test_a_renewed_certificate_is_used_from_the_next_connection_on(installed: Path, connect: Subject) -> None:
    certificate = Certificate(installed, None)
    assert not certificate.is_renewed()
    assert await connect(certificate) == "server"
    shutil.copy(PEMS / "renewed.pem", installed)
    assert certificate.is_renewed()
    certificate.renew()
    assert await connect(certificate) == "renewed"
    assert not certificate.is_renewed()


async def test_half_a_certificate_changes_nothing(installed: Path, connect: Subject) -> None:
    certificate = Certificate(installed, None)
    await asyncio.to_thread(installed.write_bytes, HALF)
    assert not certificate.is_renewed()
    assert await connect(certificate) == "server"


async def test_only_clients_of_the_authority_may_connect_where_one_is_named(installed: Path, connect: Subject) -> None:
    certificate = Certificate(installed, None, AUTHORITY)
    assert await connect(certificate, PEMS / "client.pem") == "server"
    assert await connect(certificate) == "refused"


@pytest.mark.parametrize(
    ("certificate", "key"), [("authority.pem", None), ("server.pem", "client.pem"), ("none", None)]
)
def test_a_certificate_without_its_key_is_refused(certificate: str, key: str | None) -> None:
    with pytest.raises(TlsError, match="are no certificate with its key"):
        Certificate(PEMS / certificate, PEMS / key if key is not None else None)


def test_what_is_no_authority_is_refused() -> None:
    with pytest.raises(TlsError, match="is no certificate authority"):
        Certificate(PEMS / "server.pem", None, PEMS / "README.md")
