"""Exceptions to gRPC statuses and back: one table, used by the servicers one way and by the clients the other.

On the wire an error is a code, a message written for callers, and google.rpc details: always ErrorInfo (domain
"tinyloop", the exception's `reason`, the request id); BadRequest with the field for InvalidArgument; RetryInfo, and the
trailer `grpc-retry-pushback-ms` that stock clients honour, for what is transient; QuotaFailure for budgets, with
RetryInfo where waiting helps.  Text of an engine's fault, or of an exception that nobody foresaw, stays in the log.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from tinyloop_service import errors
from tinyloop_service.errors import TinyLoopError

DOMAIN = "tinyloop"
DETAILS_KEY = "grpc-status-details-bin"
PUSHBACK_KEY = "grpc-retry-pushback-ms"
MAX_MESSAGE = 1000  # characters; statuses travel in trailers, which are bounded

Code = grpc.StatusCode
Metadata = Sequence[tuple[str, str | bytes]]

# Every class of errors.py; `reason` is the class's own.
TABLE: dict[type[TinyLoopError], grpc.StatusCode] = {
    errors.TinyLoopError: Code.INTERNAL,
    errors.InvalidArgument: Code.INVALID_ARGUMENT,
    errors.SequenceTooLong: Code.INVALID_ARGUMENT,
    errors.ModelFileError: Code.FAILED_PRECONDITION,
    errors.PrefixNotFound: Code.NOT_FOUND,
    errors.PrefixExpired: Code.NOT_FOUND,
    errors.PrefixDamaged: Code.DATA_LOSS,
    errors.PrefixExists: Code.ALREADY_EXISTS,
    errors.LoopsMismatch: Code.FAILED_PRECONDITION,
    errors.ParentMismatch: Code.FAILED_PRECONDITION,
    errors.EtagMismatch: Code.ABORTED,
    errors.OutOfMemory: Code.RESOURCE_EXHAUSTED,
    errors.BudgetExceeded: Code.RESOURCE_EXHAUSTED,
    errors.PinBudgetExceeded: Code.RESOURCE_EXHAUSTED,
    errors.TenantQuotaExceeded: Code.RESOURCE_EXHAUSTED,
    errors.Unavailable: Code.UNAVAILABLE,
    errors.QueueFull: Code.UNAVAILABLE,
    errors.WarmingUp: Code.UNAVAILABLE,
    errors.Draining: Code.UNAVAILABLE,
    errors.RegistryUnavailable: Code.UNAVAILABLE,
    errors.ModelClosed: Code.UNAVAILABLE,
    errors.Unauthenticated: Code.UNAUTHENTICATED,
    errors.PermissionDenied: Code.PERMISSION_DENIED,
    errors.DeadlineExceeded: Code.DEADLINE_EXCEEDED,
    errors.EngineFault: Code.INTERNAL,
    errors.DeviceLost: Code.INTERNAL,
}

_FAULT_MESSAGE = "the engine failed while it worked on this request; others go on, and it may be sent again"
_CLOSED_MESSAGE = "the server closed before the answer was complete; ask again once it is back, or ask another replica"
_UNFORESEEN_MESSAGE = "the server failed in a way nobody foresaw; its log has more under this request id"


@dataclass(frozen=True, slots=True)
class Status:
    """What `context.abort` takes."""

    code: grpc.StatusCode
    reason: str
    message: str
    trailers: tuple[tuple[str, str | bytes], ...]


def to_status(error: BaseException, request_id: str) -> Status:
    """The status of `error`; anything that is no TinyLoopError is INTERNAL and says nothing of itself."""
    known = error if isinstance(error, TinyLoopError) else TinyLoopError(_UNFORESEEN_MESSAGE)
    code = TABLE[type(known)]
    message = _message(known)[:MAX_MESSAGE]
    details = status_pb2.Status(code=code.value[0], message=message)
    for detail in _details(known, message, request_id):
        packed = AnyMessage()
        packed.Pack(detail)
        details.details.append(packed)
    trailers: list[tuple[str, str | bytes]] = [(DETAILS_KEY, details.SerializeToString())]
    if isinstance(known, errors.Unavailable):
        trailers.append((PUSHBACK_KEY, str(_pushback_ms(known))))
    return Status(code, known.reason, message, tuple(trailers))


def _message(error: TinyLoopError) -> str:
    """What its caller can do with, who sees neither the engine nor the `Model` of this process."""
    match error:
        case errors.EngineFault():
            return _FAULT_MESSAGE
        case errors.ModelClosed():
            return _CLOSED_MESSAGE
    return str(error)


def to_exception(code: grpc.StatusCode, message: str, trailers: Metadata, *, has_begun: bool = False) -> TinyLoopError:
    """The exception that a server meant, or the nearest one where the status did not come from our server.
    has_begun: some of the answer is here."""
    found = _read_details(trailers)
    match found.reason and _BY_REASON.get(found.reason):
        case None | "":
            return _foreign(code, message, has_begun)
        case cls if issubclass(cls, errors.InvalidArgument):
            return errors.InvalidArgument(found.field, found.description)
        case cls if issubclass(cls, errors.Unavailable) and cls is not errors.ModelClosed:
            return cls(message, retry_after_s=1.0 if found.retry_after_s is None else found.retry_after_s)
        case cls if issubclass(cls, errors.TenantQuotaExceeded):
            return cls(message, quota=found.subject, retry_after_s=found.retry_after_s)
        case cls:
            return cls(message)


# A proxy whose server is gone ends a stream by a reset or without a status; gRPC makes INTERNAL or UNKNOWN of it.
_CUT_OFF = ("Stream removed", "RST_STREAM")
_BY_REASON: dict[str, type[TinyLoopError]] = {cls.reason: cls for cls in reversed(TABLE)}


def _pushback_ms(error: errors.Unavailable) -> int:
    """Milliseconds to wait; −1 forbids the retry."""
    return -1 if isinstance(error, errors.ModelClosed) else round(error.retry_after_s * 1000)


def _details(error: TinyLoopError, message: str, request_id: str) -> Iterator[Message]:
    yield error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata={"request_id": request_id})
    match error:
        case errors.InvalidArgument():
            violation = error_details_pb2.BadRequest.FieldViolation(
                field=error.field, description=error.description[:MAX_MESSAGE]
            )
            yield error_details_pb2.BadRequest(field_violations=[violation])
        case errors.BudgetExceeded():
            quota = error_details_pb2.QuotaFailure.Violation(subject=error.subject, description=message)
            yield error_details_pb2.QuotaFailure(violations=[quota])
            if isinstance(error, errors.TenantQuotaExceeded) and error.retry_after_s is not None:
                yield _retry_info(error.retry_after_s)
        case errors.Unavailable() if not isinstance(error, errors.ModelClosed):
            yield _retry_info(error.retry_after_s)


def _retry_info(after_s: float) -> Message:
    delay = Duration()
    delay.FromNanoseconds(round(after_s * 1e9))
    info: Message = error_details_pb2.RetryInfo(retry_delay=delay)
    return info


@dataclass(slots=True)
class _Found:
    """What a reader needs of a status's details."""

    reason: str = ""
    field: str = "request"
    description: str = ""
    subject: str = ""
    retry_after_s: float | None = None


