"""What is installed where a service installs Marq: built as `pip install` builds it, without the network."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUILD = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    # A copy of the checkout, because the build writes next to the sources.
    source, built = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("built")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for package in ("marq", "app", "agents", "tables", "config"):
        shutil.copytree(ROOT / package, source / package, ignore=shutil.ignore_patterns("__pycache__"))
    done = subprocess.run(
        [sys.executable, "-c", BUILD, str(built)], cwd=source, capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == 0, done.stderr
    (path,) = built.glob("*.whl")
    return zipfile.ZipFile(path)


def test_every_module_of_marq_is_in_it_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    modules = {name for name in wheel.namelist() if ".dist-info/" not in name}

    sources = {path.relative_to(ROOT).as_posix() for path in (ROOT / "marq").rglob("*.py")}
    assert modules == sources | {"marq/py.typed"}


def test_it_brings_aiokafka_alone(wheel: zipfile.ZipFile) -> None:
    (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    metadata = Parser().parsestr(wheel.read(name).decode())

    needed = [each for each in metadata.get_all("Requires-Dist", []) if "extra ==" not in each]
    assert [each.partition("[")[0] for each in needed] == ["aiokafka"]


def test_pytest_finds_the_plugin_where_it_is_installed(wheel: zipfile.ZipFile) -> None:
    (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/entry_points.txt")]

    assert wheel.read(name).decode().split() == ["[pytest11]", "marq", "=", "marq.testing.plugin"]
