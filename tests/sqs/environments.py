"""Programs of other environments, apart from .venv: packages of Python and Node, programs in Go and Java.

Each has a lock with hashes next to this file, and a directory in the cache, which the first test makes. Checkouts share
them. Only the ordinary clients of the registries are used: pip, npm, go and Maven.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import sys
import tarfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from marq_worker.broker import environment, java
from marq_worker.broker.downloads import JarList, cache_directory, ensure_jars, run_tool

HERE = Path(__file__).parent
#: sqs-consumer needs Node.js 22. On Linux on x64, that is one of the packages.
NODE = "npm, and Node.js 22 or newer on systems other than Linux on x64"
DOWNLOAD = ("--no-deps", "--no-binary", "kombu", "--no-build-isolation", "--require-hashes", "--quiet")


def python(name: str) -> Path:
    """Return the interpreter of an environment with the packages of ``NAME.lock``."""
    lock = HERE / f"{name}.lock"
    directory = _directory(f"{name}-{sys.implementation.cache_tag}", [lock])
    with _alone():
        environment.ensure(lock, directory)
    return directory / "bin" / "python"


def kombu_tests() -> Path:
    """Return a directory with the tests of the locked kombu, from its source distribution."""
    lock = HERE / "celery.lock"
    entry = re.search(r"^kombu==.*?(?=^\S)", lock.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert entry is not None
    return _made("kombu", [lock], lambda directory: _unpack_kombu(entry[0], directory))


def node_modules() -> Path:
    """Return a directory with the packages of ``node/package-lock.json``, for NODE_PATH."""
    sources = [HERE / "node" / "package.json", HERE / "node" / "package-lock.json"]
    _require("npm", NODE)

    def install(directory: Path) -> None:
        directory.mkdir()
        for source in sources:
            shutil.copy(source, directory)
        options = ("--ignore-scripts", "--no-audit", "--no-fund")
        run_tool("installing the packages of Node", ["npm", "ci", *options, "--prefix", directory])

    return _made("node", sources, install) / "node_modules"


def node() -> Path:
    """Return the program ``node``: the one in the packages, or the system's if they contain none for it."""
    packaged = node_modules() / ".bin" / "node"
    return packaged if packaged.exists() else _require("node", NODE)


def go_clients() -> Path:
    """Return the directory of the programs that are built from ``go``: ``sqsclient`` and ``gocloud``."""
    sources = sorted(path for path in (HERE / "go").rglob("*") if path.is_file())

    def build(directory: Path) -> None:
        compiler = _require("go", "Go 1.26 or newer")
        directory.mkdir()
        # The installed compiler, rather than one that it would download.
        variables = {"GOTOOLCHAIN": "local", "CGO_ENABLED": "0"}
        options = ("-buildvcs=false", "-mod=readonly", "-o", directory)
        command = [compiler, "-C", HERE / "go", "build", *options, "./..."]
        run_tool("building the clients in Go", command, environment=variables)

    return _made("go", sources, build)


def java_client(jars: str, program: str) -> list[str | Path]:
    """Return the command that runs ``java/PROGRAM.java`` with the jars in ``java/JARS.sha256``."""
    runtime = java.ensure().path
    source = HERE / "java" / f"{program}.java"
    locks = [HERE / "java" / f"{name}.sha256" for name in ("compiler", jars)]
    with _alone():
        compiler, class_path = [_class_path(JarList.read(lock)) for lock in locks]

    def build(directory: Path) -> None:
        # Eclipse's compiler, because a Java runtime has none.
        options: list[str | Path] = ["-17", "-parameters", "-proc:none", "-nowarn", "-cp", class_path, "-d", directory]
        command = [runtime, "-cp", compiler, "org.eclipse.jdt.internal.compiler.batch.Main", *options, source]
        run_tool("compiling the client in Java", command)

    classes = _made(f"{jars}-{program}", [source, *locks], build)
    # Thorough compilation would cost more than it saves.
    return [runtime, java.SHORT_LIVED_OPTIONS, "-cp", f"{classes}{os.pathsep}{class_path}", program]


def _class_path(jars: JarList) -> str:
    directory = ensure_jars(jars)
    return os.pathsep.join(str(directory / path) for path in jars.sums)


def _require(name: str, package: str) -> Path:
    """Return a program. Fails the test if it is missing."""
    path = shutil.which(name)
    if path is None:
        pytest.fail(f"{name} not found: the tests of the SQS endpoint need {package}; install it and run them again")
    return Path(path)


def _unpack_kombu(entry: str, directory: Path) -> None:
    """Download and unpack the source distribution of a lock's entry."""
    folder = directory.with_name("download")
    folder.mkdir()
    lock = folder / "kombu.lock"
    lock.write_text(entry, encoding="utf-8")
    # The setuptools of .venv read its metadata, so nothing else is fetched.
    command = [sys.executable, "-m", "pip", "download", *DOWNLOAD, "--dest", folder, "-r", lock]
    run_tool("downloading kombu's tests", command)
    [archive] = folder.glob("*.tar.gz")
    with tarfile.open(archive) as files:
        files.extractall(folder, filter="data")
    [unpacked] = folder.glob("kombu-*/")
    # The installed package is tested.
    shutil.rmtree(unpacked / "kombu")
    unpacked.rename(directory)


def _made(name: str, sources: Sequence[Path], make: Callable[[Path], None]) -> Path:
    """Return a directory that ``make`` has made from these files, once and whole."""
    directory = _directory(name, sources)
    with _alone():
        if not directory.exists():
            with TemporaryDirectory(dir=directory.parent, prefix="new-") as temporary:
                make(Path(temporary) / name)
                (Path(temporary) / name).rename(directory)
    return directory


def _directory(name: str, sources: Sequence[Path]) -> Path:
    digest = sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:12]
    return cache_directory() / f"sqs-tests-{name}-{digest}"


@contextmanager
def _alone() -> Iterator[None]:
    """Wait until no other process of the tests makes an environment."""
    cache_directory().mkdir(parents=True, exist_ok=True)
    with (cache_directory() / "sqs-tests.flock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
