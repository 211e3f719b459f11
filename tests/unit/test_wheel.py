"""What is installed where a service installs Marq: built as `pip install` builds it, without the network."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
#: Of the checkout; below marq_worker in the wheel.
FOLDERS = ("app", "agents", "tables", "config")
#: Imports every module of the worker from the directory that it is given.
IMPORT_ALL = """
import importlib, pkgutil, sys
import marq_worker
names = [m.name for m in pkgutil.walk_packages(marq_worker.__path__, "marq_worker.") if m.name[-8:] != "__main__"]
modules = [marq_worker, *map(importlib.import_module, names)]
elsewhere = [m.__name__ for m in modules if not m.__file__.startswith(sys.argv[1])]
assert not elsewhere, elsewhere
print(*names)
"""
BUILD = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    # A copy of the checkout, because the build writes next to the sources.
    source, built = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("built")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for package in (*FOLDERS, "marq", "marq_worker"):
        # Links stay links, as in a clone.
        shutil.copytree(ROOT / package, source / package, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    done = subprocess.run(
        [sys.executable, "-c", BUILD, str(built)], cwd=source, capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == 0, done.stderr
    (path,) = built.glob("*.whl")
    return zipfile.ZipFile(path)


def test_it_has_every_module_and_data_file_of_marq_and_of_the_worker_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    found = {name for name in wheel.namelist() if ".dist-info/" not in name}

    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    links = {f"marq_worker/{folder}" for folder in FOLDERS}
    packaged = {name for name in tracked if name.partition("/")[0] in {"marq", "marq_worker"}} - links
    assert found == packaged | {f"marq_worker/{name}" for name in tracked if name.partition("/")[0] in FOLDERS}


def test_every_module_of_the_worker_imports_from_it(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    installed, elsewhere = tmp_path / "installed", tmp_path / "elsewhere"
    wheel.extractall(installed)
    elsewhere.mkdir()

    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL, str(installed)],
        cwd=elsewhere, env={**os.environ, "PYTHONPATH": str(installed)}, capture_output=True, text=True, timeout=400,
        check=False,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    modules = {name for name in wheel.namelist() if name.startswith("marq_worker/") and name.endswith(".py")}
    packages = {name.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for name in modules}
    left_out = {"marq_worker", "marq_worker.__main__", "marq_worker.broker.__main__"}
    assert set(done.stdout.split()) == packages - left_out


def test_it_brings_aiokafka_alone(wheel: zipfile.ZipFile) -> None:
    (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    metadata = Parser().parsestr(wheel.read(name).decode())

    needed = [requirement for requirement in metadata.get_all("Requires-Dist", []) if "extra ==" not in requirement]
    assert [requirement.partition("[")[0] for requirement in needed] == ["aiokafka"]


def test_the_command_and_the_plugin_of_pytest_are_found_where_it_is_installed(wheel: zipfile.ZipFile) -> None:
    (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/entry_points.txt")]

    assert wheel.read(name).decode().split("\n\n") == [
        "[console_scripts]\nmarq = marq_worker.__main__:main",
        "[pytest11]\nmarq = marq.testing.plugin\n",
    ]
