"""PrefixService: one short method per RPC."""

from __future__ import annotations

from google.protobuf.empty_pb2 import Empty

from tinyloop_service.pb import prefix_pb2, prefix_pb2_grpc
from tinyloop_service.rpc.backend import Backend
from tinyloop_service.rpc.boundary import Context
from tinyloop_service.rpc.caller import caller
from tinyloop_service.rpc.convert import read_name
from tinyloop_service.rpc.convert_prefix import (
    read_change,
    read_page_size,
    read_page_token,
    read_view,
    write_page_token,
    write_prefix,
)
from tinyloop_service.rpc.creation import PrefixCreator
from tinyloop_service.scheduler.loop import UNCHANGED


class PrefixService(prefix_pb2_grpc.PrefixServiceServicer):  # type: ignore[misc]  # generated code has no types
    def __init__(self, backend: Backend, creator: PrefixCreator) -> None:
        self._backend = backend
        self._creator = creator

    async def CreatePrefix(self, request: prefix_pb2.CreatePrefixRequest, context: Context) -> prefix_pb2.Prefix:
        async with self._backend.answering(context, "PrefixService/CreatePrefix") as call:
            order = await self._creator.read(request)
            call.prefix = order.name
            if request.validate_only:
                return write_prefix(await self._creator.check(order))
            info = await self._creator.create(order)
            call.built(info)
            return write_prefix(info)

    async def GetPrefix(self, request: prefix_pb2.GetPrefixRequest, context: Context) -> prefix_pb2.Prefix:
        async with self._backend.answering(context, "PrefixService/GetPrefix") as call:
            call.prefix = name = read_name(request.name)
            full = read_view(request.view)
            return write_prefix(await self._backend.names.get(name, tenant=caller().tenant), full=full)

    async def ListPrefixes(
        self, request: prefix_pb2.ListPrefixesRequest, context: Context
    ) -> prefix_pb2.ListPrefixesResponse:
        async with self._backend.answering(context, "PrefixService/ListPrefixes"):
            full, size, after = (
                read_view(request.view),
                read_page_size(request.page_size),
                read_page_token(request.page_token),
            )
            rest = await self._backend.names.page(tenant=caller().tenant, after=after, limit=size + 1)
            page = rest[:size]
            more = write_page_token(page[-1].name or "") if len(rest) > size else ""
            prefixes = [write_prefix(info, full=full) for info in page]
            return prefix_pb2.ListPrefixesResponse(prefixes=prefixes, next_page_token=more)

    async def UpdatePrefix(self, request: prefix_pb2.UpdatePrefixRequest, context: Context) -> prefix_pb2.Prefix:
        async with self._backend.answering(context, "PrefixService/UpdatePrefix") as call:
            now_ns = self._backend.scheduler.now_ns()
            change = read_change(request, now_ns)
            call.prefix = change.name
            info = await self._backend.names.update(
                change.name,
                tenant=caller().tenant,
                expire_time_ns=UNCHANGED if change.expiration is None else change.expiration.at(now_ns),
                pinned=UNCHANGED if change.pinned is None else change.pinned,
                etag=change.etag,
            )
            return write_prefix(info)

    async def DeletePrefix(self, request: prefix_pb2.DeletePrefixRequest, context: Context) -> Empty:
        async with self._backend.answering(context, "PrefixService/DeletePrefix") as call:
            call.prefix = name = read_name(request.name)
            await self._backend.names.delete(name, tenant=caller().tenant, etag=request.etag or None)
            return Empty()

    async def WatchPrefix(self, request: prefix_pb2.WatchPrefixRequest, context: Context) -> None:
        async with self._backend.answering(context, "PrefixService/WatchPrefix") as call:
            call.prefix = name = read_name(request.name)
            async for info in self._backend.names.watch(name, tenant=caller().tenant):
                await context.write(write_prefix(info))
