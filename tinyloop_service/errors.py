"""Everything that can be refused or fail, as one tree.

    TinyLoopError
    ├── InvalidArgument (ValueError)      a field is outside its bounds; names the field
    ├── SequenceTooLong (RuntimeError)    prompt + max_tokens > max_seq_len
    ├── ModelFileError (ValueError)       a .tinyloop file is truncated, foreign or inconsistent
    ├── PrefixNotFound (KeyError)         unknown name, or another tenant's
    │   └── PrefixExpired                 the name's ttl ran out
    ├── PrefixDamaged (RuntimeError)      what the registry holds of the name cannot be read
    ├── PrefixExists (ValueError)         the name stands for other content
    ├── LoopsMismatch (RuntimeError)      loops asked differ from the prefix's
    ├── ParentMismatch (ValueError)       loops, window or mode differ from the parent's
    ├── EtagMismatch (RuntimeError)       the prefix changed since it was read
    ├── OutOfMemory (RuntimeError)        does not fit even with everything else gone
    ├── BudgetExceeded (RuntimeError)
    │   ├── PinBudgetExceeded             pinned pages would pass the pin budget
    │   └── TenantQuotaExceeded           a tenant's quota
    ├── Unavailable (RuntimeError)        transient: try again after `retry_after_s`
    │   ├── QueueFull
    │   ├── WarmingUp
    │   ├── Draining
    │   ├── RegistryUnavailable       names cannot be looked up or changed just now
    │   └── ModelClosed                   final: construct a new Model
    ├── Unauthenticated (PermissionError) no token, or none that the server knows
    ├── PermissionDenied (PermissionError) the token lacks a right
    ├── DeadlineExceeded (TimeoutError)   the caller's own time limit ran out
    └── EngineFault (RuntimeError)        the step failed; its requests fail, others live
        └── DeviceLost                    the device is gone; the process drains

A class also derives from the built-in a Python caller would catch.  `reason` is the ErrorInfo reason on
the wire; `rpc/status.py` holds the one table from these classes to status codes.  Messages are written for
callers: what was given, what was expected, the way out.  Standard library only.
"""

from __future__ import annotations


def install(extra: str) -> str:
    """The way out where an extra of pyproject.toml is missing: the end of a sentence, the same for all of them."""
    return f"pip install 'tinyloop-service[{extra}]', in a checkout .venv/bin/pip install -e '.[{extra}]'"


class TinyLoopError(Exception):
    """Base of every error the service raises on purpose."""

    reason = "INTERNAL"

    def __str__(self) -> str:  # KeyError would print the repr of its argument
        return str(self.args[0]) if self.args else self.reason


class InvalidArgument(TinyLoopError, ValueError):
    """A field is outside its bounds.  `field` is its dotted path as the caller spelled it; `others` are further fields,
    each of which the message has as a word."""

    reason = "INVALID_ARGUMENT"

    def __init__(self, field: str, message: str, *others: str) -> None:
        super().__init__(field, message, *others)  # all, so that it can be copied and pickled
        self.field = field
        self.description = message
        self.others = others

    def __str__(self) -> str:
        return f"{self.field}: {self.description}"


class SequenceTooLong(TinyLoopError, RuntimeError):
    reason = "SEQUENCE_TOO_LONG"


class ModelFileError(TinyLoopError, ValueError):
    reason = "MODEL_FILE"


class PrefixNotFound(TinyLoopError, KeyError):
    reason = "PREFIX_NOT_FOUND"


class PrefixExpired(PrefixNotFound):
    reason = "PREFIX_EXPIRED"


class PrefixDamaged(TinyLoopError, RuntimeError):
    reason = "PREFIX_DAMAGED"


class PrefixExists(TinyLoopError, ValueError):
    reason = "PREFIX_EXISTS"


class LoopsMismatch(TinyLoopError, RuntimeError):
    reason = "LOOPS_MISMATCH"


class ParentMismatch(TinyLoopError, ValueError):
    reason = "PARENT_MISMATCH"


class EtagMismatch(TinyLoopError, RuntimeError):
    reason = "ETAG_MISMATCH"


class OutOfMemory(TinyLoopError, RuntimeError):
    reason = "OUT_OF_MEMORY"


class BudgetExceeded(TinyLoopError, RuntimeError):
    """`subject` names what ran out, for a QuotaFailure violation."""

    subject = "budget"


class PinBudgetExceeded(BudgetExceeded):
    reason = "PIN_BUDGET"
    subject = "pinned_bytes"


class TenantQuotaExceeded(BudgetExceeded):
    """`subject` is the name of the quota, `retry_after_s` when it may be met again; None: not by waiting."""

    reason = "TENANT_QUOTA"
    subject = "tenant"

    def __init__(self, message: str, *, quota: str = "tenant", retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.subject = quota
        self.retry_after_s = retry_after_s


class Unavailable(TinyLoopError, RuntimeError):
    """Transient.  `retry_after_s` becomes RetryInfo and the pushback trailer."""

    reason = "UNAVAILABLE"

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class QueueFull(Unavailable):
    reason = "QUEUE_FULL"


class WarmingUp(Unavailable):
    reason = "WARMING_UP"


class Draining(Unavailable):
    reason = "DRAINING"

    def __init__(self, message: str = "the server is draining; try another replica", *, retry_after_s: float = 1.0):
        super().__init__(message, retry_after_s=retry_after_s)


class RegistryUnavailable(Unavailable):
    """The registry of names does not answer.  What is in memory goes on; whether a change was made is not known."""

    reason = "REGISTRY_UNAVAILABLE"


class ModelClosed(Unavailable):
    reason = "MODEL_CLOSED"

    def __init__(self, message: str = "model was closed; construct a new Model") -> None:
        super().__init__(message)


class Unauthenticated(TinyLoopError, PermissionError):
    """Nobody knows who calls."""

    reason = "UNAUTHENTICATED"


class PermissionDenied(TinyLoopError, PermissionError):
    """It is known who calls, and that he may not."""

    reason = "PERMISSION_DENIED"


class DeadlineExceeded(TinyLoopError, TimeoutError):
    """A client's timeout ran out before the answer."""

    reason = "DEADLINE_EXCEEDED"


class EngineFault(TinyLoopError, RuntimeError):
    reason = "ENGINE_FAULT"


class DeviceLost(EngineFault):
    """The engine cannot run again in this process."""
