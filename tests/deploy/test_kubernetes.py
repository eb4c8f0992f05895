"""The overlays: rendered by kubectl, checked against the schemas of Kubernetes and of the Prometheus operator."""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from integration.programs import program
from kvplugin.config import load_config
from kvplugin.requests.rollout import parse_rollout

K8S = Path(__file__).parent.parent.parent / "deploy" / "k8s"
OVERLAYS = sorted(path.name for path in (K8S / "overlays").iterdir())
VERSIONS = ("1.30", "1.37")
OPERATOR = "monitoring.coreos.com/v1"
OPTION = "--additional-config.kvplugin."


@cache
def rendered(overlay: str) -> list[dict[str, Any]]:
    found = subprocess.run(
        [program("kubectl"), "kustomize", str(K8S / "overlays" / overlay)],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    return list(yaml.safe_load_all(found.stdout))


def one(overlay: str, kind: str, name: str = "") -> dict[str, Any]:
    (found,) = [
        each for each in rendered(overlay) if each["kind"] == kind and each["metadata"]["name"].startswith(name)
    ]
    return found


def container(overlay: str) -> dict[str, Any]:
    (found,) = one(overlay, "Deployment")["spec"]["template"]["spec"]["containers"]
    return dict(found)


@pytest.mark.parametrize("overlay", OVERLAYS)
@pytest.mark.parametrize("version", VERSIONS)
def test_objects_fit_the_schema_of_kubernetes(overlay: str, version: str) -> None:
    objects = [each for each in rendered(overlay) if each["apiVersion"] != OPERATOR]
    assert {"Deployment", "Service", "ConfigMap", "PersistentVolumeClaim"} == {each["kind"] for each in objects}
    for each in objects:
        kubernetes_validate.validate(each, version, strict=True)


def test_the_schema_check_sees_a_mistake() -> None:
    wrong = one(OVERLAYS[0], "Service")
    wrong = {**wrong, "spec": {**wrong["spec"], "selectors": {}}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, VERSIONS[0], strict=True)


@pytest.mark.parametrize("overlay", OVERLAYS)
@pytest.mark.parametrize("kind", ["ServiceMonitor", "PrometheusRule"])
def test_objects_of_the_operator_fit_its_schema(overlay: str, kind: str) -> None:
    from cloudcoil.models.prometheus_operator import v1 as operator  # takes seconds to import

    written = one(overlay, kind)
    understood = getattr(operator, kind).model_validate(written)
    # The models drop what they do not know, so an unknown key would be missing here.
    assert understood.model_dump(mode="json", by_alias=True, exclude_unset=True) == written


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_prometheus_finds_the_server(overlay: str) -> None:
    pod = one(overlay, "Deployment")["spec"]["template"]
    service, monitor = one(overlay, "Service"), one(overlay, "ServiceMonitor")
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    (port,) = service["spec"]["ports"]
    assert monitor["spec"]["endpoints"][0]["port"] == port["name"]
    assert [each["name"] for each in container(overlay)["ports"]] == [port["targetPort"]]
    namespaces = {each["metadata"]["namespace"] for each in rendered(overlay)}
    assert len(namespaces) == 1


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_pod_runs_without_rights_and_says_what_it_needs(overlay: str) -> None:
    pod, here = one(overlay, "Deployment")["spec"]["template"]["spec"], container(overlay)
    assert pod["securityContext"]["runAsNonRoot"]
    assert not here["securityContext"]["allowPrivilegeEscalation"]
    assert here["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert here["resources"]["requests"]["nvidia.com/gpu"] == here["resources"]["limits"]["nvidia.com/gpu"]
    assert {name for name in here if name.endswith("Probe")} == {"startupProbe", "readinessProbe", "livenessProbe"}
    assert {mount["name"] for mount in here["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_settings_are_those_of_the_plugin(overlay: str) -> None:
    settings: dict[str, Any] = {}
    for argument in container(overlay)["args"]:
        if argument.startswith(OPTION):
            key, _, value = argument.removeprefix(OPTION).partition("=")
            section, _, name = key.rpartition(".")
            (settings.setdefault(section, {}) if section else settings)[name] = value
    assert settings
    load_config(settings)


def test_the_rollout_is_mounted_as_a_directory() -> None:
    config = one("ab", "ConfigMap", "kvplugin-rollout")
    parse_rollout(config["data"]["rollout.yaml"], "rollout.yaml")
    (mount,) = [mount for mount in container("ab")["volumeMounts"] if mount["name"] == "rollout"]
    assert "subPath" not in mount  # the kubelet never updates those
    (volume,) = [
        volume
        for volume in one("ab", "Deployment")["spec"]["template"]["spec"]["volumes"]
        if volume["name"] == "rollout"
    ]
    assert volume["configMap"]["name"] == config["metadata"]["name"]
    assert f"{OPTION}rollout={mount['mountPath']}/rollout.yaml" in container("ab")["args"]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_grafana_finds_the_dashboard(overlay: str) -> None:
    config = one(overlay, "ConfigMap", "kvplugin-dashboard")
    assert config["metadata"]["labels"]["grafana_dashboard"] == "1"
    committed = K8S.parent / "grafana" / "dashboards" / "kvplugin.json"
    assert config["data"] == {"kvplugin.json": committed.read_text()}
