"""How the generators of `calls.py` run: over a channel for threads, and over one for asyncio."""

from __future__ import annotations

import asyncio
import os
import weakref
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Any, TypeVar

import grpc

from tinyloop_service.client import channel
from tinyloop_service.client.calls import Call, Steps
from tinyloop_service.errors import ModelClosed, TinyLoopError
from tinyloop_service.pb import generation_pb2_grpc, model_pb2_grpc, prefix_pb2_grpc

T = TypeVar("T")


def _stubs(connected: Any) -> dict[str, Any]:
    """Of a channel of either kind, by service."""
    return {
        "PrefixService": prefix_pb2_grpc.PrefixServiceStub(connected),
        "GenerationService": generation_pb2_grpc.GenerationServiceStub(connected),
        "ModelService": model_pb2_grpc.ModelServiceStub(connected),
    }


class Messages(Iterator[Any]):
    """The messages of one stream, errors turned into exceptions; cancels the call when it is dropped."""

    def __init__(self, call: Any, failed: Callable[[grpc.RpcError, bool], TinyLoopError]) -> None:
        """failed: the exception for an error; told whether a message had come before it."""
        self._call = call
        self._failed = failed
        self._has_begun = False
        self._cancel = weakref.finalize(self, call.cancel)

    def __next__(self) -> Any:
        if not self._cancel.alive:
            raise StopIteration
        try:
            message = next(self._call)
        except grpc.RpcError as error:
            raise self._failed(error, self._has_begun) from None
        self._has_begun = True
        return message

    def close(self) -> None:
        self._cancel()


class Transport:
    """A channel, and how the generators of `calls` run over it."""

    def __init__(
        self, target: str, token: str | None, tls: channel.TlsChoice, affinity: bool, timeout: float | None
    ) -> None:
        options, secrets = channel.channel_options(affinity=affinity), channel.credentials(tls)
        if secrets is None:
            self._channel = grpc.insecure_channel(target, options)
        else:
            self._channel = grpc.secure_channel(target, secrets, options)
        self._stubs = _stubs(self._channel)
        self._token, self._timeout, self._closed = channel.check_token(token), timeout, False
        self._process = os.getpid()

    def run(self, steps: Steps[T], limit_s: float | None = None) -> T:
        """Carry out a method: make its calls, hand back their responses."""
        response: Any = None
        while True:
            try:
                step = steps.send(response)
            except StopIteration as done:
                result: T = done.value
                return result
            response = self._call_all((step,), limit_s)[0] if isinstance(step, Call) else self._call_all(step, limit_s)

    def stream(self, call: Call) -> Messages:
        self._check_open()
        headers = channel.metadata(self._token, call.prefix)
        started = self._method(call)(call.request, timeout=self._timeout, metadata=headers)
        return Messages(started, lambda error, has_begun: self._exception(error, call, has_begun))

    @property
    def is_inherited(self) -> bool:
        """This process was forked from the one that made it; a channel does not live in both."""
        return os.getpid() != self._process

    def close(self) -> None:
        self._closed = True
        if not self.is_inherited:
            self._channel.close()

    def _call_all(self, several: tuple[Call, ...], limit_s: float | None) -> list[Any]:
        """Responses in order; the first failure, or Ctrl-C, cancels the others."""
        self._check_open()
        limit_s = self._timeout if limit_s is None else limit_s
        futures = [
            self._method(call).future(
                call.request, timeout=limit_s, metadata=channel.metadata(self._token, call.prefix)
            )
            for call in several
        ]
        try:
            return [self._result(future, call) for future, call in zip(futures, several, strict=True)]
        finally:
            for future in futures:
                future.cancel()  # nothing happens to those that are done

    def _result(self, future: Any, call: Call) -> Any:
        try:
            return future.result()
        except grpc.RpcError as error:
            raise self._exception(error, call) from None
        except grpc.FutureCancelledError:
            raise channel.closed_error() from None

    def _method(self, call: Call) -> Any:
        return getattr(self._stubs[call.service], call.method)

    def _exception(self, error: grpc.RpcError, call: Call, has_begun: bool = False) -> TinyLoopError:
        return channel.exception_of(error, call.content_field, closed=self._closed, has_begun=has_begun)

    def _check_open(self) -> None:
        if self._closed:
            raise channel.closed_error()
        if self.is_inherited:
            raise ModelClosed("client was made before this process was forked; construct a new one")


class AsyncTransport:
    """A channel, made on the loop of its first call, and how the generators of `calls` run over it."""

    def __init__(
        self,
        target: str,
        token: str | None,
        tls: channel.TlsChoice,
        affinity: bool,
        timeout: float | None,
        *,
        retries: bool = True,
    ) -> None:
        self._target, self._options = target, channel.channel_options(affinity=affinity, retries=retries)
        self._secrets = channel.credentials(tls)
        self._token, self._timeout, self._closed = channel.check_token(token), timeout, False
        self._channel: grpc.aio.Channel | None = None
        self._stubs: dict[str, Any] = {}

    async def run(self, steps: Steps[T], limit_s: float | None = None) -> T:
        """Carry out a method: make its calls, hand back their responses."""
        response: Any = None
        while True:
            try:
                step = steps.send(response)
            except StopIteration as done:
                result: T = done.value
                return result
            if isinstance(step, Call):
                response = await self._call(step, limit_s)
            else:
                response = await self._call_all(step)

    async def stream(self, call: Call) -> AsyncGenerator[Any, None]:
        started, has_begun = self._start(call, self._timeout), False
        try:
            async for message in started:
                has_begun = True
                yield message
        except grpc.aio.AioRpcError as error:
            field = call.content_field
            raise channel.exception_of(error, field, closed=self._closed, has_begun=has_begun) from None
        finally:
            started.cancel()  # nothing happens to one that is done

    async def close(self) -> None:
        self._closed = True
        if self._channel is not None:
            await self._channel.close()

    async def _call(self, call: Call, limit_s: float | None = None) -> Any:
        try:
            return await self._start(call, self._timeout if limit_s is None else limit_s)
        except grpc.aio.AioRpcError as error:
            raise channel.exception_of(error, call.content_field, closed=self._closed) from None
        except asyncio.CancelledError:
            if self._closed:  # the channel's end, not that of the caller's task
                raise channel.closed_error() from None
            raise

    async def _call_all(self, several: tuple[Call, ...]) -> list[Any]:
        """Responses in order; the first failure cancels the others."""
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._call(call)) for call in several]
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None
        return [task.result() for task in tasks]

    def _start(self, call: Call, limit_s: float | None) -> Any:
        if self._closed:
            raise channel.closed_error()
        if self._channel is None:
            self._connect()
        method = getattr(self._stubs[call.service], call.method)
        return method(call.request, timeout=limit_s, metadata=channel.metadata(self._token, call.prefix))

    def _connect(self) -> None:
        if self._secrets is None:
            self._channel = grpc.aio.insecure_channel(self._target, self._options)
        else:
            self._channel = grpc.aio.secure_channel(self._target, self._secrets, self._options)
        self._stubs = _stubs(self._channel)
