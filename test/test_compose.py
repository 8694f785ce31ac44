"""deploy/compose.yaml: every path, flag, port and volume that it names exists. No daemon runs here: it is read."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightserve.config import LaunchConfig, ServerConfig
from lightserve.config.parse import parse_server
from test.httpserver.app_client import served

DEPLOY = Path(__file__).parent.parent / "deploy"
COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]


def config() -> ServerConfig:
    """What the server would get; an unknown flag ends the test."""
    return parse_server([re.sub(r"\$\{\w+:-(.*)\}", r"\1", word) for word in SERVICES["lightserve"]["command"]])


def mounts(service: str) -> list[tuple[str, str]]:
    """What is mounted, and where."""
    return [tuple(text.split(":")[:2]) for text in SERVICES[service].get("volumes", ())]


def test_there_are_the_server_its_monitoring_and_a_chat() -> None:
    assert set(SERVICES) == {"lightserve", "prometheus", "grafana", "open-webui"}


@pytest.mark.parametrize("service", SERVICES)
def test_mounted_files_and_volumes_exist(service: str) -> None:
    for source, target in mounts(service):
        assert target.startswith("/")
        assert (DEPLOY / source).is_file() if source.startswith(".") else source in COMPOSE["volumes"]
    assert {source for one in SERVICES for source, _ in mounts(one) if source[0] != "."} == set(COMPOSE["volumes"])


@pytest.mark.parametrize("service", SERVICES)
def test_images_have_full_versions_and_ports_are_of_this_machine(service: str) -> None:
    for port in SERVICES[service]["ports"]:
        assert port.startswith("127.0.0.1:")
    version = SERVICES[service]["image"].rpartition(":")[2]
    assert "build" in SERVICES[service] or re.fullmatch(r"v?\d+\.\d+\.\d+", version)


def test_the_image_is_built_from_a_file_that_listens_on_the_port() -> None:
    build = SERVICES["lightserve"]["build"]
    dockerfile = (DEPLOY / build["context"] / build["dockerfile"]).read_text()

    [port] = SERVICES["lightserve"]["ports"]
    assert f"EXPOSE {port.rpartition(':')[2]}" in dockerfile
    assert "HEALTHCHECK" in dockerfile  # service_healthy waits for it
    assert ("cache", "/cache") in mounts("lightserve")


def test_the_flags_exist_and_the_server_may_finish_its_requests() -> None:
    assert config().http.batch_dir == "/cache/batches"
    assert int(SERVICES["lightserve"]["stop_grace_period"].removesuffix("s")) > LaunchConfig().drain_timeout


def test_services_wait_for_services_that_exist() -> None:
    for service in SERVICES.values():
        assert set(service.get("depends_on", ())) <= set(SERVICES)


def test_prometheus_asks_the_server_and_has_its_rules() -> None:
    files = {target: DEPLOY / source for source, target in mounts("prometheus")}
    [command] = SERVICES["prometheus"]["command"]
    path = command.removeprefix("--config.file=")
    settings = yaml.safe_load(files[path].read_text())

    assert settings["scrape_configs"][0]["static_configs"] == [{"targets": ["lightserve:8000"]}]
    assert all(str(Path(path).parent / name) in files for name in settings["rule_files"])


def test_grafana_has_the_dashboard_and_asks_prometheus() -> None:
    files = {target: DEPLOY / source for source, target in mounts("grafana")}
    sources = yaml.safe_load(files["/etc/grafana/provisioning/datasources/lightserve.yml"].read_text())
    providers = yaml.safe_load(files["/etc/grafana/provisioning/dashboards/lightserve.yml"].read_text())
    home = SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]

    [port] = SERVICES["prometheus"]["ports"]
    assert sources["datasources"][0]["url"] == f"http://prometheus:{port.rpartition(':')[2]}"
    assert str(Path(home).parent) == providers["providers"][0]["options"]["path"]
    assert files[home] == DEPLOY / "./monitoring/dashboard.json"


def test_open_webui_asks_a_route_of_the_server(tmp_path: Path) -> None:
    async def status() -> int:
        async with served(tmp_path) as server:
            return (await server.get("/v1/models")).status_code

    assert SERVICES["open-webui"]["environment"]["OPENAI_API_BASE_URL"] == "http://lightserve:8000/v1"
    assert asyncio.run(status()) == 200
