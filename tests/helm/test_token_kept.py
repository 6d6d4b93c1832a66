"""An upgrade keeps the token that the chart once made: clients hold it, and nobody else has it.

Helm asks a cluster for the Secret.  Here an HTTP server answers what helm asks: which kinds there are, and that Secret.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest
from chart import CHART, NAMESPACE, documents, find, helm, rendered

from tinyloop_service.rpc.tokens import hash_token

OLD = "tl_" + "k" * 43
SECRET = f"/api/v1/namespaces/{NAMESPACE}/secrets/tinyloop-tokens"


def discovery() -> dict[str, Any]:
    """Path → answer, for the kinds that the chart makes."""
    versions: dict[str, list[dict[str, Any]]] = {}
    for version, kind in sorted({(o["apiVersion"], o["kind"]) for o in rendered("defaults")}):
        plural = kind.lower() + ("es" if kind.endswith("y") else "s")
        versions.setdefault(version, []).append({"name": plural, "kind": kind, "namespaced": True, "verbs": ["get"]})
    groups = [
        {"name": version.split("/")[0], "versions": [{"groupVersion": version, "version": version.split("/")[1]}]}
        for version in versions
        if "/" in version
    ]
    answers: dict[str, Any] = {
        "/version": {"major": "1", "minor": "37", "gitVersion": "v1.37.0"},
        "/api": {"kind": "APIVersions", "versions": ["v1"]},
        "/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups},
    }
    for version, resources in versions.items():
        path = f"/apis/{version}" if "/" in version else f"/api/{version}"
        answers[path] = {"kind": "APIResourceList", "groupVersion": version, "resources": resources}
    return answers


@pytest.fixture
def cluster() -> Iterator[tuple[str, dict[str, Any]]]:
    """Its address, and what it answers."""
    answers = discovery()

    class Answering(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer = answers.get(self.path.split("?")[0])
            body = json.dumps(answer or {"kind": "Status", "apiVersion": "v1", "reason": "NotFound", "code": 404})
            self.send_response(200 if answer else 404)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_: object) -> None:
            """No words about each request."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Answering) as listening:
        serving = Thread(target=listening.serve_forever)
        serving.start()
        yield f"http://127.0.0.1:{listening.server_port}", answers
        listening.shutdown()
        serving.join()


def token_made(cluster: str) -> dict[str, str]:
    done = helm(
        "template", "tinyloop", CHART, "--namespace", NAMESPACE, "--dry-run=server", "--kube-apiserver", cluster,
        "--disable-openapi-validation",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    data: dict[str, str] = find(tuple(documents(done.stdout)), "Secret")["stringData"]
    return data


def test_a_first_install_makes_one(cluster: tuple[str, dict[str, Any]]) -> None:
    assert token_made(cluster[0])["token"] != OLD


def test_an_upgrade_keeps_it(cluster: tuple[str, dict[str, Any]]) -> None:
    address, answers = cluster
    metadata = {
        "name": "tinyloop-tokens",
        "namespace": NAMESPACE,
        "labels": {"app.kubernetes.io/managed-by": "Helm"},
        "annotations": {"meta.helm.sh/release-name": "tinyloop", "meta.helm.sh/release-namespace": NAMESPACE},
    }
    data = {"token": base64.b64encode(OLD.encode()).decode()}
    answers[SECRET] = {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "data": data}
    made = token_made(address)
    assert made["token"] == OLD
    assert f'sha256 = "{hash_token(OLD)}"' in made["tokens.toml"]
