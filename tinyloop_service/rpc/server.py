"""The gRPC servers and their services.

Two on one event loop: the one that serves, in this process or behind fronts (rpc/fronts), and a small one for health
alone (health.py says why).
"""

from __future__ import annotations

from collections.abc import Callable

import grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc

from tinyloop_service.pb import (
    generation_pb2,
    generation_pb2_grpc,
    model_pb2,
    model_pb2_grpc,
    prefix_pb2,
    prefix_pb2_grpc,
)
from tinyloop_service.rpc.addresses import Server, health_options, serving_options
from tinyloop_service.rpc.auth import Authenticate
from tinyloop_service.rpc.backend import Backend
from tinyloop_service.rpc.boundary import Methods
from tinyloop_service.rpc.creation import PrefixCreator
from tinyloop_service.rpc.fronts.fleet import Fronts
from tinyloop_service.rpc.generation_service import GenerationService
from tinyloop_service.rpc.health import READY_SERVICE, Health
from tinyloop_service.rpc.model_service import ModelService
from tinyloop_service.rpc.prefix_service import PrefixService
from tinyloop_service.rpc.tokens import TokensFile
from tinyloop_service.settings import ServerSettings

SERVICES = (
    READY_SERVICE,
    prefix_pb2.DESCRIPTOR.services_by_name["PrefixService"].full_name,
    model_pb2.DESCRIPTOR.services_by_name["ModelService"].full_name,
)
assert generation_pb2.DESCRIPTOR.services_by_name["GenerationService"].full_name == READY_SERVICE


def make_server(
    settings: ServerSettings,
    backend: Backend,
    tokens: TokensFile | None,
    health: Health,
    reachable: Callable[[bool], None],
) -> Server:
    """The serving server with every service, not yet listening.  `tokens`: who may call; None: everybody.  `reachable`
    hears it when nobody listens any more, or somebody again."""
    interceptors = [Authenticate(tokens, backend.observer)] if tokens is not None else []
    server: Server = (
        Fronts(settings, interceptors, tokens, reachable, backend.observer)
        if settings.grpc_processes
        else grpc.aio.server(interceptors=interceptors, options=serving_options(settings))
    )
    creator, methods = PrefixCreator(backend), Methods(backend.observer)
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(GenerationService(backend, creator), methods)
    prefix_pb2_grpc.add_PrefixServiceServicer_to_server(PrefixService(backend, creator), methods)
    model_pb2_grpc.add_ModelServiceServicer_to_server(ModelService(backend), methods)
    server.add_generic_rpc_handlers((methods,))
    health.add_to(server)
    if settings.reflection:
        servicer = reflection.aio.ReflectionServicer((*SERVICES, reflection.SERVICE_NAME))
        reflection_pb2_grpc.add_ServerReflectionServicer_to_server(servicer, server)
    return server


def make_health_server(health: Health) -> Server:
    """For health alone, not yet listening."""
    server = grpc.aio.server(options=health_options())
    health.add_to(server)
    return server
