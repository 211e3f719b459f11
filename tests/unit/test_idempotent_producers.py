"""Every producer of marq is idempotent: what Kafka's client sends again by itself is written once."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("marq", "marq_worker", "agents", "app", "tables", "config", "lab", "examples")
#: Both make it so; a producer of transactions is idempotent by itself.
IDEMPOTENT = {"enable_idempotence", "transactional_id"}


def producers(text: str) -> Iterator[ast.Call]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("AIOKafkaProducer"):
            yield node


def idempotent(call: ast.Call) -> bool:
    said = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
    return bool(said.keys() & IDEMPOTENT) and said.get("enable_idempotence", "True") == "True"


def test_all_producers_are_idempotent() -> None:
    found = [
        (path.relative_to(ROOT), call)
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
        for call in producers(path.read_text(encoding="utf-8"))
    ]

    assert len(found) >= 5
    assert not [f"{path}:{call.lineno}" for path, call in found if not idempotent(call)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("AIOKafkaProducer(acks='all')", False),
        ("aiokafka.AIOKafkaProducer(enable_idempotence=False)", False),
        ("AIOKafkaProducer(**options, enable_idempotence=True)", True),
        ("AIOKafkaProducer(transactional_id=name)", True),
    ],
)
def test_how_a_producer_is_told_to_be_idempotent(text: str, expected: bool) -> None:
    assert [idempotent(call) for call in producers(text)] == [expected]
