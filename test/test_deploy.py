"""The files in deploy/ match the server and each other. No daemon runs here: they are read and checked."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema_rs
import pytest
import yaml
from fastapi.routing import APIRoute

from lightserve.cli.deploy import arguments as deploy_arguments
from lightserve.config import LaunchConfig, ServerConfig
from lightserve.config.parse import parse_server
from lightserve.ipc.process import EXIT_CONFIG_ERROR
from lightserve.ray.flags import parse_replicas
from test.httpserver.app_client import served

ROOT = Path(__file__).parent.parent
DOCKERFILES = sorted((ROOT / "deploy").glob("Dockerfile.*"))
SERVICE = ROOT / "deploy" / "lightserve.service"
MANIFEST = ROOT / "deploy" / "kubernetes.yaml"
PACKAGE_SOURCES = {"setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "lightserve"}
SCHEMA = Path(__file__).parent / "kubernetes_schema.json"
DRAIN_S = LaunchConfig().drain_timeout


@pytest.fixture(scope="module")
def open_routes(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Routes that answer a GET."""

    async def routes() -> set[str]:
        async with served(tmp_path_factory.mktemp("run")) as server:
            found = [route for route in server.app.routes if isinstance(route, APIRoute)]
            return {route.path for route in found if "GET" in (route.methods or ())}

    return asyncio.run(routes())


def flags_of(command: list[str]) -> ServerConfig:
    """What follows ``python -m lightserve.server.api_server``; an unknown flag ends the test."""
    assert command[1:3] == ["-m", "lightserve.server.api_server"]
    return parse_server(command[3:])


# Dockerfiles


class Instruction(NamedTuple):
    name: str
    text: str


def instructions_of(path: Path) -> list[Instruction]:
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [Instruction(*line.split(maxsplit=1)) for line in joined.splitlines() if line.strip()]


def texts(path: Path, name: str) -> list[str]:
    return [text for instruction, text in instructions_of(path) if instruction == name]


