"""A virtual environment with Celery, apart from .venv: only these tests need its packages, pycurl among them."""

from __future__ import annotations

import fcntl
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from marq_worker.broker import environment

ROOT = Path(__file__).resolve().parents[2]
LOCK = Path(__file__).with_name("celery.lock")
#: Next to the environments of this checkout's other tools.
FOLDER = ROOT / ".marq"
DOWNLOAD = ("--no-deps", "--no-binary", "kombu", "--no-build-isolation", "--require-hashes", "--quiet")
LIMIT_SECONDS = 300


def python() -> Path:
    """Return the interpreter of the environment, which the first call makes."""
    with _alone():
        environment.ensure(LOCK, FOLDER / "celery")
    return FOLDER / "celery" / "bin" / "python"


def kombu_tests() -> Path:
    """Return a directory with the tests of the locked kombu, from its source distribution."""
    entry = re.search(r"^kombu==(\S+) .*?(?=^\S)", LOCK.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert entry is not None
    directory = FOLDER / f"kombu-{entry[1]}"
    with _alone():
        if not directory.exists():
            with TemporaryDirectory(dir=FOLDER) as temporary:
                _download(entry[0], Path(temporary)).rename(directory)
    return directory


def _download(entry: str, folder: Path) -> Path:
    """Download and unpack the source distribution of a lock's entry."""
    lock = folder / "kombu.lock"
    lock.write_text(entry, encoding="utf-8")
    # The setuptools of .venv read its metadata, so nothing else is fetched.
    command = [sys.executable, "-m", "pip", "download", *DOWNLOAD, "--dest", folder, "-r", lock]
    subprocess.run(command, check=True, timeout=LIMIT_SECONDS)
    [archive] = folder.glob("*.tar.gz")
    with tarfile.open(archive) as files:
        files.extractall(folder, filter="data")
    [unpacked] = folder.glob("kombu-*/")
    # The installed package is tested.
    shutil.rmtree(unpacked / "kombu")
    return unpacked


@contextmanager
def _alone() -> Iterator[None]:
    """Wait until no other process of the tests makes the environment."""
    FOLDER.mkdir(exist_ok=True)
    with (FOLDER / "celery.flock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
