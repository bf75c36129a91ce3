"""The server's side of TLS: its certificate, renewed in place, and the authority of its clients'."""

import logging
import ssl
from pathlib import Path

from .key_file import FileChanges

_log = logging.getLogger("crossdock.router")


class TlsError(ValueError):
    """What is wrong with a certificate or its key."""


class Certificate:
    """``context`` stays the same for the life of the server; the constructor raises `TlsError`.

    With ``client_ca`` only clients whose certificate it signed can connect at all.
    """

    def __init__(self, certificate: Path, key: Path | None, client_ca: Path | None = None) -> None:
        self._certificate = certificate
        self._key = key or certificate
        self._changes = FileChanges(certificate, self._key)
        self.context = _context(certificate, self._key)
        if client_ca is not None:
            try:
                self.context.load_verify_locations(client_ca)
            except (OSError, ssl.SSLError) as error:
                raise TlsError(f"{client_ca} is no certificate authority: {error}") from None
            self.context.verify_mode = ssl.CERT_REQUIRED

    def is_renewed(self) -> bool:
        """Whether there is another certificate now; one that is broken, or not whole yet, is none."""
        if not self._changes.are_there():
            return False
        try:
            _context(self._certificate, self._key)
        except TlsError as error:
            _log.error("the certificate stays as it was: %s", error)
            return False
        return True

    def renew(self) -> None:
        """Connections from now on get the certificate that `is_renewed` has found; those that are open keep theirs."""
        try:
            _load(self.context, self._certificate, self._key)
        except TlsError as error:  # it has changed once more: the next look finds what it is then
            _log.error("the certificate is not renewed: %s", error)
        else:
            _log.info("read the certificate %s again", self._certificate)


def _context(certificate: Path, key: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    _load(context, certificate, key)
    return context


def _load(context: ssl.SSLContext, certificate: Path, key: Path) -> None:
    """Raises `TlsError`."""
    try:
        context.load_cert_chain(certificate, key, password="")  # or it would ask for one at the terminal
    except (OSError, ssl.SSLError) as error:
        raise TlsError(f"{certificate} and {key} are no certificate with its key: {error}") from None
