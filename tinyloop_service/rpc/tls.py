"""TLS for the serving port, mutual where callers must show a certificate; files may be replaced while it serves.

In: paths of PEM files.  Out: credentials for the port.  The files are read at every handshake; when they have changed
and fit together, this handshake and all later ones use them, and connections that stand go on.  While they do not fit,
a new certificate without its new key for example, the old ones stay in force, and the log says so once.  A process that
starts meanwhile to listen at the same port (rpc/fronts) is given what was in force last.

It refuses to know tokens: a client's certificate lets a connection in, a token says who calls.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import structlog

from tinyloop_service.errors import InvalidArgument
from tinyloop_service.files import read_file
from tinyloop_service.settings import ServerSettings

_log = structlog.get_logger("tinyloop.tls")


@dataclass(frozen=True, slots=True)
class Pems:
    """One reading of the files."""

    cert: bytes
    key: bytes = field(repr=False)
    client_ca: bytes | None

    def check(self) -> None:
        """Raises InvalidArgument when they are no certificate, key and authorities, or do not belong together: each
        file by itself, which is how gRPC takes them."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        with _in_memory(self.cert) as cert, _in_memory(self.key) as key:
            try:
                context.load_cert_chain(cert, key, password=lambda: b"")
            except ssl.SSLError as error:
                raise self._blame(cert, error.reason or "cannot be read") from None
        if self.client_ca is None:
            return
        try:
            context.load_verify_locations(cadata=self.client_ca.decode("ascii"))
        except (ssl.SSLError, ValueError):  # no certificate at all is a ValueError
            raise InvalidArgument("tls_client_ca", "holds no certificates in PEM") from None

    @staticmethod
    def _blame(cert: str, reason: str) -> InvalidArgument:
        """One of a pair that cannot be used: the key, unless the certificate fails before a key is looked for."""
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, "/no/such/key")
        except ssl.SSLError:
            return InvalidArgument("tls_cert", f"holds no certificate in PEM that can be used ({reason})")
        except OSError:
            pass
        return InvalidArgument("tls_key", f"holds no unencrypted key in PEM that fits the certificate ({reason})")

    def configuration(self) -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration([(self.key, self.cert)], root_certificates=self.client_ca)


class Certificates:
    """The files, and what they held when they last fitted together."""

    def __init__(self, settings: ServerSettings, last: Pems | None = None) -> None:
        """last: as somebody else has seen them.  Raises InvalidArgument, where nobody has, when they cannot be read or
        do not fit."""
        self._settings = settings
        self._complaint = ""
        if last is None:
            last = self._read()
            last.check()
        self.last = last

    def changed(self) -> grpc.ServerCertificateConfiguration | None:
        """What gRPC asks before each handshake, from a thread of its own: the new ones; None: as before."""
        return self.last.configuration() if self.look() else None

    def look(self) -> bool:
        """Whether they hold something new that fits together, which is then the last."""
        try:
            pems = self._read()
            if pems == self.last:
                self._complaint = ""
                return False
            pems.check()
        except InvalidArgument as error:
            if str(error) != self._complaint:
                self._complaint = str(error)
                _log.error("the old certificate stays", error=str(error))
            return False
        self.last, self._complaint = pems, ""
        _log.info("certificate read again")
        return True

    def _read(self) -> Pems:
        cert, key, client_ca = (self._read_one(name) for name in ("tls_cert", "tls_key", "tls_client_ca"))
        assert cert is not None and key is not None
        return Pems(cert, key, client_ca)

    def _read_one(self, name: str) -> bytes | None:
        path: str | None = getattr(self._settings, name)
        try:
            return None if path is None else read_file(Path(path))
        except OSError as error:
            raise InvalidArgument(name, f"{path}: {error.strerror}; check the path") from None


def server_credentials(settings: ServerSettings, last: Pems | None = None) -> grpc.ServerCredentials | None:
    """None: plaintext.  `last`, and what is raised, as of `Certificates`."""
    if settings.tls_cert is None:
        return None
    files = Certificates(settings, last)
    changed: Any = files.changed  # the types of grpc do not know that None says "as before"
    return grpc.dynamic_ssl_server_credentials(
        files.last.configuration(), changed, require_client_authentication=settings.tls_client_ca is not None
    )


@contextmanager
def _in_memory(content: bytes) -> Iterator[str]:
    """The path of a file without a name, for OpenSSL, which reads certificates and keys from files only."""
    with os.fdopen(os.memfd_create("tinyloop-tls"), "wb") as file:
        file.write(content)
        file.flush()
        yield f"/proc/self/fd/{file.fileno()}"
