"""Keeps a server so busy that it refuses everybody else, until told to stop."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
from command_harness import TIMEOUT_S, eventually
from guarded import Guarded
from prometheus_client.parser import text_string_to_metric_families

from tinyloop_service.pb import generation_pb2, generation_pb2_grpc, input_pb2, model_pb2, model_pb2_grpc

HOG = generation_pb2.GenerateRequest(
    input=input_pb2.Input(text="And"), max_tokens=2000, n=2, loops=16, ignore_eos=True, omit_text=True
)


@contextmanager
def kept_busy(guarded: Guarded) -> Iterator[None]:
    """One request runs and takes all memory, another waits, and more may not: they are refused as QUEUE_FULL."""
    credentials = grpc.ssl_channel_credentials(guarded.authority.read_bytes())
    headers = [("authorization", f"Bearer {guarded.token('hog')}")]
    with grpc.secure_channel(guarded.address, credentials) as channel:
        generation = generation_pb2_grpc.GenerationServiceStub(channel)
        model = model_pb2_grpc.ModelServiceStub(channel)
        running = generation.Generate(HOG, metadata=headers)
        next(running)
        waiting = generation.Generate(HOG, metadata=headers)
        eventually(lambda: _num_waiting(model, headers) == 1)
        yield
        assert running.is_active(), "the server had room before it was told to; make HOG longer"
        waiting.cancel()
        running.cancel()


def _num_waiting(model: model_pb2_grpc.ModelServiceStub, headers: list[tuple[str, str]]) -> int:
    load: model_pb2.Load = model.GetLoad(model_pb2.GetLoadRequest(), metadata=headers)
    return load.requests_waiting


def count(guarded: Guarded, name: str, **labels: str) -> float:
    """A counter of the server's metrics; 0 where there is no such series yet."""
    with urllib.request.urlopen(f"http://{guarded.server.metrics}/metrics", timeout=TIMEOUT_S) as response:
        families = text_string_to_metric_families(response.read().decode())
    samples = (sample for family in families for sample in family.samples)
    return sum(each.value for each in samples if each.name == f"tinyloop_{name}" and each.labels == labels)
