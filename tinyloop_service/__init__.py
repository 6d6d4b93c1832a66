"""TinyLoop: build a prefix of a looped language model once, decode many requests from it at once.

Model                     in this process            Client, AsyncClient    a server, over gRPC
PrefixCache               a prefix held by a handle  Prefix                 a named prefix of a server
Completion, Choice,       what generation returns    the errors             every one is a TinyLoopError and
Delta                                                                       the built-in a caller would catch
Tls                       a client's certificates
"""

import importlib
import os
import typing

# Read when gRPC is imported, which is later.  Less than errors are every bad handshake and every connection that ends,
# in a form of its own, and its threads would wait for who reads that.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

if typing.TYPE_CHECKING:
    from tinyloop_service.client import AsyncClient, Client, Prefix, Tls
    from tinyloop_service.completion import Choice, Completion, Delta
    from tinyloop_service.errors import (
        BudgetExceeded,
        DeadlineExceeded,
        DeviceLost,
        Draining,
        EngineFault,
        EtagMismatch,
        InvalidArgument,
        LoopsMismatch,
        ModelClosed,
        ModelFileError,
        OutOfMemory,
        ParentMismatch,
        PermissionDenied,
        PinBudgetExceeded,
        PrefixDamaged,
        PrefixExists,
        PrefixExpired,
        PrefixNotFound,
        QueueFull,
        RegistryUnavailable,
        SequenceTooLong,
        TenantQuotaExceeded,
        TinyLoopError,
        Unauthenticated,
        Unavailable,
        WarmingUp,
    )
    from tinyloop_service.model import Model, PrefixCache
    from tinyloop_service.types import CacheMode, FinishReason, PrefixState, TokenLogprob, Usage

__all__ = [
    "AsyncClient",
    "BudgetExceeded",
    "CacheMode",
    "Choice",
    "Client",
    "Completion",
    "DeadlineExceeded",
    "Delta",
    "DeviceLost",
    "Draining",
    "EngineFault",
    "EtagMismatch",
    "FinishReason",
    "InvalidArgument",
    "LoopsMismatch",
    "Model",
    "ModelClosed",
    "ModelFileError",
    "OutOfMemory",
    "ParentMismatch",
    "PermissionDenied",
    "PinBudgetExceeded",
    "Prefix",
    "PrefixCache",
    "PrefixDamaged",
    "PrefixExists",
    "PrefixExpired",
    "PrefixNotFound",
    "PrefixState",
    "QueueFull",
    "RegistryUnavailable",
    "SequenceTooLong",
    "TenantQuotaExceeded",
    "TinyLoopError",
    "Tls",
    "TokenLogprob",
    "Unauthenticated",
    "Unavailable",
    "Usage",
    "WarmingUp",
]

_HOMES = ("errors", "types", "completion", "client", "model")  # where they are


if not typing.TYPE_CHECKING:  # which would take any name for one of ours

    def __getattr__(name: str) -> typing.Any:
        """What is exported is imported when it is asked for: a command's first lines and a process that speaks gRPC
        come through here too, and have no use for most of it."""
        if name in _HOMES:
            return importlib.import_module(f"{__name__}.{name}")
        if name in __all__:
            for home in _HOMES:
                found = vars(importlib.import_module(f"{__name__}.{home}"))
                if name in found:
                    return found[name]
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
