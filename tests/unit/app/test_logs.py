"""A worker's log as JSON, and what is left out of it."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider

from marq_worker.config.settings import LogFormat
from marq_worker.logs import TELLTALES, JsonFormatter, shape


def line(message: str, *arguments: object, name: str = "marq", error: bool = False) -> dict[str, Any]:
    record = logging.LogRecord(
        name, logging.WARNING, __file__, 1, message, arguments, sys.exc_info() if error else None
    )
    text = JsonFormatter().format(record)
    assert "\n" not in text
    found: dict[str, Any] = json.loads(text)
    return found


def test_what_a_line_names_is_a_field() -> None:
    found = line("failed: queue=%s partition=%d offset=%d attempt=%d error=%s", "e", 3, 17, 2, "ValueError: a b=c")

    assert found["level"] == "warning"
    assert found["logger"] == "marq"
    assert found["time"].endswith("+00:00")
    assert found["message"].startswith("failed: queue=e")
    named = {name: found[name] for name in ("queue", "partition", "offset", "attempt", "error")}
    assert named == {"queue": "e", "partition": 3, "offset": 17, "attempt": 2, "error": "ValueError: a b=c"}


def test_only_our_own_lines_name_things() -> None:
    assert "queue" not in line("queue=emails", name="aiokafka")
    assert "level" not in line("level=9 nothing=1 xqueue=2").keys() - {"level"}
    assert line("level=9")["level"] == "warning"


def test_an_exception_is_on_the_same_line() -> None:
    try:
        raise ValueError("first\nsecond")
    except ValueError:
        found = line("failed", error=True)

    assert found["exception"].endswith("ValueError: first\nsecond")


def test_a_line_within_a_span_names_it() -> None:
    with TracerProvider().get_tracer("test").start_as_current_span("work") as span:
        found = line("done")

    assert found["trace_id"] == f"{span.get_span_context().trace_id:032x}"
    assert found["span_id"] == f"{span.get_span_context().span_id:016x}"
    assert "trace_id" not in line("done")


@pytest.fixture
def telltales() -> Iterator[None]:
    levels = {name: logging.getLogger(name).level for name in TELLTALES}
    yield
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


@pytest.mark.usefixtures("telltales")
@pytest.mark.parametrize("form", LogFormat)
def test_whole_requests_are_left_out_at_any_level(form: LogFormat) -> None:
    logger, handler = logging.getLogger("tests.of.logs"), logging.StreamHandler()
    logger.addHandler(handler)

    shape(logger, form)

    assert not any(logging.getLogger(name).isEnabledFor(logging.DEBUG) for name in TELLTALES)
    assert isinstance(handler.formatter, JsonFormatter) == (form is LogFormat.JSON)
