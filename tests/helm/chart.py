"""The chart as helm renders it, and what tests ask of the result.

`chart.py` writes golden/ again: what the chart makes of the value sets that are kept to be looked at.  Left out there:
the token, which is made at random, and the dashboard, two thousand lines that stand in a file of their own.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "helm" / "tinyloop"
HELM = ROOT / "build" / "ops" / "helm"
GOLDEN = Path(__file__).parent / "golden"
VALUES = {path.stem: path for path in sorted((Path(__file__).parent / "values").glob("*.yaml"))}
KEPT = ("defaults", "durable", "gpu", "production")  # in golden/
KUBERNETES = "1.37"  # of which a cluster is where a set says nothing else
NAMESPACE = "ml"

Document = dict[str, Any]


def need_helm() -> None:
    """Skip where helm is not, and fail in CI."""
    if not HELM.exists():
        reason = f"{HELM.relative_to(ROOT)} is missing; make ops-tools fetches it"
        pytest.fail(reason) if os.environ.get("CI") else pytest.skip(reason)


def helm(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    need_helm()
    return subprocess.run([HELM, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60)


def template(*arguments: str | Path, kubernetes: str = KUBERNETES) -> subprocess.CompletedProcess[str]:
    """helm template with further arguments, such as --set."""
    return helm("template", "tinyloop", CHART, "--namespace", NAMESPACE, "--kube-version", kubernetes, *arguments)


@functools.cache
def rendered(name: str, *sets: str) -> tuple[Document, ...]:
    """The objects that the chart makes of a set of values, changed by some NAME=VALUE."""
    changes = [argument for change in sets for argument in ("--set", change)]
    done = template("--values", VALUES[name], *changes)
    assert done.returncode == 0, f"{name}: {done.stderr}"
    return tuple(documents(done.stdout))


def documents(text: str) -> Iterator[Document]:
    return (document for document in yaml.safe_load_all(text) if document)


def find(objects: tuple[Document, ...], kind: str, suffix: str = "") -> Document:
    """The only object of a kind whose name ends so."""
    found = [o for o in objects if o["kind"] == kind and o["metadata"]["name"].endswith(suffix)]
    assert len(found) == 1, f"{len(found)} objects {kind} …{suffix}"
    return found[0]


def pod(objects: tuple[Document, ...]) -> Document:
    return find(objects, "StatefulSet")["spec"]["template"]["spec"]  # type: ignore[no-any-return]


def server(objects: tuple[Document, ...]) -> Document:
    [container] = pod(objects)["containers"]
    return container  # type: ignore[no-any-return]


def environment(objects: tuple[Document, ...]) -> dict[str, str]:
    """What the server is started with; what only a cluster knows stands as its source."""
    [source] = server(objects)["envFrom"]
    variables = dict(find(objects, "ConfigMap", source["configMapRef"]["name"])["data"])
    return variables | {item["name"]: item.get("value", str(item.get("valueFrom"))) for item in server(objects)["env"]}


def shortened(text: str) -> str:
    """As in golden/: other text where the token, its hash and the dashboard were."""
    dashboard = textwrap.indent((CHART / "files" / "dashboard.json").read_text(encoding="utf-8"), "    ")
    text = text.replace(dashboard.rstrip(), "    files/dashboard.json")
    text = re.sub(r"tl_[A-Za-z0-9]{43}", "tl_" + "0" * 43, text)
    return re.sub(r'sha256 = "[0-9a-f]{64}"', f'sha256 = "{"0" * 64}"', text)


def write_golden() -> None:
    GOLDEN.mkdir(exist_ok=True)
    for name in KEPT:
        done = template("--values", VALUES[name])
        assert done.returncode == 0, done.stderr
        (GOLDEN / f"{name}.yaml").write_text(shortened(done.stdout), encoding="utf-8")


if __name__ == "__main__":
    write_golden()
