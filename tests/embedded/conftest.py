"""A machine as small as a test wants it: its own PATH, cache and Java."""

import shutil
from pathlib import Path

import pytest

from marq_worker.broker import java


@pytest.fixture
def bin_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only directory on PATH: nothing of the real machine can help or disturb."""
    directory = tmp_path / "bin"
    directory.mkdir()
    for needed in ("sh", "cat", "mkdir", "chmod", "dirname"):
        found = shutil.which(needed)
        assert found, f"{needed} is missing on this machine"
        (directory / needed).symlink_to(found)
    monkeypatch.setenv("PATH", str(directory))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setattr(java, "INSTALLED", tmp_path / "usr-lib-jvm")
    return directory


@pytest.fixture
def cache_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache."""
    directory = tmp_path / "cache"
    monkeypatch.setenv("MARQ_CACHE", str(directory))
    return directory
