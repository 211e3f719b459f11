"""The public names: loaded at first use, and all of them known to type checkers, too."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import marq
import marq.testing

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("package", [marq, marq.testing], ids=lambda package: package.__name__)
def test_type_checkers_and_the_loader_know_the_same_names(package) -> None:
    tree = ast.parse(Path(package.__file__).read_text(encoding="utf-8"))
    (checked,) = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    declared = {alias.name: node.module for node in checked.body for alias in node.names}

    assert declared == package._HOMES
    assert set(package.__all__) == set(declared)
    for name, home in declared.items():
        assert getattr(package, name) is getattr(importlib.import_module(home), name)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'marq' has no attribute 'Consumr'"):
        marq.Consumr  # noqa: B018


def test_the_core_and_the_pytest_plugin_load_neither_clients_nor_asyncio_and_marq_alone_no_pydantic() -> None:
    program = (
        "import sys, marq.core.tracker; assert 'asyncio' not in sys.modules, 'core';"
        "import pytest; before = set(sys.modules); import marq.testing.plugin;"
        "print(sorted(name for name in set(sys.modules) - before if name.partition('.')[0] != 'marq'),"
        " 'marq.consumer.consumer' in sys.modules, 'aiokafka' in sys.modules);"
        "marq.JSON.encode([1]); assert 'pydantic' not in sys.modules, 'codecs'"
    )

    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False, timeout=180
    )

    assert (done.stdout.strip(), done.returncode) == ("[] False False", 0), done.stderr
