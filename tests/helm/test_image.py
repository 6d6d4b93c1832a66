"""The container image: its Dockerfile copies what there is, installs what is locked, and fits the chart."""

from __future__ import annotations

import fnmatch
import re
import runpy
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
import yaml
from chart import CHART, ROOT, find, pod, rendered, server
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

IMAGE = ROOT / "deploy" / "image"
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
EXTRAS = {"cpu": ("redis", "otel"), "cuda13": ("redis", "otel", "cuda13")}  # lock file → extras of the package
LINE = re.compile(r"^([\w.-]+)==([^\s;]+)")
HEALTHCHECK = runpy.run_path(str(IMAGE / "healthcheck.py"), run_name="healthcheck")
SERVICE = HEALTHCHECK["SERVICE"]


def test_hadolint_finds_nothing_to_say() -> None:
    done = subprocess.run(
        [Path(sys.executable).parent / "hadolint", ROOT / "Dockerfile"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr


def copied() -> list[str]:
    """What comes from the checkout, engine by engine."""
    lines = re.findall(r"^COPY (?!--from)(.+) \S+$", DOCKERFILE, re.MULTILINE)
    return [path.replace("${ENGINE}", engine) for line in lines for path in line.split() for engine in EXTRAS]


@pytest.mark.parametrize("path", sorted(set(copied())))
def test_what_is_copied_is_there_and_let_through(path: str) -> None:
    assert (ROOT / path).exists()
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    let_through = [line.removeprefix("!") for line in ignored if line.startswith("!")]
    assert any(path == allowed or path.startswith(f"{allowed}/") for allowed in let_through)


def test_all_else_is_ignored() -> None:
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert "*" in ignored
    assert any(fnmatch.fnmatch("tinyloop_service/rpc/__pycache__", line.replace("**", "*")) for line in ignored[1:])


def pins(name: str) -> dict[str, list[str]]:
    """Versions of a package; several where they depend on the interpreter."""
    found: dict[str, list[str]] = {}
    for line in (IMAGE / f"{name}.lock").read_text(encoding="utf-8").splitlines():
        if pin := LINE.match(line):
            found.setdefault(canonicalize_name(pin[1]), []).append(pin[2])
    return found


def requirements(extras: tuple[str, ...]) -> Iterator[Requirement]:
    project = PROJECT["project"]
    yield from map(Requirement, project["dependencies"])
    for extra in extras:
        yield from map(Requirement, project["optional-dependencies"][extra])


@pytest.mark.parametrize("engine", EXTRAS)
def test_what_is_locked_is_what_the_package_asks_for(engine: str) -> None:
    locked = pins(engine)
    for requirement in requirements(EXTRAS[engine]):
        versions = locked.get(canonicalize_name(requirement.name), [])
        assert versions, f"{requirement} is in no line of {engine}.lock; make locks writes it again"
        for version in versions:
            assert requirement.specifier.contains(version), f"{engine}.lock has {version}, but {requirement}"


def test_what_builds_the_wheel_is_locked() -> None:
    for requirement in map(Requirement, PROJECT["build-system"]["requires"]):
        [version] = pins("build")[requirement.name]
        assert requirement.specifier.contains(version)


@pytest.mark.parametrize("name", [*EXTRAS, "build"])
def test_every_locked_package_has_a_hash(name: str) -> None:
    blocks = re.split(r"\n(?=\S)", (IMAGE / f"{name}.lock").read_text(encoding="utf-8"))
    pinned = [block for block in blocks if LINE.match(block)]
    assert len(pinned) > 4
    assert [block for block in pinned if "--hash=sha256:" not in block] == []


def test_image_and_chart_agree() -> None:
    objects = rendered("defaults")
    [user] = re.findall(r"^USER (\d+):(\d+)$", DOCKERFILE, re.MULTILINE)
    context = pod(objects)["securityContext"]
    assert user == (str(context["runAsUser"]), str(context["runAsGroup"]))
    [exposed] = re.findall(r"^EXPOSE (.+)$", DOCKERFILE, re.MULTILINE)
    assert exposed.split() == [str(port["containerPort"]) for port in server(objects)["ports"]]
    for item in server(objects)["env"]:
        if item["name"] in ("XDG_CACHE_HOME", "CUPY_CACHE_DIR"):
            assert f"{item['name']}={item['value']}" in DOCKERFILE
    [container] = find(rendered("production"), "Pod", "-test")["spec"]["containers"]
    assert f"COPY deploy/image/healthcheck.py {container['command'][1]}" in DOCKERFILE
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    assert values["image"]["tag"] == "", "the tag follows from the chart's version"


@pytest.fixture
def health_service() -> Iterator[tuple[str, health.HealthServicer]]:
    servicer = health.HealthServicer()
    with ThreadPoolExecutor(1) as pool:
        running = grpc.server(pool)
        health_pb2_grpc.add_HealthServicer_to_server(servicer, running)
        port = running.add_insecure_port("127.0.0.1:0")
        running.start()
        yield f"127.0.0.1:{port}", servicer
        running.stop(None).wait()


def test_the_health_check_sees_a_server_become_ready(
    health_service: tuple[str, health.HealthServicer], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, servicer = health_service
    is_ready = HEALTHCHECK["is_ready"]
    assert not is_ready(target), "alive, and not ready"
    servicer.set(SERVICE, health_pb2.HealthCheckResponse.SERVING)
    assert is_ready(target)
    servicer.set(SERVICE, health_pb2.HealthCheckResponse.NOT_SERVING)
    assert not is_ready(target)
    monkeypatch.setenv("TINYLOOP_HEALTH_LISTEN", "0.0.0.0:50099")
    assert HEALTHCHECK["own_target"]() == "localhost:50099"


def test_the_health_check_without_a_server_fails() -> None:
    done = subprocess.run([sys.executable, IMAGE / "healthcheck.py", "127.0.0.1:1"], timeout=60)
    assert done.returncode == 1
