"""Values and the server's settings are one to one, and the server reads what the chart writes."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import yaml
from chart import CHART, VALUES, environment, find, rendered, server

from tinyloop_service.registry.prefix_file import read_prefixes
from tinyloop_service.settings import EngineKind, LogFormat, Settings

GROUPS = get_type_hints(Settings)
FIELDS = {f.name: f for group in fields(Settings) for f in fields(GROUPS[group.name])}
VALUES_YAML = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
SETTINGS = VALUES_YAML["settings"]
DERIVED = {  # field → the values that it follows from
    "engine": "gpu.enabled",
    "listen": "listenHost, service.port",
    "health_listen": "listenHost, service.healthPort",
    "metrics_listen": "metrics",
    "model": "model",
    "tokens_file": "auth",
    "insecure_any_address": "auth.enabled",
    "tls_cert": "tls",
    "tls_key": "tls",
    "tls_client_ca": "tls.requireClientCertificate",
    "replica": "the pod's name",
    "registry": "registry",
    "prefixes": "prefixes",
    "snapshot_dir": "snapshots",
}
CHOSEN = {  # where the chart's default is not the server's
    "drain_pause_s": "proxies that watch the health service need some seconds",
    "drain_grace_s": "as long as a generation may take",
    "max_connection_age_s": "clients have to see replicas that come",
    "log_format": "machines read a pod's log",
    "snapshot_bytes": "a pod's volume has 10 GiB",
}


def test_every_setting_is_a_value() -> None:
    assert SETTINGS.keys() | DERIVED.keys() == FIELDS.keys()
    assert not SETTINGS.keys() & DERIVED.keys()


@pytest.mark.parametrize("name", SETTINGS)
def test_a_default_is_the_server_s_or_a_choice(name: str) -> None:
    given, own = SETTINGS[name], FIELDS[name].default
    read = flat(Settings.from_environment({f"TINYLOOP_{name.upper()}": "" if given is None else str(given)}))[name]
    assert (read != own) == (name in CHOSEN), f"{name}: the chart has {read!r}, the server {own!r}"


def flat(settings: Any) -> dict[str, object]:
    groups = [getattr(settings, f.name) for f in fields(settings)]
    assert all(is_dataclass(group) for group in groups)
    return {f.name: getattr(group, f.name) for group in groups for f in fields(group)}


def read(name: str) -> dict[str, object]:
    """All settings of a server that is started with these values."""
    variables = environment(rendered(name))
    if "secretKeyRef" in variables.get("TINYLOOP_REGISTRY", ""):
        variables["TINYLOOP_REGISTRY"] = "redis://from-a-secret:6379/0"
    return flat(Settings.from_environment(variables))


@pytest.mark.parametrize("name", VALUES)
def test_the_server_reads_what_the_chart_writes(name: str) -> None:
    variables = {variable for variable in environment(rendered(name)) if variable.startswith("TINYLOOP_")}
    assert variables <= {f"TINYLOOP_{field.upper()}" for field in FIELDS}
    settings = read(name)
    ports = {port["name"]: port["containerPort"] for port in server(rendered(name))["ports"]}
    for field, port in (("listen", "grpc"), ("health_listen", "health"), ("metrics_listen", "metrics")):
        listens_at = str(settings[field]).rpartition(":")[2]
        assert listens_at == str(ports.get(port)), field
    assert settings["log_format"] is LogFormat.JSON


def test_every_derived_setting_is_written_somewhere() -> None:
    written = {variable for name in VALUES for variable in environment(rendered(name))}
    assert {f"TINYLOOP_{field.upper()}" for field in DERIVED} <= written


def test_values_reach_their_settings() -> None:
    assert read("gpu")["engine"] == EngineKind.CUDA
    assert read("gpu")["model"] == "/models/407m.tinyloop"
    assert read("defaults")["model"] is None
    assert read("image-volume")["model"] == "/models/models/407m.tinyloop"
    assert read("durable")["kv_memory"] == 2 * 2**30
    assert str(read("durable")["cache_mode"]) == "h-int8"
    assert read("durable")["registry"] == "sqlite:////var/lib/tinyloop/names.db"
    assert read("durable")["snapshot_dir"] == "/var/lib/tinyloop/snapshots"
    assert read("autoscaled-hpa")["registry"] == "redis://redis.data:6380/0"
    assert read("production")["trace_share"] == 0.05
    assert read("production")["prefixes"] == "/etc/tinyloop/prefixes/prefixes.json"


def test_numbers_are_written_as_such() -> None:
    settings = read("everything")
    assert settings["stream_interval_ns"] == 25_000_000, "not 2.5e+07"
    assert settings["max_request_bytes"] == 4 * 2**20


def test_null_leaves_the_default_and_none_is_none() -> None:
    settings = read("open")
    assert settings["slow_request_s"] is None
    assert settings["max_connection_age_s"] is None
    assert settings["reflection"] is True


@pytest.mark.parametrize(
    ("name", "tokens", "insecure"),
    [("defaults", "/etc/tinyloop/tokens/tokens.toml", False), ("open", None, True), ("everything", None, False)],
)
def test_strangers_are_let_in_only_where_that_is_said(name: str, tokens: str | None, insecure: bool) -> None:
    settings = read(name)
    assert (settings["tokens_file"], settings["insecure_any_address"]) == (tokens, insecure)


def test_enumerations_of_the_schema_are_the_server_s() -> None:
    schema = yaml.safe_load((CHART / "values.schema.json").read_text(encoding="utf-8"))
    stated = schema["properties"]["settings"]["properties"]
    for name in SETTINGS:
        kind = next((hints[name] for hints in map(get_type_hints, GROUPS.values()) if name in hints), None)
        if isinstance(kind, type) and issubclass(kind, StrEnum):
            assert set(stated[name]["enum"]) == set(kind), name


def test_the_server_reads_the_prefixes(tmp_path: Path) -> None:
    given = yaml.safe_load(VALUES["production"].read_text(encoding="utf-8"))["prefixes"]
    file = tmp_path / Path(str(read("production")["prefixes"])).name
    file.write_text(find(rendered("production"), "ConfigMap", "-prefixes")["data"][file.name], encoding="utf-8")
    for prefix, entry in zip(read_prefixes(file), given, strict=True):
        assert (prefix.id, prefix.tenant, prefix.parent) == (entry["id"], entry["tenant"], entry.get("parent"))
        assert prefix.content == entry.get("text", tuple(entry.get("tokens", ())))
        assert prefix.cache_window == entry.get("cache_window")
