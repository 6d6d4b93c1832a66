"""TLS for the serving port, mutual where callers must show a certificate; files may be replaced while it serves.

In: paths of PEM files.  Out: credentials for the port.  The files are read at every handshake; when they have changed
and fit together, this handshake and all later ones use them, and connections that stand go on.  While they do not fit,
a new certificate without its new key for example, the old ones stay in force, and the log says so once.

It refuses to know tokens: a client's certificate lets a connection in, a token says who calls.
"""

from __future__ import annotations

import os
import ssl
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
class _Pems:
    """One reading of the files."""

    cert: bytes
    key: bytes = field(repr=False)
    client_ca: bytes | None

    def check(self) -> None:
        """Raises InvalidArgument when they are no certificate, key and authorities, or do not belong together."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            _load_pair(context, self.cert, self.key)
        except ssl.SSLError as error:
            what = f"is no certificate in PEM with the unencrypted key of tls_key ({error.reason or 'cannot be read'})"
            raise InvalidArgument("tls_cert", what) from None
        if self.client_ca is None:
            return
        try:
            context.load_verify_locations(cadata=self.client_ca.decode("ascii"))
        except (ssl.SSLError, ValueError):  # no certificate at all is a ValueError
            raise InvalidArgument("tls_client_ca", "holds no certificates in PEM") from None

    def configuration(self) -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration([(self.key, self.cert)], root_certificates=self.client_ca)


class _Certificates:
    """The files, and what they held when they last fitted together."""

    def __init__(self, cert: Path, key: Path, client_ca: Path | None) -> None:
        """Raises InvalidArgument when they cannot be read, or do not fit."""
        self._paths = {"tls_cert": cert, "tls_key": key, "tls_client_ca": client_ca}
        self._seen = self._read()
        self._seen.check()
        self._complaint = ""

    @property
    def first(self) -> grpc.ServerCertificateConfiguration:
        return self._seen.configuration()

    def changed(self) -> grpc.ServerCertificateConfiguration | None:
        """What gRPC asks before each handshake, from a thread of its own: the new ones; None: as before."""
        try:
            pems = self._read()
            if pems == self._seen:
                self._complaint = ""
                return None
            pems.check()
        except InvalidArgument as error:
            if str(error) != self._complaint:
                self._complaint = str(error)
                _log.error("the old certificate stays", error=str(error))
            return None
        self._seen, self._complaint = pems, ""
        _log.info("certificate read again")
        return pems.configuration()

    def _read(self) -> _Pems:
        cert, key, client_ca = (_read(name, path) for name, path in self._paths.items())
        assert cert is not None and key is not None
        return _Pems(cert, key, client_ca)


def server_credentials(settings: ServerSettings) -> grpc.ServerCredentials | None:
    """None: plaintext.  Raises InvalidArgument for files that cannot be used."""
    if settings.tls_cert is None or settings.tls_key is None:
        return None
    client_ca = settings.tls_client_ca
    files = _Certificates(Path(settings.tls_cert), Path(settings.tls_key), Path(client_ca) if client_ca else None)
    changed: Any = files.changed  # the types of grpc do not know that None says "as before"
    return grpc.dynamic_ssl_server_credentials(
        files.first, changed, require_client_authentication=client_ca is not None
    )


def _read(name: str, path: Path | None) -> bytes | None:
    try:
        return None if path is None else read_file(path)
    except OSError as error:
        raise InvalidArgument(name, f"{path}: {error.strerror}; check the path") from None


def _load_pair(context: ssl.SSLContext, cert: bytes, key: bytes) -> None:
    """OpenSSL reads files only; this one is in memory and has no name."""
    memory = os.memfd_create("tinyloop-tls")
    try:
        os.write(memory, cert + b"\n" + key)
        context.load_cert_chain(f"/proc/self/fd/{memory}", password=lambda: b"")
    finally:
        os.close(memory)
