"""A server that takes few requests at a time, over TLS, from those who have a token: one a language, hog, poor."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from command_harness import Server

from tinyloop_service import Client

STRANGER = "tl_" + "0" * 43  # a token of the usual form that no file knows


@dataclass(frozen=True, slots=True)
class Guarded:
    server: Server
    folder: Path  # tls.crt, and NAME.token of each tenant

    @property
    def address(self) -> str:
        """By name: Node warns of TLS to an address."""
        return self.server.address.replace("127.0.0.1", "localhost")

    @property
    def authority(self) -> Path:
        return self.folder / "tls.crt"

    def token(self, tenant: str) -> str:
        return (self.folder / f"{tenant}.token").read_text().strip()

    def environment(self, tenant: str) -> dict[str, str]:
        return {"TINYLOOP_TLS_CA": str(self.authority), "TINYLOOP_TOKEN_FILE": str(self.folder / f"{tenant}.token")}

    def client(self, tenant: str) -> Client:
        return Client(self.address, token=self.token(tenant), tls=self.authority)
