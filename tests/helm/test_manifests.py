"""What the chart makes is what Kubernetes knows, and fits together: ports, probes, volumes, secrets, selectors."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from chart import NAMESPACE, ROOT, VALUES, Document, find, pod, rendered, server, template

from tinyloop_service.observe import exposition
from tinyloop_service.rpc.tokens import parse_tokens

OLDEST, NEWEST = 28, int(kubernetes_validate.latest_version().split(".")[1])
FOREIGN = {"ServiceMonitor", "PrometheusRule", "ScaledObject"}  # whose schemas are not Kubernetes' own
READY = "tinyloop.v1.GenerationService"


def one_of_each_kind() -> list[Document]:
    """From whichever set has it; the fullest of the sets counts last."""
    sets = [*(VALUES.keys() - {"image-volume"}), "everything", "production"]
    kinds = {o["kind"]: o for name in sets for o in rendered(name) if o["kind"] not in FOREIGN}
    return list(kinds.values())


def every_workload() -> list[Document]:
    return [find(rendered(name), "StatefulSet") for name in VALUES.keys() - {"image-volume"}]


def test_there_are_versions_to_check_against() -> None:
    assert NEWEST >= 37, "an older kubernetes-validate than this test was written with"


@pytest.mark.parametrize("minor", range(OLDEST, NEWEST + 1))
def test_kubernetes_accepts_it(minor: int) -> None:
    for manifest in one_of_each_kind() + (every_workload() if minor in (OLDEST, NEWEST) else []):
        kubernetes_validate.validate(manifest, f"1.{minor}", strict=True)


def test_newer_versions_accept_a_model_in_an_image() -> None:
    for minor in (31, NEWEST):
        kubernetes_validate.validate(find(rendered("image-volume"), "StatefulSet"), f"1.{minor}", strict=True)


@pytest.mark.parametrize("name", VALUES)
def test_ports_fit_together(name: str) -> None:
    objects = rendered(name)
    ports = {port["name"]: port["containerPort"] for port in server(objects)["ports"]}
    for service in (o for o in objects if o["kind"] == "Service"):
        for port in service["spec"]["ports"]:
            assert ports[port["targetPort"]] == port["port"], "a Service's port is the server's"
            assert port["appProtocol"]
    headless = find(objects, "Service", "-headless")
    assert headless["spec"]["clusterIP"] == "None"
    assert find(objects, "StatefulSet")["spec"]["serviceName"] == headless["metadata"]["name"]
    assert {port["name"] for port in headless["spec"]["ports"]} == ports.keys()


@pytest.mark.parametrize("name", VALUES)
def test_probes_ask_the_health_port(name: str) -> None:
    container = server(rendered(name))
    [health] = [port["containerPort"] for port in container["ports"] if port["name"] == "health"]
    for probe, service in (("startupProbe", READY), ("readinessProbe", READY), ("livenessProbe", "")):
        assert container[probe]["grpc"].get("service", "") == service
        assert container[probe]["grpc"]["port"] == health


def test_startup_has_the_time_it_is_given() -> None:
    probe = server(rendered("everything"))["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] == 65, "61 seconds, in whole periods"


@pytest.mark.parametrize("name", VALUES)
def test_selectors_select_the_replicas_alone(name: str) -> None:
    objects = rendered(name)
    labels = find(objects, "StatefulSet")["spec"]["template"]["metadata"]["labels"]
    tested = find(objects, "Pod", "-test")["metadata"]["labels"]
    selectors = [find(objects, "StatefulSet")["spec"]["selector"]["matchLabels"]]
    selectors += [o["spec"]["selector"] for o in objects if o["kind"] == "Service"]
    selectors += [o["spec"]["selector"]["matchLabels"] for o in objects if o["kind"] == "PodDisruptionBudget"]
    selectors += [o["spec"]["podSelector"]["matchLabels"] for o in objects if o["kind"] == "NetworkPolicy"]
    for selector in selectors:
        assert selector.items() <= labels.items()
        assert not selector.items() <= tested.items(), "the pod of helm test would serve"


@pytest.mark.parametrize("name", VALUES)
def test_volumes_and_mounts_are_the_same(name: str) -> None:
    spec = pod(rendered(name))
    claims = find(rendered(name), "StatefulSet")["spec"].get("volumeClaimTemplates", [])
    volumes = [v["name"] for v in spec["volumes"]] + [c["metadata"]["name"] for c in claims]
    assert len(volumes) == len(set(volumes))
    mounts = [m for c in (*spec["containers"], *spec.get("initContainers", [])) for m in c["volumeMounts"]]
    assert {m["name"] for m in mounts} == set(volumes)
    for mount in mounts:
        assert "subPath" not in mount, "a mounted subPath does not follow a changed Secret"


@pytest.mark.parametrize("name", VALUES)
def test_pods_may_do_little(name: str) -> None:
    objects = rendered(name)
    for spec in (pod(objects), find(objects, "Pod", "-test")["spec"]):
        assert spec["automountServiceAccountToken"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in (*spec["containers"], *spec.get("initContainers", [])):
            context = container["securityContext"]
            assert context["readOnlyRootFilesystem"] is True
            assert context["allowPrivilegeEscalation"] is False
            assert context["capabilities"] == {"drop": ["ALL"]}
            assert container["resources"]["limits"]["memory"]
    for account in (o for o in objects if o["kind"] == "ServiceAccount"):
        assert account["automountServiceAccountToken"] is False


@pytest.mark.parametrize("name", VALUES)
def test_a_generation_may_end_before_the_pod_does(name: str) -> None:
    objects = rendered(name)
    settings = find(objects, "ConfigMap", "-settings")["data"]
    hook = server(objects).get("lifecycle")
    pause = int(hook["preStop"]["exec"]["command"][1]) if hook else 0
    drain = float(settings["TINYLOOP_DRAIN_PAUSE_S"]) + float(settings["TINYLOOP_DRAIN_GRACE_S"])
    assert pod(objects)["terminationGracePeriodSeconds"] >= pause + drain + 60


def secret_volumes(spec: Document) -> dict[str, Any]:
    return {v["name"]: v["secret"] for v in spec["volumes"] if "secret" in v}


def mount_paths(container: Document) -> dict[str, str]:
    return {m["name"]: m["mountPath"] for m in container["volumeMounts"]}


def test_the_token_that_the_chart_makes_is_known_to_the_server() -> None:
    objects = rendered("defaults")
    secret = find(objects, "Secret")
    tokens = parse_tokens(secret["stringData"]["tokens.toml"].encode())
    caller = tokens.caller(secret["stringData"]["token"])
    assert caller is not None
    assert caller.tenant == "default"
    mounted = secret_volumes(pod(objects))["tokens"]
    assert mounted["secretName"] == secret["metadata"]["name"]
    assert [item["key"] for item in mounted["items"]] == ["tokens.toml"], "the server needs no token, only its hash"


def test_given_secrets_are_mounted() -> None:
    objects = rendered("production")
    volumes, paths = secret_volumes(pod(objects)), mount_paths(server(objects))
    settings = find(objects, "ConfigMap", "-settings")["data"]
    assert volumes["tokens"]["secretName"] == "tinyloop-callers"
    assert volumes["tokens"]["items"] == [{"key": "callers.toml", "path": "tokens.toml"}]
    assert settings["TINYLOOP_TOKENS_FILE"] == paths["tokens"] + "/tokens.toml"
    assert volumes["tls"]["secretName"] == "tinyloop-tls"
    for variable, file in (("TLS_CERT", "tls.crt"), ("TLS_KEY", "tls.key"), ("TLS_CLIENT_CA", "ca.crt")):
        assert settings[f"TINYLOOP_{variable}"] == f"{paths['tls']}/{file}"
    [registry] = [item for item in server(objects)["env"] if item["name"] == "TINYLOOP_REGISTRY"]
    assert registry["valueFrom"] == {"secretKeyRef": {"name": "tinyloop-redis", "key": "url"}}
    assert "TINYLOOP_REGISTRY" not in settings


def test_secrets_are_readable_by_the_server_alone() -> None:
    for volume in secret_volumes(pod(rendered("production"))).values():
        assert volume["defaultMode"] == 0o440
    assert pod(rendered("production"))["securityContext"]["fsGroup"] == 10001


def test_a_gpu_is_asked_for_by_name() -> None:
    assert server(rendered("gpu"))["resources"] == {
        "requests": {"cpu": "4", "memory": "8Gi"},
        "limits": {"memory": "16Gi", "nvidia.com/gpu": 1, "cpu": "2"},
    }
    assert server(rendered("autoscaled-keda"))["resources"]["limits"]["nvidia.com/mig-1g.10gb"] == 1
    assert server(rendered("gpu"))["image"].endswith("-cuda13")
    assert "nvidia.com/gpu" not in str(rendered("defaults"))


def test_kernels_and_state_have_places_to_stay() -> None:
    claims = find(rendered("gpu"), "StatefulSet")["spec"]["volumeClaimTemplates"]
    assert [claim["metadata"]["name"] for claim in claims] == ["cache"]
    paths = mount_paths(server(rendered("gpu")))
    assert paths["cache"] == "/var/cache/tinyloop"
    [claim] = find(rendered("durable"), "StatefulSet")["spec"]["volumeClaimTemplates"]
    assert claim["spec"]["resources"]["requests"]["storage"] == "20Gi"
    assert claim["spec"]["storageClassName"] == "fast"
    assert mount_paths(server(rendered("durable")))["state"] == "/var/lib/tinyloop"


def test_a_fetched_model_is_where_the_server_looks() -> None:
    objects = rendered("durable")
    [fetch] = pod(objects)["initContainers"]
    path = find(objects, "ConfigMap", "-settings")["data"]["TINYLOOP_MODEL"]
    assert path == "/models/demo.tinyloop"
    assert mount_paths(fetch)["model"] == mount_paths(server(objects))["model"] == "/models"
    [mount] = [m for m in server(objects)["volumeMounts"] if m["name"] == "model"]
    assert mount["readOnly"] is True


def test_replicas_are_the_autoscaler_s_where_there_is_one() -> None:
    assert find(rendered("production"), "StatefulSet")["spec"]["replicas"] == 3
    for name, kind in (("autoscaled-hpa", "HorizontalPodAutoscaler"), ("autoscaled-keda", "ScaledObject")):
        objects = rendered(name)
        workload = find(objects, "StatefulSet")
        assert "replicas" not in workload["spec"]
        target = find(objects, kind)["spec"]["scaleTargetRef"]
        assert (target["kind"], target["name"]) == ("StatefulSet", workload["metadata"]["name"])


def test_autoscalers_ask_for_a_metric_that_there_is() -> None:
    [metric] = find(rendered("autoscaled-hpa"), "HorizontalPodAutoscaler")["spec"]["metrics"]
    [trigger] = find(rendered("autoscaled-keda"), "ScaledObject")["spec"]["triggers"]
    known = re.findall(r'"(tinyloop_\w+)"', Path(exposition.__file__).read_text(encoding="utf-8"))
    assert metric["pods"]["metric"]["name"] in known
    assert re.findall(r"tinyloop_\w+", trigger["metadata"]["query"])[0] in known


def test_prometheus_reads_every_replica_once() -> None:
    objects = rendered("production")
    monitor = find(objects, "ServiceMonitor")
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    assert monitor["spec"]["namespaceSelector"] == {"matchNames": [NAMESPACE]}
    [endpoint] = monitor["spec"]["endpoints"]
    selector = monitor["spec"]["selector"]["matchLabels"].items()
    offering = [
        o["metadata"]["name"]
        for o in objects
        if o["kind"] == "Service"
        and selector <= o["metadata"]["labels"].items()
        and endpoint["port"] in {port["name"] for port in o["spec"]["ports"]}
    ]
    assert offering == ["tinyloop-headless"]


def test_dashboard_and_rules_are_those_of_the_project() -> None:
    objects = rendered("production")
    dashboard = find(objects, "ConfigMap", "-dashboard")
    assert dashboard["metadata"]["labels"]["grafana_dashboard"] == "1"
    own = (ROOT / "deploy" / "grafana" / "dashboard.json").read_text(encoding="utf-8")
    assert json.loads(dashboard["data"]["tinyloop.json"]) == json.loads(own)
    rules = yaml.safe_load((ROOT / "deploy" / "prometheus" / "rules.yaml").read_text(encoding="utf-8"))
    assert find(objects, "PrometheusRule")["spec"] == rules


def egress_ports(objects: tuple[Document, ...]) -> set[int]:
    rules = find(objects, "NetworkPolicy")["spec"]["egress"]
    return {port["port"] for rule in rules for port in rule["ports"]}


def test_the_network_lets_through_what_is_needed() -> None:
    assert egress_ports(rendered("defaults")) == {53}
    assert egress_ports(rendered("durable")) == {53, 80, 443}
    assert egress_ports(rendered("production")) == {53, 6379, 4317}
    assert egress_ports(rendered("autoscaled-hpa")) == {53, 6380}
    assert egress_ports(rendered("autoscaled-keda")) == {53, 6379}
    ingress = find(rendered("production"), "NetworkPolicy")["spec"]["ingress"]
    assert {rule["ports"][0]["port"]: "from" in rule for rule in ingress} == {
        "grpc": True,
        "health": False,
        "metrics": True,
    }


@pytest.mark.parametrize(
    ("name", "calls", "token"),
    [
        ("defaults", True, "tinyloop-tokens"),
        ("durable", True, "tinyloop-tokens"),
        ("production", False, None),  # it has neither a token nor a certificate
        ("open", True, None),
    ],
)
def test_helm_test_calls_where_it_can(name: str, calls: bool, token: str | None) -> None:
    [container] = find(rendered(name), "Pod", "-test")["spec"]["containers"]
    assert ("generate" in container.get("args", [])) is calls
    given = {item["name"]: item.get("valueFrom", {}) for item in container.get("env", [])}
    assert given.get("TINYLOOP_TOKEN", {}).get("secretKeyRef", {}).get("name") == token
    if not calls:
        assert container["command"][-1] == f"tinyloop-headless.{NAMESPACE}.svc:50052"


def test_names_stay_within_what_dns_allows() -> None:
    done = template("--set", f"fullnameOverride={'n' * 60}")
    assert done.returncode == 0, done.stderr
    assert all(len(name) <= 52 for name in re.findall(r"^  name: (\S+)", done.stdout, re.MULTILINE))


def test_a_release_called_like_the_chart_is_not_called_so_twice() -> None:
    assert find(rendered("defaults"), "StatefulSet")["metadata"]["name"] == "tinyloop"
