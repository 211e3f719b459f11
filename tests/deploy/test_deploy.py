"""The image, the compose file and the chart, as far as they can be judged without Docker, Helm or a cluster."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from compose_spec import PyCompose

from marq.settings.client import ClientOptions
from marq_worker.app.web.security import OPEN_PATHS
from marq_worker.config.queues import load_queues
from marq_worker.config.settings import AppSettings, Role
from tests.deploy.digest import CHART, first_line

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
DOCKERFILE = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))
RENDERED = (Path(__file__).parent / "chart.yaml").read_text(encoding="utf-8")
MANIFESTS = [each for each in yaml.safe_load_all(RENDERED) if each]
#: The oldest and the newest of Kubernetes that the chart is compared with.
KUBERNETES = ["1.25", "1.37"]
SETTINGS = {f"MARQ_{name.upper()}" for name in [*AppSettings.model_fields, *ClientOptions.__annotations__]}
TEXTS = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for path in sorted(DEPLOY.rglob("*"))
    if path.is_file() and path.suffix != ".lock"
}


def pins(path: Path) -> dict[str, str]:
    return dict(re.findall(r"^([\w.-]+)==([\w.]+)", path.read_text(encoding="utf-8"), re.MULTILINE))


def pods() -> list[tuple[str, dict[str, Any]]]:
    controllers = [each for each in MANIFESTS if each["kind"] in ("StatefulSet", "Deployment")]
    return [(each["metadata"]["name"], each["spec"]["template"]["spec"]) for each in controllers]


def environment(container: dict[str, Any]) -> dict[str, str]:
    return {each["name"]: each.get("value", "") for each in container["env"]}


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
    assert {"faust-streaming", "rocksdict", "aiokafka", "opentelemetry-api"} <= set(image)
    assert not {"pytest", "pyspark", "ruff"} & set(image)


def test_each_package_has_its_hashes() -> None:
    text = (DEPLOY / "requirements.lock").read_text(encoding="utf-8")

    for entry in re.split(r"\n(?=\w)", text):
        assert "--hash=sha256:" in entry, entry.splitlines()[0]


def test_what_is_copied_exists_and_passes_the_filter() -> None:
    copied = re.findall(r"^COPY (?!--from)(\S+) ", DOCKERFILE, re.MULTILINE)
    passed = re.findall(r"^!(\S+)$", (DEPLOY / "Dockerfile.dockerignore").read_text(encoding="utf-8"), re.MULTILINE)

    assert sorted(copied) == sorted(passed)
    assert all((ROOT / name).exists() for name in copied)


def test_what_is_copied_is_all_that_a_worker_needs(tmp_path: Path) -> None:
    for name in re.findall(r"^COPY (\w+) \w+$", DOCKERFILE, re.MULTILINE):
        (tmp_path / name).symlink_to(ROOT / name)

    done = subprocess.run(
        [sys.executable, "-m", "faust", "-A", "app", "worker", "--help"],
        cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    assert "--loglevel" in done.stdout


def test_it_starts_what_the_procfile_starts() -> None:
    entry, command = (yaml.safe_load(re.findall(rf"^{word} (.+)$", DOCKERFILE, re.MULTILINE)[0]) for word in START)
    procfile = yaml.safe_load((ROOT / "Procfile").read_text(encoding="utf-8"))

    assert [*entry, *command] == shlex.split(procfile["worker"])
    assert "faust" in entry_points(group="console_scripts").names


START = ("ENTRYPOINT", "CMD")


def test_it_runs_without_privileges() -> None:
    (user,) = re.findall(r"^USER (\d+)$", DOCKERFILE, re.MULTILINE)

    assert f"--uid {user} " in DOCKERFILE
    for _, pod in pods():
        assert str(pod["securityContext"]["runAsUser"]) == user


# --- compose ----------------------------------------------------------------------------------------------------------


def test_the_compose_file_is_one() -> None:
    PyCompose.from_yaml((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))

    with pytest.raises(ValueError, match="imagine"):
        PyCompose.from_yaml("services: {worker: {imagine: marq}}")


def test_nothing_of_it_is_reached_from_elsewhere() -> None:
    for service in COMPOSE["services"].values():
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])


def test_worker_and_broker_of_it_fit_together() -> None:
    worker, kafka = COMPOSE["services"]["worker"], COMPOSE["services"]["kafka"]["environment"]

    assert f"INSIDE://{worker['environment']['MARQ_BOOTSTRAP_SERVERS']}" in kafka["KAFKA_ADVERTISED_LISTENERS"]
    assert (DEPLOY / worker["build"]["context"] / worker["build"]["dockerfile"]).samefile(DEPLOY / "Dockerfile")
    mounted = dict(volume.split(":")[:2] for volume in worker["volumes"])
    assert (DEPLOY / "../marq.toml").exists()
    assert mounted["../marq.toml"] == worker["environment"]["MARQ_QUEUES_FILE"]
    assert mounted["data"] in re.findall(r"^VOLUME (\S+)$", DOCKERFILE, re.MULTILINE)


# --- the chart --------------------------------------------------------------------------------------------------------


def test_what_is_looked_at_here_was_rendered_of_this_chart() -> None:
    assert RENDERED.startswith(first_line()), "the chart has changed: make chart"


@pytest.mark.parametrize("version", KUBERNETES)
@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda each: f"{each['kind']}-{each['metadata']['name']}")
def test_kubernetes_knows_each_field(manifest: dict[str, Any], version: str) -> None:
    kubernetes_validate.validate(manifest, version, strict=True)


def test_a_wrong_field_would_be_found() -> None:
    service = next(each for each in MANIFESTS if each["kind"] == "Service")

    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate({**service, "spec": {**service["spec"], "prots": []}}, KUBERNETES[0], strict=True)


def test_trackers_and_handlers_do_together_what_a_worker_does() -> None:
    roles = {name: environment(pod["containers"][0])["MARQ_ROLES"].split(",") for name, pod in pods()}

    assert set().union(*roles.values()) == set(Role)
    assert roles["marq-trackers"] == ["tracker", "web"]


@pytest.mark.parametrize(("name", "pod"), pods(), ids=[name for name, _ in pods()])
def test_a_pod_can_do_no_harm_and_is_asked_whether_it_lives(name: str, pod: dict[str, Any]) -> None:
    (container,) = pod["containers"]
    security, (port,) = container["securityContext"], container["ports"]

    assert (security["readOnlyRootFilesystem"], security["allowPrivilegeEscalation"]) == (True, False)
    assert (pod["securityContext"]["runAsNonRoot"], security["capabilities"]) == (True, {"drop": ["ALL"]})
    # Else a Service called marq-web sets MARQ_WEB_PORT to its address.
    assert pod["enableServiceLinks"] is False
    assert port["containerPort"] == AppSettings.model_fields["web_port"].default
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert container[probe]["httpGet"]["port"] == port["name"]
        assert container[probe]["httpGet"]["path"] in OPEN_PATHS
    assert pod["terminationGracePeriodSeconds"] > AppSettings.model_fields["stop_timeout"].default


def test_trackers_write_where_their_disk_is_and_are_found_by_name() -> None:
    (trackers,) = [each for each in MANIFESTS if each["kind"] == "StatefulSet"]
    (container,) = trackers["spec"]["template"]["spec"]["containers"]
    (claim,) = trackers["spec"]["volumeClaimTemplates"]
    mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
    headless = [e for e in MANIFESTS if e["kind"] == "Service" and e["spec"].get("clusterIP") == "None"]

    assert mounts[claim["metadata"]["name"]] == environment(container)["MARQ_DATA_DIR"]
    assert [each["metadata"]["name"] for each in headless] == [trackers["spec"]["serviceName"]]
    assert environment(container)["MARQ_WEB_HOST"] == f"$(POD_NAME).{trackers['spec']['serviceName']}"


def test_services_lead_to_trackers() -> None:
    (trackers,) = [each for each in MANIFESTS if each["kind"] == "StatefulSet"]
    labels = trackers["spec"]["template"]["metadata"]["labels"]

    for service in (each for each in MANIFESTS if each["kind"] == "Service"):
        assert service["spec"]["selector"].items() <= labels.items()


def test_the_definitions_of_queues_can_be_read(tmp_path: Path) -> None:
    (config,) = [each for each in MANIFESTS if each["kind"] == "ConfigMap"]
    (tmp_path / "queues.toml").write_text(config["data"]["queues.toml"], encoding="utf-8")

    assert load_queues(tmp_path / "queues.toml").defaults == load_queues(ROOT / "marq.toml").defaults
    for _, pod in pods():
        (container,) = pod["containers"]
        mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
        assert environment(container)["MARQ_QUEUES_FILE"] == f"{mounts['queues']}/queues.toml"
