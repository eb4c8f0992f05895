"""Compose: the schema, that what is mounted is there, and that the two copies of the rollout are one."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import compose_spec
import pytest
import yaml

from kvplugin.requests.rollout import parse_rollout

DEPLOY = Path(__file__).parent.parent.parent / "deploy"
COMPOSE = DEPLOY / "compose"
TEXT = (COMPOSE / "compose.yaml").read_text()
SERVICES: dict[str, Any] = yaml.safe_load(TEXT)["services"]


def resolved(text: str) -> str:
    """The file as Compose reads it: variables take their defaults, merge keys are merged, extensions go."""
    filled = re.sub(r"\$\{\w+:(-|\?)([^}]*)\}", lambda found: found[2] if found[1] == "-" else "given", text)
    return json.dumps({key: value for key, value in yaml.safe_load(filled).items() if not key.startswith("x-")})


def test_compose_fits_its_schema() -> None:
    found = compose_spec.PyCompose.from_json(resolved(TEXT))
    assert set(found.services) == {"vllm-gpu", "vllm-cpu", "prometheus", "alertmanager", "grafana"}


def test_the_schema_check_sees_a_mistake() -> None:
    with pytest.raises(ValueError, match="stop_grace"):
        compose_spec.PyCompose.from_json(resolved(TEXT.replace("stop_grace_period", "stop_grace")))


def test_mounted_and_built_files_are_there() -> None:
    mounts = [mount.split(":") for service in SERVICES.values() for mount in service.get("volumes", ())]
    volumes = yaml.safe_load(TEXT)["volumes"]
    for source, target, *_ in mounts:
        assert source in volumes or (COMPOSE / source).exists() or source == "../../models", source
        assert target.startswith("/")
    for name in ("vllm-gpu", "vllm-cpu"):
        build = SERVICES[name]["build"]
        assert (COMPOSE / build["context"] / build["dockerfile"]).exists()


def test_one_server_at_a_time_is_the_one_that_prometheus_asks() -> None:
    config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    (job,) = config["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["vllm:8000"]}]
    (manager,) = config["alerting"]["alertmanagers"]
    assert manager["static_configs"] == [{"targets": ["alertmanager:9093"]}]
    servers = [SERVICES["vllm-gpu"], SERVICES["vllm-cpu"]]
    assert [server["profiles"] for server in servers] == [["gpu"], ["cpu"]]
    assert all(server["networks"]["default"]["aliases"] == ["vllm"] for server in servers)


def test_every_variable_is_explained() -> None:
    used = set(re.findall(r"\$\{(\w+)", TEXT))
    explained = set(re.findall(r"^(\w+)=", (COMPOSE / "env.example").read_text(), re.MULTILINE))
    assert used == explained


def test_defaults_are_those_of_the_example() -> None:
    example = dict(re.findall(r"^(\w+)=(.+)$", (COMPOSE / "env.example").read_text(), re.MULTILINE))
    assert dict(re.findall(r"\$\{(\w+):-([^}]+)\}", TEXT)) == example


def test_ports_are_published_on_this_machine_only() -> None:
    ports = [port for service in SERVICES.values() for port in service.get("ports", ())]
    assert len(ports) == 5
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_the_rollouts_are_the_same_and_good() -> None:
    rollout = (COMPOSE / "rollout" / "rollout.yaml").read_text()
    assert (DEPLOY / "k8s" / "overlays" / "ab" / "rollout.yaml").read_text() == rollout
    assert parse_rollout(rollout, "rollout.yaml").share("candidate") == 0.05


def test_grafana_is_provisioned_from_what_is_mounted() -> None:
    providers = yaml.safe_load((DEPLOY / "grafana" / "provisioning" / "dashboards" / "kvplugin.yml").read_text())
    (provider,) = providers["providers"]
    assert f"../grafana/dashboards:{provider['options']['path']}:ro" in SERVICES["grafana"]["volumes"]
    sources = yaml.safe_load((DEPLOY / "grafana" / "provisioning" / "datasources" / "prometheus.yml").read_text())
    assert [source["url"] for source in sources["datasources"]] == ["http://prometheus:9090"]
