"""GenerationService: a request in, a stream of everything that is pending out, until it completes."""

from __future__ import annotations

from tinyloop_service.completion import CompletionBuilder
from tinyloop_service.errors import InvalidArgument, PrefixNotFound
from tinyloop_service.observer import CallRecord
from tinyloop_service.pb import generation_pb2, generation_pb2_grpc, prefix_pb2
from tinyloop_service.rpc.backend import Backend
from tinyloop_service.rpc.boundary import Context
from tinyloop_service.rpc.caller import Right, caller
from tinyloop_service.rpc.convert import inside, read_input, read_name, read_parameters, write_completion, write_outputs
from tinyloop_service.rpc.creation import PrefixCreator
from tinyloop_service.scheduler.stream import Stream
from tinyloop_service.types import GenerationRequest

_CREATE_ATTEMPTS = 3  # a prefix just made may be deleted before it is used


class GenerationService(generation_pb2_grpc.GenerationServiceServicer):  # type: ignore[misc]  # generated code has no types
    def __init__(self, backend: Backend, creator: PrefixCreator) -> None:
        self._backend = backend
        self._creator = creator

    async def Generate(self, request: generation_pb2.GenerateRequest, context: Context) -> None:
        answering = self._backend.answering(context, "GenerationService/Generate")
        async with answering as call, await self._open(request, call) as stream:
            async for outputs in stream:
                for message in write_outputs(outputs, self._backend.replica, packed=request.packed):
                    await context.write(message)

    async def GenerateUnary(
        self, request: generation_pb2.GenerateUnaryRequest, context: Context
    ) -> generation_pb2.Completion:
        async with self._backend.answering(context, "GenerationService/GenerateUnary") as call:
            with inside("generation"):
                opened = await self._open(request.generation, call)
            async with opened as stream:
                builder = CompletionBuilder(max(request.generation.n, 1))
                async for outputs in stream:
                    builder.add(outputs)
            return write_completion(builder.completion(), self._backend.replica)

    async def _open(self, message: generation_pb2.GenerateRequest, call: CallRecord) -> Stream:
        """Check, tokenise and submit.  Every refusal is raised here."""
        request = await self._read(message)
        call.prefix = request.prefix
        if message.HasField("create_if_missing"):
            stream = await self._open_creating(request, message.create_if_missing, call)
        else:
            stream = await self._backend.names.generate(request)
        call.request = stream.record
        return stream

    async def _read(self, message: generation_pb2.GenerateRequest) -> GenerationRequest:
        scheduler = self._backend.scheduler
        prefix = read_name(message.prefix, "prefix") if message.prefix else None
        parameters = read_parameters(message, scheduler.limits)
        content = read_input(message.input, scheduler.limits, may_be_empty=prefix is not None)
        tokens = await self._backend.encode(content, "input.text", bos=prefix is None)
        if prefix is None and not tokens:
            raise InvalidArgument("input", "is empty, expected at least one token")
        want_text = not message.omit_text and scheduler.tokenizer is not None
        return parameters.request(tokens, tenant=caller().tenant, prefix=prefix, want_text=want_text)

    async def _open_creating(
        self, request: GenerationRequest, missing: prefix_pb2.CreatePrefixRequest, call: CallRecord
    ) -> Stream:
        """As `_open`, after the prefix is built if its name is unknown."""
        caller().require(Right.BUILD)
        with inside("create_if_missing"):
            order = await self._creator.read(_named(missing, request.prefix))
        for _ in range(_CREATE_ATTEMPTS):
            await self._creator.check(order)  # the name may stand for other content
            try:
                return await self._backend.names.generate(request)
            except PrefixNotFound:
                call.built(await self._creator.create(order))
        return await self._backend.names.generate(request)


def _named(missing: prefix_pb2.CreatePrefixRequest, prefix: str | None) -> prefix_pb2.CreatePrefixRequest:
    """`missing` with the id of the prefix that the request uses."""
    if prefix is None:
        raise InvalidArgument("prefix_id", "cannot be created without a name; set `prefix` of the request")
    if missing.prefix_id not in ("", prefix):
        raise InvalidArgument("prefix_id", f"is {missing.prefix_id[:80]!r}, expected {prefix!r} or nothing")
    for field in ("request_id", "build_async", "validate_only"):
        if getattr(missing, field):
            raise InvalidArgument(field, "has no meaning here; leave it out")
    named = prefix_pb2.CreatePrefixRequest()
    named.CopyFrom(missing)
    named.prefix_id = prefix
    return named
