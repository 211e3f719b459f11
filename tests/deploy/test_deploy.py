"""What deploy/ has, as far as it can be judged without Docker, Helm or a cluster."""

from __future__ import annotations

import configparser
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import threading
import tomllib
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from compose_spec import PyCompose

import marq
from marq.settings.client import ClientOptions
from marq.testing import Broker
from marq_worker.cli import cli
from marq_worker.config.queues import load_queues
from marq_worker.config.settings import AppSettings
from marq_worker.web.security import OPEN_PATHS
from marq_worker.worker_exit_codes import EXIT_FENCED
from tests.deploy.digest import CHART, first_line

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
DOCKERFILE = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))
RENDERED = (Path(__file__).parent / "chart.yaml").read_text(encoding="utf-8")
MANIFESTS = [manifest for manifest in yaml.safe_load_all(RENDERED) if manifest]
#: The oldest and the newest of Kubernetes that the chart is compared with.
KUBERNETES = ["1.25", "1.37"]
SETTINGS = {f"MARQ_{name.upper()}" for name in [*AppSettings.model_fields, *ClientOptions.__annotations__]}
TEXTS = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for path in sorted(DEPLOY.rglob("*"))
    if path.is_file() and path.suffix not in (".lock", ".pyc")
}


def pins(path: Path) -> dict[str, str]:
    return dict(re.findall(r"^([\w.-]+)==([\w.]+)", path.read_text(encoding="utf-8"), re.MULTILINE))


def pods() -> list[tuple[str, dict[str, Any]]]:
    controllers = [manifest for manifest in MANIFESTS if manifest["kind"] in ("StatefulSet", "Deployment")]
    return [(controller["metadata"]["name"], controller["spec"]["template"]["spec"]) for controller in controllers]


def environment(container: dict[str, Any]) -> dict[str, str]:
    return {variable["name"]: variable.get("value", "") for variable in container["env"]}


# --- all of them ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", TEXTS)
def test_every_variable_that_is_named_is_a_setting(path: str) -> None:
    named = set(re.findall(r"\bMARQ_[A-Z_]+\b", TEXTS[path]))

    assert named <= SETTINGS


def test_the_image_is_of_this_version() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))

    assert COMPOSE["services"]["worker"]["image"] == f"marq:{version}"
    assert {chart["version"], chart["appVersion"], values["image"]["tag"]} == {version}


# --- the image --------------------------------------------------------------------------------------------------------


def test_its_packages_are_those_that_are_tested_and_none_for_development() -> None:
    image, tested = pins(DEPLOY / "requirements.lock"), pins(ROOT / "requirements.lock")

    assert image.items() <= tested.items()
    assert pins(DEPLOY / "build.lock").items() <= tested.items()
    assert set(pins(DEPLOY / "build.lock")) == {"setuptools"}
    assert {"faust-streaming", "rocksdict", "aiokafka", "opentelemetry-api"} <= set(image)
    assert not {"pytest", "pyspark", "ruff"} & set(image)


def test_each_package_has_its_hashes() -> None:
    for lock in ("build.lock", "requirements.lock"):
        for entry in re.split(r"\n(?=\w)", (DEPLOY / lock).read_text(encoding="utf-8")):
            assert "--hash=sha256:" in entry, entry.splitlines()[0]


def copied() -> list[str]:
    """Return what the image's build takes from the checkout."""
    return " ".join(re.findall(r"^COPY (?!--from)(.+) \S+$", DOCKERFILE, re.MULTILINE)).split()


def test_what_is_copied_exists_and_passes_the_filter() -> None:
    passed = re.findall(r"^!(\S+)$", (DEPLOY / "Dockerfile.dockerignore").read_text(encoding="utf-8"), re.MULTILINE)

    assert sorted(copied()) == sorted(passed)
    assert all((ROOT / name).exists() for name in copied())


def test_what_is_copied_is_all_that_the_wheel_is_made_of() -> None:
    links = {path.name for path in (ROOT / "marq_worker").iterdir() if path.is_symlink()}

    locks = {"deploy/build.lock", "deploy/requirements.lock"}
    assert set(copied()) == {*locks, "pyproject.toml", "README.md", "LICENSE", "marq", "marq_worker", *links}


