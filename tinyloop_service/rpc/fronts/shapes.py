"""How many messages each method takes and gives: all that a front knows of it."""

from __future__ import annotations

from enum import Enum

from google.protobuf.descriptor import FileDescriptor, MethodDescriptor
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from tinyloop_service.pb import generation_pb2, model_pb2, prefix_pb2


class Shape(Enum):
    UNARY = "one request, one answer"
    ANSWERS = "one request, any number of answers"
    STREAMS = "any number of both"


def _shape(method: MethodDescriptor) -> Shape:
    if method.client_streaming:
        return Shape.STREAMS
    return Shape.ANSWERS if method.server_streaming else Shape.UNARY


def _shapes(*files: FileDescriptor) -> dict[str, Shape]:
    return {
        f"/{service.full_name}/{method.name}": _shape(method)
        for file in files
        for service in file.services_by_name.values()
        for method in service.methods
    }


SHAPES = _shapes(*(module.DESCRIPTOR for module in (generation_pb2, prefix_pb2, model_pb2, health_pb2, reflection_pb2)))