@pytest.fixture(params=DOCKERFILES, ids=lambda path: path.suffix[1:])
def dockerfile(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


def test_there_is_an_image_for_cpus_and_one_for_gpus() -> None:
    assert [path.suffix for path in DOCKERFILES] == [".cpu", ".cuda"]


def test_what_an_image_copies_exists_and_is_sent_to_the_daemon(dockerfile: Path) -> None:
    sent = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copies = [text.split()[:-1] for text in texts(dockerfile, "COPY") if not text.startswith("--from=")]
    sources = {source for copy in copies for source in copy}

    assert {source for source in sources if not (ROOT / source).exists()} == set()
    assert sources <= sent
    assert sources >= PACKAGE_SOURCES | {"requirements.txt", "constraints.txt"}
    assert "ADD" not in {instruction.name for instruction in instructions_of(dockerfile)}


def test_the_base_image_has_a_full_version(dockerfile: Path) -> None:
    images = {text.split()[0] for text in texts(dockerfile, "FROM")}

    assert len(images) == 1
    assert re.fullmatch(r"python:3\.\d+\.\d+-slim-[a-z]+", image := images.pop())
    assert {
        version for version in re.findall(r"lib/python([\d.]+)/", dockerfile.read_text()) if version not in image
    } == set()


def test_package_managers_leave_no_caches_in_an_image(dockerfile: Path) -> None:
    runs = texts(dockerfile, "RUN")
    apt = [run for run in runs if "apt-get" in run]
    pip = [run for run in runs if "pip install" in run]

    assert apt
    for run in apt:
        assert re.search(r"update.*install -y --no-install-recommends.*rm -rf /var/lib/apt/lists/\*", run)
    assert len(pip) == 2
    assert all("--no-cache-dir" in run for run in pip)


def test_an_image_does_not_run_as_root(dockerfile: Path) -> None:
    names = [instruction.name for instruction in instructions_of(dockerfile)]
    [user] = texts(dockerfile, "USER")

    assert int(user) > 0
    assert f"useradd --uid {user} " in " ".join(texts(dockerfile, "RUN"))
    assert names.index("USER") > max(i for i, name in enumerate(names) if name in ("RUN", "COPY"))


def test_an_image_starts_the_server_on_the_port_that_it_exposes(dockerfile: Path, open_routes: set[str]) -> None:
    [entrypoint], [exposed] = texts(dockerfile, "ENTRYPOINT"), texts(dockerfile, "EXPOSE")
    http = flags_of(json.loads(entrypoint)).http
    [health_check] = texts(dockerfile, "HEALTHCHECK")
    [(port, route)] = re.findall(r"http://127\.0\.0\.1:(\d+)(/\w+)", health_check)

    assert http.host == "0.0.0.0"
    assert http.port == int(exposed) == int(port)
    assert route in open_routes


def environment_of(dockerfile: Path) -> dict[str, str]:
    return dict(pair.split("=", 1) for text in texts(dockerfile, "ENV") for pair in text.split())


def test_the_caches_of_an_image_are_in_its_volume(dockerfile: Path) -> None:
    [volume] = texts(dockerfile, "VOLUME")
    caches = {
        name: path for name, path in environment_of(dockerfile).items() if name.endswith(("CACHE_HOME", "HF_HOME"))
    }

    assert len(caches) == 2
    assert all(path.startswith(volume) for path in caches.values())


# systemd


def settings_of(unit: Path) -> dict[str, list[str]]:
    settings: dict[str, list[str]] = {}
    for line in unit.read_text().splitlines():
        if "=" in line and not line.startswith("#"):
            name, value = line.split("=", 1)
            settings.setdefault(name, []).append(value)
    return settings


def test_the_unit_starts_the_server_with_known_flags() -> None:
    settings = settings_of(SERVICE)
    [start] = settings["ExecStart"]
    [credential] = settings["LoadCredential"]

    http = flags_of(shlex.split(start.removesuffix(" $LIGHTSERVE_FLAGS"))).http

    assert http.api_key_file == "${CREDENTIALS_DIRECTORY}/" + credential.split(":")[0]
    assert any(value.startswith("LIGHTSERVE_FLAGS=") for value in settings["Environment"])


def test_the_unit_lets_requests_finish_and_does_not_repeat_a_wrong_flag() -> None:
    settings = settings_of(SERVICE)

    assert settings["KillMode"] == ["mixed"]  # SIGTERM to the launcher only
    assert int(settings["TimeoutStopSec"][0]) > DRAIN_S
    assert settings["RestartPreventExitStatus"] == [str(EXIT_CONFIG_ERROR)]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    unit = tmp_path / SERVICE.name
    unit.write_text(SERVICE.read_text().replace("/opt/lightserve/bin/python", str(Path(sys.executable).resolve())))

    done = subprocess.run(["systemd-analyze", "verify", "--man=no", str(unit)], capture_output=True, text=True)

    assert (done.returncode, done.stdout + done.stderr) == (0, "")


# Kubernetes


@pytest.fixture(scope="module")
def objects() -> dict[str, dict[str, Any]]:
    return {one["kind"]: one for one in yaml.safe_load_all(MANIFEST.read_text())}


def problems_of(one: dict[str, Any]) -> list[str]:
    """Fields of an object that are unknown, missing or of the wrong type."""
    schema = json.loads(SCHEMA.read_text()) | {"$ref": f"#/$defs/{one['kind']}"}
    return [f"{error.instance_path}: {error.message}" for error in jsonschema_rs.validator_for(schema).iter_errors(one)]


def test_the_manifest_has_only_fields_of_the_api(objects: dict[str, dict[str, Any]]) -> None:
    assert set(objects) == {"PersistentVolumeClaim", "Deployment", "Service", "ServiceMonitor"}
    assert {kind: problems_of(one) for kind, one in objects.items()} == {kind: [] for kind in objects}
    assert problems_of(objects["Service"] | {"metdata": {}})


def pod_of(objects: dict[str, dict[str, Any]]) -> dict[str, Any]:
    pod: dict[str, Any] = objects["Deployment"]["spec"]["template"]["spec"]
    return pod


def container_of(objects: dict[str, dict[str, Any]]) -> dict[str, Any]:
    [container] = pod_of(objects)["containers"]
    return dict(container)


def test_selectors_select_the_pod_and_the_service(objects: dict[str, dict[str, Any]]) -> None:
    deployment, service, monitor = objects["Deployment"], objects["Service"], objects["ServiceMonitor"]
    labels = deployment["spec"]["template"]["metadata"]["labels"]

    assert deployment["spec"]["selector"]["matchLabels"] == labels
    assert service["spec"]["selector"] == labels
    assert monitor["spec"]["selector"]["matchLabels"] == service["metadata"]["labels"]


def test_the_ports_agree_with_the_image(objects: dict[str, dict[str, Any]]) -> None:
    container = container_of(objects)
    [port] = container["ports"]
    [service_port] = objects["Service"]["spec"]["ports"]
    [endpoint] = objects["ServiceMonitor"]["spec"]["endpoints"]
    image = ROOT / "deploy" / f"Dockerfile.{container['image'].split(':')[1]}"

    assert [str(port["containerPort"])] == texts(image, "EXPOSE")
    assert service_port["targetPort"] == port["name"]
    assert endpoint["port"] == service_port["name"]
    assert texts(image, "USER") == [str(pod_of(objects)["securityContext"]["runAsUser"])]


def test_probes_and_metrics_are_routes_of_the_server(objects: dict[str, dict[str, Any]], open_routes: set[str]) -> None:
    container = container_of(objects)
    probes = [container[f"{kind}Probe"]["httpGet"] for kind in ("startup", "readiness", "liveness")]
    [endpoint] = objects["ServiceMonitor"]["spec"]["endpoints"]

    assert {probe["path"] for probe in probes} | {endpoint["path"]} <= open_routes
    assert {probe["port"] for probe in probes} == {container["ports"][0]["name"]}
    assert container["livenessProbe"]["httpGet"]["path"] == "/liveness"  # a worker that restarts must not end the pod


def test_the_pod_finishes_its_requests(objects: dict[str, dict[str, Any]]) -> None:
    assert pod_of(objects)["terminationGracePeriodSeconds"] > DRAIN_S


def test_flags_volumes_and_secrets_of_the_pod_agree(objects: dict[str, dict[str, Any]]) -> None:
    pod, container = pod_of(objects), container_of(objects)
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    secret = volumes["keys"]["secret"]
    [endpoint] = objects["ServiceMonitor"]["spec"]["endpoints"]
    credentials = endpoint["authorization"]["credentials"]

    config = parse_server(container["args"])

    assert set(volumes) == set(mounts)
    assert config.http.api_key_file == f"{mounts['keys']}/{secret['items'][0]['path']}"
    assert (credentials["name"], credentials["key"]) == (secret["secretName"], secret["items"][0]["key"])
    assert (
        volumes["cache"]["persistentVolumeClaim"]["claimName"] == objects["PersistentVolumeClaim"]["metadata"]["name"]
    )
    assert [mounts["cache"]] == texts(DOCKERFILES[1], "VOLUME")
    assert mounts["tmp"] == "/tmp"  # the sockets between the processes: the root file system is read-only


# KubeRay: no schema of its kinds is here, so the parts that depend on each other are compared


@pytest.fixture(scope="module")
def ray_objects() -> dict[str, dict[str, Any]]:
    return {one["kind"]: one for one in yaml.safe_load_all((ROOT / "deploy" / "kuberay.yaml").read_text())}


def test_the_job_of_kuberay_deploys_with_flags_that_exist_and_fit_its_pods(
    ray_objects: dict[str, dict[str, Any]],
) -> None:
    job = ray_objects["RayJob"]["spec"]
    program, command, *flags = job["entrypoint"].split()
    [workers] = job["rayClusterSpec"]["workerGroupSpecs"]
    [worker] = workers["template"]["spec"]["containers"]
    [head] = job["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"]

    args = deploy_arguments().parse(flags)

    assert (program, command) == ("lightserve", "deploy")
    assert parse_replicas(args.replicas) == (workers["minReplicas"], workers["maxReplicas"])
    assert int(worker["resources"]["limits"]["nvidia.com/gpu"]) == args.tp
    assert args.api_key_file.startswith(head["volumeMounts"][1]["mountPath"])
    assert args.host == "0.0.0.0"
    assert not job["shutdownAfterJobFinishes"]
    found = re.search(r'"(ray\[serve\].*)"', (ROOT / "deploy" / "kuberay.yaml").read_text())
    assert found is not None
    assert found[1] in (ROOT / "setup.py").read_text()


def test_the_service_of_kuberay_leads_to_the_gateway_and_only_its_port_is_open(
    ray_objects: dict[str, dict[str, Any]],
) -> None:
    [head] = ray_objects["RayJob"]["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"]
    [port] = head["ports"]
    [service_port] = ray_objects["Service"]["spec"]["ports"]
    *_, for_all = ray_objects["NetworkPolicy"]["spec"]["ingress"]

    assert service_port["targetPort"] == port["name"]
    assert port["containerPort"] == deploy_arguments().parse(["m"]).port
    assert for_all == {"ports": [{"port": port["containerPort"]}]}
