"""The table from exceptions to statuses: complete, and the same exception comes back at the client."""

from __future__ import annotations

import asyncio
import copy
import pickle

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from tinyloop_service import errors
from tinyloop_service.errors import TinyLoopError
from tinyloop_service.rpc.status import DETAILS_KEY, MAX_MESSAGE, PUSHBACK_KEY, TABLE, Status, to_exception, to_status

CLASSES = sorted(
    (c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, TinyLoopError)), key=lambda c: c.__name__
)


def example(cls: type[TinyLoopError]) -> TinyLoopError:
    if cls is errors.InvalidArgument:
        return errors.InvalidArgument("top_p", "is 2.0, expected above 0, up to 1")
    if issubclass(cls, errors.Unavailable) and cls is not errors.ModelClosed:
        return cls("busy", retry_after_s=2.5)
    return cls("what happened; the way out")


def detail(status: Status, kind: type) -> object | None:
    for packed in status_pb2.Status.FromString(dict(status.trailers)[DETAILS_KEY]).details:
        found = kind()
        if packed.Unpack(found):
            return found
    return None


def test_every_exception_class_has_a_row() -> None:
    assert set(TABLE) == set(CLASSES)


def test_reasons_tell_the_classes_apart() -> None:
    abstract = {TinyLoopError, errors.BudgetExceeded, errors.EngineFault, errors.DeviceLost}
    reasons = [cls.reason for cls in CLASSES if cls not in abstract]
    assert len(reasons) == len(set(reasons))


@pytest.mark.parametrize("cls", CLASSES)
def test_every_exception_survives_copying_and_another_process(cls: type[TinyLoopError]) -> None:
    error = example(cls)
    for other in (copy.copy(error), pickle.loads(pickle.dumps(error))):
        assert type(other) is cls and str(other) == str(error) and vars(other) == vars(error)


@pytest.mark.parametrize("cls", CLASSES)
def test_every_status_carries_error_info_and_fits_its_trailers(cls: type[TinyLoopError]) -> None:
    error = cls("field", "x" * 10_000) if cls is errors.InvalidArgument else cls("x" * 10_000)
    status = to_status(error, "request-1")
    info = detail(status, error_details_pb2.ErrorInfo)
    assert info.domain == "tinyloop" and info.reason == cls.reason and info.metadata["request_id"] == "request-1"
    assert len(status.message) <= MAX_MESSAGE and sum(len(value) for _, value in status.trailers) < 8000
    wire = status_pb2.Status.FromString(dict(status.trailers)[DETAILS_KEY])
    assert wire.code == status.code.value[0] and wire.message == status.message


@pytest.mark.parametrize("cls", [c for c in CLASSES if c not in (TinyLoopError, errors.BudgetExceeded)])
def test_the_client_raises_what_the_server_raised(cls: type[TinyLoopError]) -> None:
    error = example(cls)
    status = to_status(error, "r")
    back = to_exception(status.code, status.message, status.trailers)
    if issubclass(cls, errors.EngineFault | errors.ModelClosed):
        assert type(back) in (errors.EngineFault, errors.ModelClosed) and "what happened" not in str(back)
        return
    assert type(back) is cls and str(back) == str(error)
    builtins = {base for base in cls.__mro__ if base in (ValueError, KeyError, RuntimeError, TimeoutError)}
    assert all(isinstance(back, base) for base in builtins)


def test_a_field_violation_names_its_field() -> None:
    status = to_status(example(errors.InvalidArgument), "r")
    bad = detail(status, error_details_pb2.BadRequest)
    assert bad.field_violations[0].field == "top_p"
    back = to_exception(status.code, status.message, status.trailers)
    assert isinstance(back, errors.InvalidArgument) and back.field == "top_p"


def test_what_is_transient_says_when_to_come_back() -> None:
    for cls in (errors.QueueFull, errors.Draining, errors.WarmingUp):
        status = to_status(example(cls), "r")
        assert status.code is grpc.StatusCode.UNAVAILABLE
        assert detail(status, error_details_pb2.RetryInfo).retry_delay.ToMilliseconds() == 2500
        assert dict(status.trailers)[PUSHBACK_KEY] == "2500"
        back = to_exception(status.code, status.message, status.trailers)
        assert isinstance(back, errors.Unavailable) and back.retry_after_s == 2.5


def test_a_closed_model_is_not_retried() -> None:
    status = to_status(errors.ModelClosed(), "r")
    assert dict(status.trailers)[PUSHBACK_KEY] == "-1" and detail(status, error_details_pb2.RetryInfo) is None
    assert status.message.startswith("the server closed before"), "whose caller has no Model that he could construct"


@pytest.mark.parametrize(
    ("cls", "subject"), [(errors.PinBudgetExceeded, "pinned_bytes"), (errors.TenantQuotaExceeded, "tenant")]
)
def test_a_budget_is_a_quota_failure(cls: type[TinyLoopError], subject: str) -> None:
    failure = detail(to_status(cls("too much"), "r"), error_details_pb2.QuotaFailure)
    assert failure.violations[0].subject == subject


@pytest.mark.parametrize("retry_after_s", [None, 2.5])
def test_a_tenant_hears_which_quota_and_whether_waiting_helps(retry_after_s: float | None) -> None:
    error = errors.TenantQuotaExceeded("too much", quota="tokens_per_s", retry_after_s=retry_after_s)
    status = to_status(error, "r")
    assert detail(status, error_details_pb2.QuotaFailure).violations[0].subject == "tokens_per_s"
    assert (detail(status, error_details_pb2.RetryInfo) is not None) == (retry_after_s is not None)
    assert PUSHBACK_KEY not in dict(status.trailers), "stock clients would take it for something transient"
    back = to_exception(status.code, status.message, status.trailers)
    assert vars(back) == vars(error)


@pytest.mark.parametrize(
    "error",
    [ValueError("prompt: secret"), AssertionError("secret"), asyncio.CancelledError("secret"), OSError(5, "secret")],
)
def test_the_text_of_an_unforeseen_error_stays_here(error: BaseException) -> None:
    status = to_status(error, "r")
    assert status.code is grpc.StatusCode.INTERNAL and status.reason == "INTERNAL"
    assert all("secret" not in part for part in (status.message, str(status.trailers)))


@pytest.mark.parametrize(
    ("code", "cls"),
    [
        (grpc.StatusCode.DEADLINE_EXCEEDED, errors.DeadlineExceeded),
        (grpc.StatusCode.UNAVAILABLE, errors.Unavailable),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, errors.InvalidArgument),
        (grpc.StatusCode.UNIMPLEMENTED, TinyLoopError),
        (grpc.StatusCode.CANCELLED, errors.Unavailable),
    ],
)
def test_a_status_that_is_not_ours_becomes_the_nearest_exception(
    code: grpc.StatusCode, cls: type[TinyLoopError]
) -> None:
    assert type(to_exception(code, "said by a proxy", ())) is cls


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (grpc.StatusCode.INTERNAL, "Stream removed (RST_STREAM (Received RST_STREAM with error code 2))"),
        (grpc.StatusCode.UNKNOWN, "Stream removed (Data frame with END_STREAM flag received)"),
        (grpc.StatusCode.CANCELLED, "Received RST_STREAM with error code 8"),
    ],
)
def test_a_stream_that_a_proxy_cuts_off_is_an_unavailable_server(code: grpc.StatusCode, message: str) -> None:
    back = to_exception(code, message, ())
    assert type(back) is errors.Unavailable and "cut off" in str(back)