def test_nothing_of_the_checkout_is_in_the_image_but_the_installed_packages() -> None:
    final = DOCKERFILE.rpartition("\nFROM ")[2]

    assert re.findall(r"^COPY (.+)$", final, re.MULTILINE) == ["--from=build /srv/venv /srv/venv"]
    assert "PYTHONPATH" not in DOCKERFILE
    assert re.findall(r"^FROM (\S+)", DOCKERFILE, re.MULTILINE) == ["python:3.11-slim-bookworm"] * 2


def test_it_starts_the_installed_command_and_so_do_pods() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

    program, command = start(DOCKERFILE)
    assert program in project["scripts"]
    assert command in cli.commands
    for _, pod in pods():
        assert pod["containers"][0]["command"] == [program, command]


def start(dockerfile: str) -> list[str]:
    """Return the command of a container without arguments."""
    lines = re.findall(r"^(?:ENTRYPOINT|CMD) (.+)$", dockerfile, re.MULTILINE)
    return [word for line in lines for word in yaml.safe_load(line)]


@pytest.mark.parametrize(
    ("roles", "answers", "healthy"),
    [(None, True, True), (None, False, False), ("tracker,web", False, False), ("tracker,handlers", False, True)],
)
def test_its_health_check_asks_the_worker_only_if_it_has_pages(roles: str | None, answers: bool, healthy: bool) -> None:
    [command] = re.findall(r"^HEALTHCHECK .*\\\n +CMD (\[.*\])$", DOCKERFILE, re.MULTILINE)
    _, *arguments = json.loads(command)

    class Health(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if answers and self.path == "/healthz" else 503)
            self.end_headers()

    with HTTPServer(("127.0.0.1", 0), Health) as server:
        threading.Thread(target=server.serve_forever).start()
        variables = {"MARQ_WEB_PORT": str(server.server_port)} | ({} if roles is None else {"MARQ_ROLES": roles})
        checked = subprocess.run([sys.executable, *arguments], env=variables, capture_output=True, timeout=60)
        server.shutdown()

    assert (checked.returncode == 0) is healthy, checked.stderr


def test_it_runs_without_privileges() -> None:
    (user,) = re.findall(r"^USER (\d+)$", DOCKERFILE, re.MULTILINE)

    assert f"--uid {user} " in DOCKERFILE
    for _, pod in pods():
        assert str(pod["securityContext"]["runAsUser"]) == user


# --- compose ----------------------------------------------------------------------------------------------------------


def test_the_compose_file_is_one() -> None:
    # Docker Compose inserts variables before it compares the file with the specification.
    PyCompose.from_yaml(re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", TEXTS["deploy/compose.yaml"]))

    with pytest.raises(ValueError, match="imagine"):
        PyCompose.from_yaml("services: {worker: {imagine: marq}}")


def test_nothing_of_it_is_reached_from_elsewhere() -> None:
    for service in COMPOSE["services"].values():
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])


def test_worker_and_broker_of_it_fit_together() -> None:
    worker, kafka = COMPOSE["services"]["worker"], COMPOSE["services"]["kafka"]["environment"]

    assert f"INSIDE://{worker['environment']['MARQ_BOOTSTRAP_SERVERS']}" in kafka["KAFKA_ADVERTISED_LISTENERS"]
    assert (DEPLOY / worker["build"]["context"] / worker["build"]["dockerfile"]).samefile(DEPLOY / "Dockerfile")
    data, project = worker["volumes"]
    assert data.partition(":")[2] in re.findall(r"^VOLUME (\S+)$", DOCKERFILE, re.MULTILINE)
    assert project["target"] == re.findall(r"^WORKDIR (\S+)$", DOCKERFILE, re.MULTILINE)[-1]
    assert project["read_only"] is True
    assert project["source"] == "${PROJECT:-./service}"


# --- a service of its own ---------------------------------------------------------------------------------------------


SERVICE = DEPLOY / "service"
SERVICE_DOCKERFILE = (SERVICE / "Dockerfile").read_text(encoding="utf-8")


