"""Settings: defaults, the environment, and what is refused."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import get_type_hints

import pytest

from tinyloop_service.errors import InvalidArgument
from tinyloop_service.settings import (
    ClientSettings,
    EngineSettings,
    LogFormat,
    NamesSettings,
    SchedulerSettings,
    ServerSettings,
    Settings,
)
from tinyloop_service.types import CacheMode


def test_an_empty_environment_gives_the_defaults() -> None:
    assert Settings.from_environment({}) == Settings()


def test_every_field_has_a_variable_of_its_own() -> None:
    groups = [*get_type_hints(Settings).values(), ClientSettings]
    names = [f.name for group in groups for f in fields(group)]
    assert len(names) == len(set(names)), "two groups share a field name, so a variable would set both"


def test_variables_are_read_by_the_type_of_their_field() -> None:
    settings = Settings.from_environment(
        {
            "TINYLOOP_KV_MEMORY": "1.5GiB",
            "TINYLOOP_THREADS": "3",
            "TINYLOOP_CACHE_MODE": "h-int8",
            "TINYLOOP_MAX_QUEUE": "7",
            "TINYLOOP_PIN_FRACTION": "0.25",
            "TINYLOOP_REFLECTION": "yes",
            "TINYLOOP_LOG_FORMAT": "json",
            "TINYLOOP_HEALTH_LISTEN": "none",
            "TINYLOOP_LISTEN": "[::1]:0",
            "TINYLOOP_PORT": "tcp://10.0.0.1:50051",  # what Kubernetes adds is left alone
            "TINYLOOP_DRAIN_GRACE_S": "",
        }
    )
    assert settings.engine == EngineSettings(kv_memory=3 * 2**29, threads=3, cache_mode=CacheMode.H_INT8)
    assert settings.scheduler == SchedulerSettings(max_queue=7, pin_fraction=0.25)
    assert settings.server == ServerSettings(
        reflection=True, log_format=LogFormat.JSON, health_listen=None, listen="[::1]:0"
    )


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("TINYLOOP_THREADS", "two"),
        ("TINYLOOP_KV_MEMORY", "2 potatoes"),
        ("TINYLOOP_KV_MEMORY", "GiB"),
        ("TINYLOOP_KV_MEMORY", "infGiB"),
        ("TINYLOOP_REFLECTION", "maybe"),
        ("TINYLOOP_CACHE_MODE", "fp8"),
        ("TINYLOOP_LOG_LEVEL", "loud"),
    ],
)
def test_a_variable_that_cannot_be_read_is_named(variable: str, value: str) -> None:
    with pytest.raises(InvalidArgument, match=variable):
        Settings.from_environment({variable: value})


@pytest.mark.parametrize(
    "address", ["127.0.0.1:0", "127.8.9.1:5", "localhost:50051", "[::1]:50051", "unix:/run/t.sock"]
)
def test_loopback_is_open_to_all(address: str) -> None:
    ServerSettings(listen=address, health_listen=address)


@pytest.mark.parametrize("address", ["0.0.0.0:50051", "[::]:50051", "10.1.2.3:1", "example.com:443"])
@pytest.mark.parametrize("field", ["listen", "health_listen"])
def test_other_addresses_need_the_flag(address: str, field: str) -> None:
    with pytest.raises(InvalidArgument, match="insecure_any_address") as caught:
        ServerSettings(**{field: address})
    assert caught.value.field == field
    ServerSettings(**{field: address}, insecure_any_address=True)
    ServerSettings(**{field: address}, tokens_file="tokens.toml")
    ServerSettings(**{field: address}, tls_cert="c", tls_key="k", tls_client_ca="a")
    with pytest.raises(InvalidArgument, match="tokens_file"):  # encrypted, and yet everybody may call
        ServerSettings(**{field: address}, tls_cert="c", tls_key="k")


@pytest.mark.parametrize("address", ["", "50051", ":50051", "127.0.0.1:", "127.0.0.1:x", "127.0.0.1:65536"])
def test_a_malformed_address_is_refused_even_with_the_flag(address: str) -> None:
    with pytest.raises(InvalidArgument, match="HOST:PORT"):
        ServerSettings(listen=address, insecure_any_address=True)


@pytest.mark.parametrize(
    "bad",
    [
        lambda: EngineSettings(engine="abacus"),
        lambda: SchedulerSettings(max_prefixes=0),
        lambda: SchedulerSettings(prefill_share=0.0),
        lambda: SchedulerSettings(prefill_share=1.0),
        lambda: SchedulerSettings(max_prefixes=2049),
        lambda: EngineSettings(kv_memory=0),
        lambda: EngineSettings(threads=0),
        lambda: EngineSettings(threads=2**31),
        lambda: EngineSettings(accuracy_level=2),
        lambda: ServerSettings(drain_grace_s=-1),
        lambda: ServerSettings(tls_cert="c"),
        lambda: ServerSettings(tls_key="k"),
        lambda: ServerSettings(tls_client_ca="a"),
        lambda: ServerSettings(max_connection_age_s=0),
        lambda: ServerSettings(max_connection_age_s=2147484),
        lambda: ServerSettings(max_connection_age_s=math.inf),
        lambda: ServerSettings(max_request_bytes=10),
        lambda: ServerSettings(max_request_bytes=2**31),
        lambda: ServerSettings(listen="127.0.0.1:²"),
        lambda: ServerSettings(listen="127.0.0.1:" + "0" * 5001),
        lambda: ServerSettings(metrics_listen="unix:/run/metrics.sock"),
        lambda: ServerSettings(otlp_endpoint="localhost:4317"),
        lambda: ServerSettings(trace_share=1.5),
        lambda: ServerSettings(slow_request_s=0),
    ],
)
def test_values_that_make_no_sense_are_refused(bad: object) -> None:
    with pytest.raises(InvalidArgument):
        bad()  # type: ignore[operator]


@pytest.mark.parametrize(
    ("switches", "mode"),
    [
        ("KV_INT8", CacheMode.INT8),
        ("KV_H_MODE", CacheMode.H_FP16),
        ("KV_H_MODE KV_INT8", CacheMode.H_INT8),
        ("KV_H_MODE KV_INT4", CacheMode.H_INT4),
        ("", CacheMode.FP16),
    ],
)
def test_switches_of_the_cache_mode(switches: str, mode: CacheMode) -> None:
    off = {f"TINYLOOP_{name}": "0" for name in ("KV_INT8", "KV_H_MODE", "KV_INT4")}
    on = {f"TINYLOOP_{name}": "1" for name in switches.split()}
    assert Settings.from_environment(on).engine.cache_mode is mode
    assert Settings.from_environment(off | on).engine.cache_mode is mode
    assert Settings.from_environment(on | {"TINYLOOP_CACHE_MODE": mode.value}).engine.cache_mode is mode


@pytest.mark.parametrize(
    ("environment", "named"),
    [
        ("KV_INT4=1", ["KV_INT4", "KV_H_MODE"]),
        ("KV_INT4=1 KV_H_MODE=0", ["KV_INT4", "KV_H_MODE"]),
        ("KV_INT4=1 KV_INT8=1", ["KV_INT4", "KV_INT8"]),
        ("KV_H_MODE=1 KV_INT4=1 KV_INT8=1", ["KV_INT4", "KV_INT8"]),
        ("KV_INT8=1 CACHE_MODE=fp16", ["KV_INT8", "CACHE_MODE"]),
        ("KV_H_MODE=1 KV_INT4=1 CACHE_MODE=h-int8", ["KV_H_MODE and TINYLOOP_KV_INT4", "CACHE_MODE", "h-int4"]),
        ("KV_INT8=perhaps", ["KV_INT8"]),
    ],
)
def test_contradictions_about_the_cache_mode_are_refused(environment: str, named: list[str]) -> None:
    given = dict(f"TINYLOOP_{pair}".split("=") for pair in environment.split())
    with pytest.raises(InvalidArgument) as caught:
        Settings.from_environment(given)
    assert all(name in str(caught.value) for name in named), str(caught.value)


def test_a_client_is_read_from_its_own_variables_and_keeps_its_token_to_itself() -> None:
    settings = ClientSettings.from_environment({"TINYLOOP_TOKEN": " tl_1\n", "TINYLOOP_TLS": "yes"})
    assert settings == ClientSettings(token="tl_1", tls=True)
    assert "tl_1" not in repr(settings)
    for given in ({"token": "t", "token_file": "f"}, {"client_cert": "c"}, {"client_key": "k"}):
        with pytest.raises(InvalidArgument):
            ClientSettings(**given)


@pytest.mark.parametrize("url", ["memory", "sqlite:////var/names.db", "redis://h:1/0", "rediss://:secret@h"])
def test_a_registry_is_one_of_three(url: str) -> None:
    settings = NamesSettings(registry=url)
    assert settings.registry == url
    assert "secret" not in repr(settings)


def test_a_file_of_names_has_an_absolute_path() -> None:
    with pytest.raises(InvalidArgument, match=r"'var/names\.db' given, .*sqlite:////DIR/FILE") as caught:
        NamesSettings(registry="sqlite:///var/names.db")
    assert caught.value.field == "registry"


@pytest.mark.parametrize("url", ["", "disk", "sqlite:///", "sqlite://names.db", "mysql://:secret@h", "redis:h"])
def test_another_registry_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(InvalidArgument, match="sqlite:////DIR/FILE") as caught:
        NamesSettings(registry=url)
    assert caught.value.field == "registry" and "secret" not in str(caught.value)
