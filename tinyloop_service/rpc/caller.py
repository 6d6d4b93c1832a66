"""Who calls: one value for the whole of a call, set by `auth`, read by everybody else from `caller()`."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from enum import StrEnum

from tinyloop_service.errors import PermissionDenied


class Right(StrEnum):
    """What each allows: rpc/auth.py."""

    GENERATE = "generate"
    BUILD = "build"
    ADMIN = "admin"


@dataclass(frozen=True, slots=True)
class Caller:
    """Whom a token stands for."""

    tenant: str
    rights: frozenset[Right]
    token_id: str = ""  # the first digits of the token's hash, for logs

    def require(self, right: Right) -> None:
        """Raise PermissionDenied without it."""
        if right not in self.rights:
            raise PermissionDenied(f"your token lacks the right {right.value!r}; ask who runs the server for one")


_ANYBODY = Caller("", frozenset(Right))
_caller: ContextVar[Caller] = ContextVar("tinyloop_caller", default=_ANYBODY)


def caller() -> Caller:
    """Who made the call that is being answered; where nobody is asked for a token, the tenant "" with every right."""
    return _caller.get()


def set_caller(known: Caller) -> None:
    """For the rest of the running task."""
    _caller.set(known)
