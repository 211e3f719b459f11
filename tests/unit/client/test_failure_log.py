"""What the log says of messages that fail: what happens next, in a limited number of lines."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

import marq
from marq.leases.failure_log import MAX_LINES, PERIOD_S, traceback_text
from marq.leases.message import Message
from marq.settings.queue import check_document, queue_settings
from marq.wire.error_texts import error_of, traceback_of
from tests.unit.client.fakes import P0, FakeRecord, Rig


def bill(number: int) -> None:
    raise ValueError(f"cannot bill order {number}")


async def handle(message: Message) -> None:
    bill(message.offset)


def records(caplog: pytest.LogCaptureFixture, least: int = logging.WARNING) -> Sequence[logging.LogRecord]:
    return [record for record in caplog.records if record.name == "marq" and record.levelno >= least]


def attempts(rig: Rig, attempt: int, count: int = 1) -> None:
    headers = (("marq-attempt", b"%d" % attempt),)
    rig.reader.add(P0, *[FakeRecord(offset, headers=headers) for offset in range(count)])


def with_settings(make_rig: Any, **document: Any) -> Rig:
    rules = queue_settings(check_document(document, "[queues.q]"))
    rig: Rig = make_rig(queue=lambda _: rules)
    return rig


async def handled(rig: Rig, handler: Any = handle) -> None:
    """Let the handler run until something was written."""
    pool = rig.work(handler)
    await rig.settler.until(lambda: bool(rig.ended))
    await pool.stop(1)


@pytest.mark.parametrize(
    ("document", "attempt", "text", "level"),
    [
        ({"backoff": [1.25]}, 1, "attempt 1 of 5 failed, retry in 1.25 s", "WARNING"),
        ({"backoff": [0]}, 4, "attempt 4 of 5 failed, retry in 0 s", "WARNING"),
        ({}, 5, "attempt 5 of 5 failed, now a dead letter", "ERROR"),
        ({"backoff": [60], "max_attempts": "unlimited"}, 9, "attempt 9 failed, retry in 60 s", "WARNING"),
        ({"dead_letter": False}, 5, "attempt 5 of 5 failed, dropped, because dead_letter is false", "ERROR"),
        ({"errors": {"ValueError": "reject"}}, 1, "attempt 1 of 5 failed, now a dead letter", "ERROR"),
        ({"errors": {"ValueError": [7]}}, 1, "attempt 1 of 5 failed, retry in 7 s", "WARNING"),
    ],
)
async def test_a_line_says_what_happens_next(make_rig, caplog, document, attempt, text, level) -> None:
    rig = with_settings(make_rig, **document)
    attempts(rig, attempt)

    await handled(rig)

    [record] = records(caplog)
    assert record.getMessage() == f"queue q: {text}: ValueError: cannot bill order 0 (t/0/0)"
    assert record.levelname == level


@pytest.mark.parametrize(
    ("retry", "text"),
    [
        (marq.Retry(), "Retry: after the queue's backoff"),
        (marq.Retry(delay=60), "Retry: after 60 s"),
    ],
)
async def test_the_last_retry_says_when_its_handler_wanted_the_message(make_rig, caplog, retry, text) -> None:
    rig = make_rig()
    attempts(rig, 5)

    async def handle_later(message: Message) -> None:
        raise retry

    await handled(rig, handle_later)

    [record] = records(caplog)
    assert record.getMessage() == f"queue q: attempt 5 of 5 ended with Retry, now a dead letter: {text} (t/0/0)"


async def test_a_line_says_why_an_attempt_does_not_count(make_rig, caplog) -> None:
    breaker = {"failure_rate": 0.5, "window": 4, "reset_timeout": 30}
    rig = with_settings(make_rig, backoff=[1], breaker=breaker)
    rig.add(5)

    async def handle_some(message: Message) -> None:
        if message.offset in (1, 2, 4):
            bill(message.offset)

    pool = rig.work(handle_some)
    await rig.settler.until(lambda: len(rig.ended) == 5)
    await pool.stop(1)

    texts = [record.getMessage() for record in records(caplog) if "bill" in record.getMessage()]
    uncounted = "attempt 1 of 5 failed and does not count, because the queue's circuit breaker"
    assert [text.partition(": ")[2].partition(":")[0] for text in texts] == [
        "attempt 1 of 5 failed, retry in 1 s",
        f"{uncounted} saw no success before, retry in 1 s",
        # Right after a success.
        f"{uncounted} has opened, retry in 30 s",
    ]


async def test_a_message_that_its_program_rejects_is_logged(make_rig, caplog) -> None:
    rig = make_rig()
    rig.add(1)
    [message] = await rig.take(1)

    await message.reject("the address is unknown")

    [record] = records(caplog)
    assert record.getMessage() == (
        "queue q: attempt 1 of 5 was rejected, now a dead letter: the address is unknown (t/0/0)"
    )


async def test_a_flood_of_failures_is_summed_up_and_shows_each_traceback_once(make_rig, caplog) -> None:
    rig = make_rig()
    rig.add(MAX_LINES + 50)
    pool = rig.work(handle)
    await rig.settler.until(lambda: len(rig.released) == MAX_LINES + 50)
    shown = list(records(caplog))
    rig.clock.now_s += PERIOD_S

    rig.add([MAX_LINES + 50])
    await rig.settler.until(lambda: len(rig.released) == MAX_LINES + 51)
    await pool.stop(1)

    assert len(shown) == MAX_LINES
    assert len([record for record in shown if record.exc_info]) == 1
    later = [record.getMessage() for record in records(caplog)[MAX_LINES:]]
    assert later[0] == "failures not shown, because there were too many: messages=50"
    assert len(later) == 2


def raising(error: Exception) -> Callable[[Message], Awaitable[None]]:
    async def handle(message: Message) -> None:
        try:
            bill(message.offset)
        except ValueError as cause:
            raise error from cause

    return handle


@pytest.mark.parametrize(
    ("document", "attempt", "handler", "error", "traced"),
    [
        ({}, 4, handle, "ValueError: cannot bill order 0", False),
        ({}, 5, handle, "ValueError: cannot bill order 0", True),
        ({"tracebacks": False}, 5, handle, "ValueError: cannot bill order 0", False),
        ({}, 1, raising(marq.DecodeError("not JSON")), "not JSON", False),
        ({}, 1, raising(marq.Reject("no such order")), "no such order", True),
    ],
    ids=[
        "before the last attempt",
        "the last attempt",
        "tracebacks = false",
        "its traceback may quote the value",
        "a cause",
    ],
)
async def test_a_dead_letter_keeps_its_traceback_without_the_frames_of_marq(
    make_rig, document, attempt, handler, error, traced
) -> None:
    rig = with_settings(make_rig, **document)
    attempts(rig, attempt)

    await handled(rig, handler)

    [text] = [*rig.rejected.values(), *(text for _, _, text in rig.released.values())]
    trace = traceback_of(text)
    assert (error_of(text), bool(trace)) == (error, traced)
    if traced:
        assert trace.startswith("Traceback (most recent call last):\n")
        assert "in bill" in trace
        assert trace.endswith("ValueError: cannot bill order 0")
        assert "handler_pool" not in trace


def test_a_traceback_that_raises_is_empty() -> None:
    class Unprintable(Exception):
        @property
        def __notes__(self) -> list[str]:
            raise RuntimeError

    with pytest.raises(Unprintable) as raised:
        raise Unprintable
    assert isinstance(traceback_text(raised.value), str)
    assert traceback_text(ValueError("never raised")) == ""


async def test_a_formatter_that_raises_ends_no_handler(make_rig, caplog, monkeypatch) -> None:
    class Unprintable(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    async def fail(message: Message) -> None:
        raise Unprintable

    def emit(record: logging.LogRecord) -> None:
        """Format the text of the exception, as the log handlers that write JSON do."""
        formatted.append(record)
        str(record.exc_info and record.exc_info[1])

    formatted: list[logging.LogRecord] = []
    monkeypatch.setattr(caplog.handler, "emit", emit)
    rig = make_rig()
    attempts(rig, 5, count=2)

    pool = rig.work(fail, concurrency=1)
    await rig.settler.until(lambda: len(rig.ended) == 2)
    await pool.stop(1)

    assert formatted
    assert {error_of(text) for _, _, text in rig.released.values()} == {"Unprintable: <unprintable>"}
    assert len(rig.released) == 2
