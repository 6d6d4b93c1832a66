"""Replicas, Envoy and HAProxy as processes: the latter two started with the very files in deploy/.

What differs from a cluster is told by the proxies' own means, a name server and variables; only ports in envoy.yaml,
which has no means for them, are replaced in a copy.  Replicas have addresses of their own on the loopback and one
port, as pods have.  Where a proxy is missing a test is skipped, but never in CI.  `make ops-tools` installs them.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from redis_server import free_port

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
ENVOY = ROOT / "deploy" / "envoy" / "envoy.yaml"
HAPROXY = ROOT / "deploy" / "haproxy" / "haproxy.cfg"
DOMAIN = "tinyloop-headless.ml.svc.cluster.local"
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("TINYLOOP_")}
FAKE = (sys.executable, str(HERE / "replica.py"), "0.005")
DEMO = (sys.executable, "-m", "tinyloop_service.cli", "serve")


def pod_address(number: int) -> str:
    return f"127.0.0.{2 + number}"


def pod_records(count: int) -> dict[str, tuple[str, ...]]:
    """What a cluster's DNS has of the headless Service while `count` pods are ready."""
    addresses = tuple(map(pod_address, range(count)))
    return {DOMAIN: addresses} | {f"tinyloop-{i}.{DOMAIN}": (address,) for i, address in enumerate(addresses)}


@dataclass
class Replica:
    """One server process, which keeps its address from one life to the next."""

    number: int
    port: int
    settings: Mapping[str, str]  # TINYLOOP_*
    command: Sequence[str] = FAKE
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def name(self) -> str:
        return f"tinyloop-{self.number}"

    @property
    def address(self) -> str:
        return f"{pod_address(self.number)}:{self.port}"

    def start(self) -> None:
        """Returns at once."""
        own = {"LISTEN": self.address, "REPLICA": self.name, "HEALTH_LISTEN": "none", "LOG_LEVEL": "error"}
        environment = {**ENVIRONMENT, **{f"TINYLOOP_{key}": value for key, value in own.items()}, **self.settings}
        self.process = subprocess.Popen(self.command, env=environment, stdout=subprocess.PIPE)

    def wait(self) -> None:
        """Until it says that it is ready."""
        assert self.process is not None and self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith(b"serving"), f"{self.name} did not start"

    def kill(self) -> None:
        """As kill -9 does."""
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
            self.process = None


@contextmanager
def running_replicas(count: int, registry: str, command: Sequence[str] = FAKE) -> Iterator[list[Replica]]:
    settings, port = {"TINYLOOP_REGISTRY": registry}, free_port()
    replicas = [Replica(i, port, settings, command) for i in range(count)]
    with ExitStack() as stack:
        for replica in replicas:
            stack.callback(replica.kill)
            replica.start()
        for replica in replicas:
            replica.wait()
        yield replicas


@contextmanager
def running_envoy(
    folder: Path, replica_port: int, name_server_port: int, cluster: Mapping[str, Any] | None = None
) -> Iterator[str]:
    """Yields the address where it listens, perhaps in a moment.  `cluster`: added to the cluster."""
    binary = _binary("envoy", ROOT / "build" / "ops" / "envoy")
    port = free_port()
    copy = folder / f"envoy-{port}.yaml"
    config = _with_ports(yaml.safe_load(ENVOY.read_text(encoding="utf-8")), port, replica_port)
    config["static_resources"]["clusters"][0] |= cluster or {}
    copy.write_text(yaml.safe_dump(config))
    more = json.dumps({"typed_dns_resolver_config": _name_server_of_envoy(name_server_port)})
    options = ("--config-yaml", more, "--concurrency", "1", "--disable-hot-restart", "--log-level", "error")
    with _running([binary, "--config-path", str(copy), *options]):
        yield f"127.0.0.1:{port}"


@contextmanager
def running_haproxy(
    replica_port: int, name_server_port: int, variables: Mapping[str, str] | None = None
) -> Iterator[str]:
    """Yields the address where it listens, perhaps in a moment.  `variables`: further ones, as its file has them."""
    address = f"127.0.0.1:{free_port()}"
    own = {"BIND": address, "PORT": str(replica_port), "DNS": f"127.0.0.1:{name_server_port}", "DOMAIN": DOMAIN}
    environment = {**ENVIRONMENT, **{f"TINYLOOP_{key}": value for key, value in own.items()}, **(variables or {})}
    binary = _binary("haproxy", Path("/usr/sbin/haproxy"))
    with _running([binary, "-db", "-q", "-f", str(HAPROXY)], environment):
        yield address


def _with_ports(config: Any, port: int, replica_port: int) -> Any:
    [listener], [cluster] = config["static_resources"]["listeners"], config["static_resources"]["clusters"]
    listener["address"]["socket_address"] = {"address": "127.0.0.1", "port_value": port}
    [endpoints] = cluster["load_assignment"]["endpoints"]
    for each in endpoints["lb_endpoints"]:
        each["endpoint"]["address"]["socket_address"]["port_value"] = replica_port
    return config


def _name_server_of_envoy(port: int) -> Any:
    kind = "envoy.extensions.network.dns_resolver.cares.v3.CaresDnsResolverConfig"
    resolver = {"socket_address": {"address": "127.0.0.1", "port_value": port}}
    config = {"@type": f"type.googleapis.com/{kind}", "resolvers": [resolver]}
    return {"name": "envoy.network.dns_resolver.cares", "typed_config": config}


def _binary(name: str, place: Path) -> str:
    """Skips the test that asks where there is none; fails it in CI."""
    found = str(place) if place.exists() else shutil.which(name)
    if found is None:
        assert os.environ.get("CI", "").lower() not in ("1", "true"), f"{name} is missing; run `make ops-tools`"
        pytest.skip(f"{name} is missing; `make ops-tools` installs it")
    return found


@contextmanager
def _running(command: Sequence[str], environment: Mapping[str, str] | None = None) -> Iterator[None]:
    process = subprocess.Popen(command, env=environment)
    try:
        yield
        assert process.poll() is None, f"{command[0]} ended by itself, with status {process.returncode}"
    finally:
        process.kill()
        process.wait()