def test_the_service_runs_its_handlers() -> None:
    project = tomllib.loads((SERVICE / "marq.toml").read_text(encoding="utf-8"))
    package = tomllib.loads((SERVICE / "pyproject.toml").read_text(encoding="utf-8"))

    *command, module = start(SERVICE_DOCKERFILE)
    assert command == start(DOCKERFILE)
    assert [module] == project["settings"]["handlers"]
    assert (SERVICE / f"{module.replace('.', '/')}.py").exists()
    assert package["tool"]["setuptools"]["packages"] == [module.partition(".")[0]]
    assert package["project"]["dependencies"] == ["marq[worker]"]


async def test_a_handler_of_the_service_is_called(marq_broker: Broker, caplog: pytest.LogCaptureFixture) -> None:
    spec = importlib.util.spec_from_file_location("myservice.tasks", SERVICE / "myservice" / "tasks.py")
    assert spec is not None
    assert spec.loader is not None
    tasks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tasks)
    caplog.set_level("INFO")

    async with marq.Producer() as producer:
        await producer.send("greetings", b"Ann")
    await marq_broker.run(tasks.greet)

    assert "Hello, Ann!" in caplog.text


def test_the_service_installs_this_version_without_privileges() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]

    assert f"'/src/marq-{version}-py3-none-any.whl[worker]'" in SERVICE_DOCKERFILE
    (user,) = re.findall(r"^USER (\d+)$", SERVICE_DOCKERFILE, re.MULTILINE)
    assert f"--uid {user} " in SERVICE_DOCKERFILE


# --- systemd ----------------------------------------------------------------------------------------------------------


UNIT = DEPLOY / "systemd" / "marq-worker.service"


def unit() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(UNIT, encoding="utf-8")
    return parser


def test_systemd_restarts_a_worker_unless_it_was_fenced() -> None:
    service = unit()["Service"]

    assert (service["Restart"], service["RestartPreventExitStatus"]) == ("always", str(EXIT_FENCED))
    assert int(service["TimeoutStopSec"]) > AppSettings.model_fields["stop_timeout"].default
    assert unit()["Unit"]["StartLimitIntervalSec"] == "0"


def test_the_unit_starts_the_installed_worker_which_writes_only_its_state() -> None:
    service = unit()["Service"]

    program, *arguments = service["ExecStart"].split()
    assert Path(program).is_absolute()
    assert [Path(program).name, *arguments] == start(DOCKERFILE)
    assert service["ProtectSystem"] == "strict"
    assert f"MARQ_DATA_DIR=%S/{service['StateDirectory']}" in service["Environment"].split()
    assert service["User"] != "root"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    text = UNIT.read_text(encoding="utf-8").replace(unit()["Service"]["ExecStart"].split()[0], "/bin/true")

    def verify(text: str) -> str:
        path = tmp_path / UNIT.name
        path.write_text(text, encoding="utf-8")
        done = subprocess.run(
            ["systemd-analyze", "verify", path], capture_output=True, text=True, timeout=60, check=False
        )
        return done.stdout + done.stderr

    assert UNIT.name not in verify(text)
    assert UNIT.name in verify(text.replace("ProtectHome=", "ProtectHouse="))


# --- the chart --------------------------------------------------------------------------------------------------------


def test_what_is_looked_at_here_was_rendered_of_this_chart() -> None:
    assert RENDERED.startswith(first_line()), "the chart has changed: make chart"


@pytest.mark.parametrize("version", KUBERNETES)
@pytest.mark.parametrize(
    "manifest", MANIFESTS, ids=lambda manifest: f"{manifest['kind']}-{manifest['metadata']['name']}"
)
def test_kubernetes_knows_each_field(manifest: dict[str, Any], version: str) -> None:
    kubernetes_validate.validate(manifest, version, strict=True)


def test_a_wrong_field_would_be_found() -> None:
    service = next(manifest for manifest in MANIFESTS if manifest["kind"] == "Service")

    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate({**service, "spec": {**service["spec"], "prots": []}}, KUBERNETES[0], strict=True)


def test_trackers_and_handlers_do_together_what_a_worker_does() -> None:
    roles = {name: environment(pod["containers"][0])["MARQ_ROLES"].split(",") for name, pod in pods()}

    assert roles.pop("marq-sqs") == ["sqs", "web"]
    assert set().union(*roles.values()) == AppSettings.model_fields["roles"].default
    assert roles["marq-trackers"] == ["tracker", "web"]


