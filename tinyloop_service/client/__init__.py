"""Python clients over gRPC: `Client` for threads, `AsyncClient` for asyncio, alike in everything else.

Both have every method of `Model`, with its signatures and exceptions, and named prefixes besides.
"""

from tinyloop_service.client.aio import AsyncClient
from tinyloop_service.client.channel import Tls
from tinyloop_service.client.results import ModelInfo, Prefix, RemotePrefixCache
from tinyloop_service.client.sync import Client

__all__ = ["AsyncClient", "Client", "ModelInfo", "Prefix", "RemotePrefixCache", "Tls"]
