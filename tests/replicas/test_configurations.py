"""The proxies' files and the chart speak of the same pods; and what they take to reach replicas that speak TLS."""

from __future__ import annotations

import asyncio
import re
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml
from certificates import Authority
from name_server import name_server
from processes import ENVOY, HAPROXY, ROOT, pod_address, pod_records, running_envoy, running_haproxy
from redis_server import free_port
from rpc_harness import serving

from tinyloop_service import errors
from tinyloop_service.client import AsyncClient
from tinyloop_service.rpc.health import READY_SERVICE

GOLDEN = ROOT / "tests" / "helm" / "golden" / "defaults.yaml"
DOCS = ROOT / "docs" / "deploying.md"
NAME = "tinyloop-headless.ml.svc"  # in the certificate


def test_they_name_the_chart_s_pods() -> None:
    documents = [document for document in yaml.safe_load_all(GOLDEN.read_text(encoding="utf-8")) if document]
    [replicas] = [document for document in documents if document["kind"] == "StatefulSet"]
    name, service = replicas["metadata"]["name"], replicas["spec"]["serviceName"]
    [ports] = [d["spec"]["ports"] for d in documents if d["kind"] == "Service" and d["metadata"]["name"] == service]
    [port] = [port["port"] for port in ports if port["name"] == "grpc"]
    domain = f"{service}.{replicas['metadata']['namespace']}.svc.cluster.local"
    pods = [f"{name}-{i}" for i in range(3)]

    [cluster] = yaml.safe_load(ENVOY.read_text(encoding="utf-8"))["static_resources"]["clusters"]
    found = [each["endpoint"] for each in cluster["load_assignment"]["endpoints"][0]["lb_endpoints"]]
    assert [each["hostname"] for each in found] == pods
    addresses = [each["address"]["socket_address"] for each in found]
    assert addresses == [{"address": f"{pod}.{domain}", "port_value": port} for pod in pods]

    haproxy = HAPROXY.read_text(encoding="utf-8")
    assert re.findall(r"^ *presetenv TINYLOOP_(?:DOMAIN|PORT) +(\S+)", haproxy, re.MULTILINE) == [domain, str(port)]
    assert re.findall(r"^ *server (\S+) +\"(\S+)\.\$\{TINYLOOP_DOMAIN\}", haproxy, re.MULTILINE) == [
        (pod, pod) for pod in pods
    ]


def test_haproxy_asks_for_health_as_grpc_does() -> None:
    """The frames that its file spells out have the lengths that they state, and ask for what a replica tells."""
    lines = re.findall(r"tcp-check send(-binary)? \"?([^\"\s]+)", HAPROXY.read_text(encoding="utf-8"))
    preface, settings, headers_frame, *headers, data_frame, message, field = [
        bytes.fromhex(text) if binary else text.encode("ascii").decode("unicode_escape").encode("latin-1")
        for binary, text in lines
    ]
    assert preface == b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" and settings == b"\0\0\0\4\0\0\0\0\0"
    assert headers_frame == len(b"".join(headers)).to_bytes(3, "big") + b"\1\4\0\0\0\1"
    assert data_frame == len(message + field).to_bytes(3, "big") + b"\0\1\0\0\0\1"
    assert message == b"\0" + len(field).to_bytes(4, "big")
    assert field == b"\x0a" + bytes([len(READY_SERVICE)]) + READY_SERVICE.encode()


def transport_socket_in_the_docs(ca: Path) -> dict[str, Any]:
    blocks = re.findall(r"```yaml\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)
    [block] = [block for block in map(yaml.safe_load, blocks) if "transport_socket" in block]
    context = block["transport_socket"]["typed_config"]["common_tls_context"]["validation_context"]
    context["trusted_ca"] = {"filename": str(ca)}
    found: dict[str, Any] = block
    return found


async def test_replicas_that_speak_tls_are_reached_if_they_are_who_they_should_be(tmp_path: Path) -> None:
    authority, stranger = Authority.make("ours"), Authority.make("stranger")
    cert, key = authority.issue("server", host=NAME).write(tmp_path, "server")
    port = free_port()
    with ExitStack() as stack:
        names = stack.enter_context(name_server(pod_records(1)))
        targets = []
        for who in (authority, stranger):
            ca = tmp_path / f"{who.certificate.serial_number}.pem"
            ca.write_bytes(who.pem)
            socket, variables = transport_socket_in_the_docs(ca), {"TINYLOOP_CA": str(ca), "TINYLOOP_SNI": NAME}
            targets.append(stack.enter_context(running_envoy(tmp_path, port, names, socket)))
            targets.append(stack.enter_context(running_haproxy(port, names, variables)))
        async with serving(listen=f"{pod_address(0)}:{port}", tls_cert=str(cert), tls_key=str(key)):
            await asyncio.gather(*map(_is_answered, targets[:2]))
            for target in targets[2:]:
                with pytest.raises(errors.Unavailable):
                    async with AsyncClient(target, timeout=30) as client:
                        await client.update_prefix("p", pinned=True)  # a call that the client does not try again


async def _is_answered(target: str) -> None:
    async with AsyncClient(target, timeout=30) as client, asyncio.timeout(30):
        while True:
            try:
                await client.model()
                return
            except errors.Unavailable:  # the proxy has not seen it yet
                await asyncio.sleep(0.05)