def _read_details(trailers: Metadata) -> _Found:
    found = _Found()
    raw = next((value for key, value in trailers if key == DETAILS_KEY), None)
    if not isinstance(raw, bytes):
        return found
    info, bad = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    retry, quota = error_details_pb2.RetryInfo(), error_details_pb2.QuotaFailure()
    for detail in status_pb2.Status.FromString(raw).details:
        if detail.Unpack(info) and info.domain == DOMAIN:
            found.reason = info.reason
        elif detail.Unpack(bad) and bad.field_violations:
            found.field = bad.field_violations[0].field
            found.description = bad.field_violations[0].description
        elif detail.Unpack(quota) and quota.violations:
            found.subject = quota.violations[0].subject
        elif detail.Unpack(retry):
            found.retry_after_s = retry.retry_delay.ToNanoseconds() / 1e9
    return found


def _foreign(code: grpc.StatusCode, message: str, has_begun: bool) -> TinyLoopError:
    """A status that gRPC itself, a proxy or another server made."""
    match code:
        case Code.DEADLINE_EXCEEDED if has_begun:
            return errors.DeadlineExceeded("the time limit ran out before the answer was complete")
        case Code.UNAVAILABLE if has_begun:
            return errors.Unavailable(f"the connection to the server was lost: {message}")
        case Code.DEADLINE_EXCEEDED:
            return errors.DeadlineExceeded("the time limit ran out before the server answered")
        case Code.UNAVAILABLE:
            return errors.Unavailable(f"the server cannot be reached: {message}")
        case Code.UNAUTHENTICATED:
            return errors.Unauthenticated(message)
        case Code.PERMISSION_DENIED:
            return errors.PermissionDenied(message)
        case Code.RESOURCE_EXHAUSTED:
            return errors.InvalidArgument("request", f"is refused as too large: {message}")
        case _ if any(words in message for words in _CUT_OFF):
            return errors.Unavailable(f"the answer was cut off on its way: {message}")
        case Code.CANCELLED:  # by gRPC, when a server closes that has not taken the call yet
            return errors.Unavailable(f"the server did not take the call, it may be closing: {message}")
        case _:
            return TinyLoopError(f"{code.name}: {message}")
