"""docs/operations/versions.md says what the code, the packaging and the other pages say."""

from __future__ import annotations

import ast
import json
import re
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest

import marq
from marq.settings.topic_configs import DEFAULT_LIMIT_BYTES, LIMIT, SNAPSHOT_LIMIT_BYTES, plans
from marq.wire.names import Names
from marq_worker.broker import downloads
from marq_worker.check.brokers import _STATIC, APIS
from tests.docs.pages import ROOT, blocks

PAGE = " ".join((ROOT / "docs/operations/versions.md").read_text(encoding="utf-8").split())
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
#: Modules whose names are public, besides pytest's plugin.
PUBLIC = {"marq", "marq.testing", "marq.metrics", "marq.tracing"}


def requirement(package: str, requirements: list[str]) -> str:
    [found] = [text for text in requirements if re.match(rf"{package}\b", text)]
    return found


def test_it_names_the_versions_of_kafka_that_tests_and_benchmarks_use() -> None:
    benchmarks = (ROOT / "docs/benchmarks.md").read_text(encoding="utf-8")
    [results] = set(re.findall(r"lab/bench/results/suite-[-\dT]+\.json", benchmarks))
    measured = json.loads((ROOT / results).read_text(encoding="utf-8"))["versions"]["Kafka"]

    assert f"Marq's tests run on Apache Kafka {downloads.VERSION}." in PAGE
    assert f"were measured on {measured}. Versions before {measured} have not been tested." in PAGE


def test_it_names_the_oldest_kafka_that_check_accepts() -> None:
    oldest = max((api.since for api in APIS.values()), key=lambda since: tuple(map(int, since.split("."))))

    assert f"`marq check` accepts Kafka {oldest} and newer" in PAGE
    assert f"| {_STATIC.since} | `MARQ_INSTANCE_ID`;" in PAGE


def test_it_names_the_largest_limits_that_topics_need() -> None:
    limits = {
        int(plan.config[LIMIT])
        for plan in plans(
            Names("marq"), DEFAULT_LIMIT_BYTES, partitions=1, markers_partitions=1, markers_retention_ms=1
        ).values()
        if LIMIT in plan.config
    }

    for limit in (SNAPSHOT_LIMIT_BYTES, max(limits - {SNAPSHOT_LIMIT_BYTES})):
        assert f"| `max.message.bytes` of at least {limit:,} on a topic |" in PAGE


def test_it_names_the_versions_that_installations_get() -> None:
    oldest = PROJECT["requires-python"].removeprefix(">=")
    library = requirement("aiokafka", PROJECT["dependencies"])
    worker = PROJECT["optional-dependencies"]["worker"]

    assert f"| Python | {oldest} or newer | {oldest};" in PAGE
    assert library.endswith(">=0.13,<0.15")
    assert "| aiokafka, in services | 0.13 and 0.14 | both |" in PAGE
    for package in ("aiokafka", "faust-streaming"):
        assert requirement(package, worker).partition("==")[2] == version(package)
    assert "| aiokafka and Faust, in workers | exactly the versions that `marq[worker]` installs |" in PAGE


@pytest.mark.parametrize("module", sorted(PUBLIC))
def test_it_lists_each_public_module(module: str) -> None:
    assert f"`{module}`" in PAGE


def test_pages_and_examples_use_public_names_only() -> None:
    codes = {block.name: block.code for block in blocks("python")}
    examples: list[Path] = sorted((ROOT / "examples").rglob("*.py"))
    codes |= {path.name: path.read_text(encoding="utf-8") for path in examples}
    used = {(where, module) for where, code in codes.items() for module in imported(code)}

    assert {module for _, module in used} == PUBLIC, sorted(used)
    assert all(hasattr(marq, name) for code in codes.values() for name in re.findall(r"\bmarq\.([A-Z]\w+)", code))


def imported(code: str) -> set[str]:
    """Return the modules of Marq that a program imports."""
    modules = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            modules.add(node.module)
    return {module for module in modules if module == "marq" or module.startswith(("marq.", "marq_worker"))}
