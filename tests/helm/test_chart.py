"""The chart renders what it should, refuses what cannot work, and says what it has."""

from __future__ import annotations

import difflib
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from chart import CHART, GOLDEN, KEPT, ROOT, VALUES, documents, helm, rendered, shortened, template

SCHEMA = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
DEFAULTS = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", VALUES)
def test_helm_finds_nothing_to_say(name: str) -> None:
    done = helm("lint", "--strict", CHART, "--values", VALUES[name], "--kube-version", "1.37")
    assert done.returncode == 0, done.stdout + done.stderr
    said = re.findall(r"\[(?:INFO|WARNING|ERROR)\] .*", done.stdout)
    assert said in ([], ["[INFO] Chart.yaml: icon is recommended"])


@pytest.mark.parametrize("name", KEPT)
def test_golden_files_are_current(name: str) -> None:
    done = template("--values", VALUES[name])
    assert done.returncode == 0, done.stderr
    kept, new = (GOLDEN / f"{name}.yaml").read_text(encoding="utf-8"), shortened(done.stdout)
    if list(documents(kept)) != list(documents(new)):
        pytest.fail(
            "make chart, if this is meant:\n" + "\n".join(difflib.unified_diff(kept.split("\n"), new.split("\n")))
        )


def test_the_readme_has_every_value() -> None:
    done = subprocess.run([sys.executable, ROOT / "helm" / "readme.py", "--check"], capture_output=True, text=True)
    assert done.returncode == 0, f"make chart writes it again\n{done.stderr}"


def test_chart_and_package_have_one_version() -> None:
    package = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    assert chart["appVersion"] == package


IMPOSSIBLE = {  # what is set → what helm says, with the way out
    "replicaCount=3": "set registry.kind=redis",
    "autoscaling.enabled=true": "4 replicas given with registry.kind=memory",
    "replicaCount=2,registry.kind=sqlite,persistence.enabled=true": "replicas know one another's names by Redis only",
    "registry.kind=redis": "set registry.redis.url",
    "registry.redis.url=redis://a,registry.redis.existingSecret=b": "leave one of them empty",
    "registry.kind=sqlite": "set persistence.enabled=true",
    "snapshots.enabled=true": "would end with the pod",
    "tls.enabled=true": "set tls.existingSecret",
    "tls.requireClientCertificate=true": "over TLS only",
    "autoscaling.enabled=true,autoscaling.maxReplicas=1,metrics.enabled=false": "set metrics.enabled=true",
    "autoscaling.enabled=true,autoscaling.maxReplicas=1,autoscaling.minReplicas=2": "is above",
    "autoscaling.enabled=true,autoscaling.maxReplicas=1,autoscaling.kind=keda": "set autoscaling.prometheusAddress",
    "metrics.enabled=false,metrics.serviceMonitor.enabled=true": "set metrics.enabled=true",
    "model.existingClaim=a,model.image=b,model.path=c": "from one place",
    "model.existingClaim=a": "model.path is empty",
    "terminationGracePeriodSeconds=60": "running requests would be cut off",
    "settings.drain_grace_s=3600,terminationGracePeriodSeconds=900": "give at least that",
}


@pytest.mark.parametrize("given", IMPOSSIBLE)
def test_what_cannot_work_is_refused(given: str) -> None:
    done = template("--set", given)
    assert done.returncode != 0, "it was rendered"
    assert IMPOSSIBLE[given] in done.stderr


def test_a_cluster_that_mounts_no_images_is_told() -> None:
    done = template("--values", VALUES["image-volume"], kubernetes="1.30")
    assert done.returncode != 0
    assert "use model.existingClaim or model.fetch" in done.stderr


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ("replicas=3", "replicas"),
        ("image.name=x", "name"),
        ("settings.kv_memroy=2GiB", "kv_memroy"),
        ("settings.listen=0.0.0.0:1", "listen"),
        ("settings.kv_memory=much", "kv_memory"),
        ("settings.cache_mode=fp8", "cache_mode"),
        ("registry.kind=etcd", "kind"),
        ("prefixes[0].id=a", "oneOf"),
        ("prefixes[0].id=a,prefixes[0].text=b,prefixes[0].pinned=true", "pinned"),
        ("gpu.count=0", "count"),
        ("service.port=80", "port"),
        ("metrics.serviceMonitor.interval=often", "interval"),
    ],
)
def test_unknown_and_senseless_values_are_refused(given: str, named: str) -> None:
    done = template("--set", given)
    assert done.returncode != 0, "it was rendered"
    assert "values don't meet the specifications of the schema" in done.stderr
    assert named in done.stderr


def objects_of(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    if "properties" in schema:
        yield path, schema
        for name, part in schema["properties"].items():
            yield from objects_of(part, f"{path}.{name}".lstrip("."))


@pytest.mark.parametrize(("path", "schema"), list(objects_of(SCHEMA)), ids=lambda value: str(value)[:40])
def test_the_schema_knows_what_values_there_are(path: str, schema: dict[str, Any]) -> None:
    values = DEFAULTS
    for name in filter(None, path.split(".")):
        values = values[name]
    assert schema["additionalProperties"] is False
    further = {"global", "claims"}  # helm's own, and a field of resources that few need
    assert schema["properties"].keys() - further == values.keys()


def values_in_the_docs() -> list[str]:
    blocks = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "deploying.md").read_text(encoding="utf-8"), re.DOTALL)
    return [block for block in blocks if yaml.safe_load(block).keys() <= DEFAULTS.keys()]


@pytest.mark.parametrize("block", values_in_the_docs(), ids=lambda block: block.split("\n")[0])
def test_values_in_the_docs_are_values(block: str, tmp_path: Path) -> None:
    file = tmp_path / "values.yaml"
    file.write_text(block, encoding="utf-8")
    done = template("--values", file)
    assert done.returncode == 0, done.stderr


def test_the_docs_have_values() -> None:
    assert len(values_in_the_docs()) == 2


def test_the_notes_say_how_to_call() -> None:
    done = helm("install", "tinyloop", CHART, "--dry-run=client", "--namespace", "ml")
    assert done.returncode == 0, done.stderr
    _, notes = done.stdout.split("\nNOTES:\n")
    assert "get secret tinyloop-tokens" in notes
    assert "port-forward service/tinyloop 50051" in notes
    assert "WARNING" not in notes


def test_the_notes_warn_of_a_server_that_asks_nobody() -> None:
    done = helm("install", "tinyloop", CHART, "--dry-run=client", "--values", VALUES["open"])
    assert "WARNING: auth.enabled=false" in done.stdout


def test_a_token_is_as_random_as_it_should_be() -> None:
    first, second = (
        next(o["stringData"] for o in documents(template().stdout) if o["kind"] == "Secret") for _ in range(2)
    )
    assert first["token"] != second["token"]
    assert re.fullmatch(r"tl_[A-Za-z0-9]{43}", first["token"])
    assert rendered("production")[0], "a set with a Secret of its own renders"
    assert not [o for o in rendered("production") if o["kind"] == "Secret"]