@pytest.mark.parametrize(("name", "pod"), pods(), ids=[name for name, _ in pods()])
def test_a_pod_can_do_no_harm_and_is_asked_whether_it_lives(name: str, pod: dict[str, Any]) -> None:
    (container,) = pod["containers"]
    security, ports = container["securityContext"], {port["name"]: port["containerPort"] for port in container["ports"]}

    assert (security["readOnlyRootFilesystem"], security["allowPrivilegeEscalation"]) == (True, False)
    assert (pod["securityContext"]["runAsNonRoot"], security["capabilities"]) == (True, {"drop": ["ALL"]})
    # Else a Service called marq-web sets MARQ_WEB_PORT to its address.
    assert pod["enableServiceLinks"] is False
    assert ports["web"] == AppSettings.model_fields["web_port"].default
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert container[probe]["httpGet"]["port"] in ports
        assert container[probe]["httpGet"]["path"] in OPEN_PATHS
    assert pod["terminationGracePeriodSeconds"] > AppSettings.model_fields["stop_timeout"].default


def test_trackers_write_where_their_disk_is_and_are_found_by_name() -> None:
    (trackers,) = [manifest for manifest in MANIFESTS if manifest["kind"] == "StatefulSet"]
    (container,) = trackers["spec"]["template"]["spec"]["containers"]
    (claim,) = trackers["spec"]["volumeClaimTemplates"]
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    headless = [e for e in MANIFESTS if e["kind"] == "Service" and e["spec"].get("clusterIP") == "None"]

    assert mounts[claim["metadata"]["name"]] == environment(container)["MARQ_DATA_DIR"]
    assert [service["metadata"]["name"] for service in headless] == [trackers["spec"]["serviceName"]]
    assert environment(container)["MARQ_WEB_HOST"] == f"$(POD_NAME).{trackers['spec']['serviceName']}"


def test_services_lead_to_pods_with_their_port() -> None:
    templates = {
        manifest["metadata"]["name"]: manifest["spec"]["template"]
        for manifest in MANIFESTS
        if "template" in manifest.get("spec", {})
    }
    leads = {}
    for service in (manifest for manifest in MANIFESTS if manifest["kind"] == "Service"):
        (port,) = service["spec"]["ports"]
        (pod,) = [
            name
            for name, template in templates.items()
            if service["spec"]["selector"].items() <= template["metadata"]["labels"].items()
        ]
        (container,) = templates[pod]["spec"]["containers"]
        assert port["targetPort"] in {container_port["name"] for container_port in container["ports"]}
        leads[service["metadata"]["name"]] = pod

    assert leads == {"marq-web": "marq-trackers", "marq-trackers": "marq-trackers", "marq-sqs": "marq-sqs"}


def test_sqs_endpoints_have_keys_and_find_each_other() -> None:
    (pod,) = [pod for name, pod in pods() if name == "marq-sqs"]
    (container,) = pod["containers"]
    mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}

    assert ports["sqs"] == AppSettings.model_fields["sqs_port"].default
    assert container["readinessProbe"]["httpGet"] == {"path": "/healthz", "port": "sqs"}
    assert mounts[str(Path(environment(container)["MARQ_SQS_KEYS"]).parent)]["readOnly"] is True
    assert environment(container)["MARQ_WEB_HOST"] == "$(POD_IP)"
    wait_s = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] > wait_s + AppSettings.model_fields["stop_timeout"].default


def test_the_definitions_of_queues_can_be_read(tmp_path: Path) -> None:
    (config,) = [manifest for manifest in MANIFESTS if manifest["kind"] == "ConfigMap"]
    (tmp_path / "queues.toml").write_text(config["data"]["queues.toml"], encoding="utf-8")

    assert load_queues(tmp_path / "queues.toml").defaults == load_queues(ROOT / "marq.toml").defaults
    for _, pod in pods():
        (container,) = pod["containers"]
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert environment(container)["MARQ_QUEUES_FILE"] == f"{mounts['queues']}/queues.toml"
