"""One request of AIPerf as one stream of TinyLoop, told to AIPerf as the events of a completions endpoint.

In: the JSON of a completions request; beside prompt and max_tokens it may have every argument of `AsyncClient.stream`
(`--extra-inputs prefix:NAME ignore_eos:true`), and with a prefix the prompt is what follows it.  Out: a record with an
event for each message that carried text, and one with the tokens that the server counted.
"""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any
from urllib.parse import urlsplit

from aiperf.common.hooks import on_stop
from aiperf.common.models import ErrorDetails, RequestInfo, RequestRecord, SSEMessage
from aiperf.plugin.schema.schemas import TransportMetadata
from aiperf.transports.base_transports import BaseTransport, FirstTokenCallback

from tinyloop_service import AsyncClient
from tinyloop_service.completion import Delta

_OF_HTTP = ("model", "stream", "stream_options")


class TinyLoopTransport(BaseTransport):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._clients: dict[str, AsyncClient] = {}

    @classmethod
    def metadata(cls) -> TransportMetadata:
        return TransportMetadata(transport_type="tinyloop", url_schemes=[])

    def get_url(self, request_info: RequestInfo) -> str:
        return request_info.model_endpoint.endpoint.get_url(request_info.url_index)

    async def send_request(
        self, request_info: RequestInfo, payload: Any, *, first_token_callback: FirstTokenCallback | None = None
    ) -> RequestRecord:
        record = RequestRecord(start_perf_ns=time.perf_counter_ns())
        limit = request_info.cancel_after_ns
        try:
            async with asyncio.timeout(None if limit is None else limit / 1e9) as cancelling:
                await self._read(record, self._client(self.get_url(request_info)), payload, first_token_callback)
            record.status = 200
        except Exception as error:
            if isinstance(error, TimeoutError) and cancelling.expired():
                record.cancellation_perf_ns = time.perf_counter_ns()
                record.error = ErrorDetails(type="RequestCancellationError", message="cancelled as asked", code=499)
            else:
                record.error = ErrorDetails.from_exception(error)
        record.end_perf_ns = time.perf_counter_ns()
        return record

    async def _read(
        self, record: RequestRecord, client: AsyncClient, payload: Any, told: FirstTokenCallback | None
    ) -> None:
        asked = json.loads(payload) if isinstance(payload, bytes) else dict(payload)
        arguments = {name: value for name, value in asked.items() if name not in _OF_HTTP}
        if "prefix" in arguments:
            arguments["suffix"] = arguments.pop("prompt")
        async for delta in client.stream(**arguments):
            if delta.text or delta.usage is not None:
                event = SSEMessage.parse(f"data: {json.dumps(_event(delta))}", time.perf_counter_ns())
                record.recv_start_perf_ns = record.recv_start_perf_ns or event.perf_ns
                record.responses.append(event)
                if told is not None and await told(event.perf_ns - record.start_perf_ns, event):
                    told = None

    def _client(self, url: str) -> AsyncClient:
        """One channel an address; http:// is only what AIPerf wants to see before it."""
        if url not in self._clients:
            self._clients[url] = AsyncClient(urlsplit(url).netloc)
        return self._clients[url]

    @on_stop
    async def _close_clients(self) -> None:
        for client in self._clients.values():
            await client.close()


def _event(delta: Delta) -> dict[str, Any]:
    event: dict[str, Any] = {"object": "text_completion", "choices": [{"index": delta.choice, "text": delta.text}]}
    if (usage := delta.usage) is not None:
        event["usage"] = {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        }
    return event
