"""``marq send NAME VALUE``: sends messages to a queue."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any, BinaryIO

import click

from marq.client.receipt import Receipt
from marq.kafka.topics import ensure_topics
from marq.producer.producer import Producer
from marq.settings.durations import moment_of
from marq.settings.ordering_keys import check_ordering_key
from marq.wire.errors import ConfigError, MarqError, MessageTooLarge
from marq.wire.names import check_queue_name, check_type_name
from marq_worker.commands.command import JSON, Interrupted, Setup, command
from marq_worker.commands.confirmation import typing
from marq_worker.commands.terminal import bar, seconds
from marq_worker.commands.unknown import note_if_no_consumer

#: Limits of one batch of lines: their number, and their bytes.
_LINES, _BYTES = 5_000, 8 << 20


@command(
    click.argument("name"),
    click.argument("value", required=False),
    click.option("--header", "headers", multiple=True, metavar="NAME=VALUE", help="Header of the message. Repeatable."),
    click.option("--type", "kind", metavar="TYPE", help="Type of the message, which chooses its handler."),
    click.option("--ordering-key", metavar="KEY", help='Ordering key, in a queue with ordering = "key".'),
    click.option("--deduplication-id", "own_id", metavar="ID", help="Id; later messages with the same id are dropped."),
    click.option("--delay", metavar="DURATION", help="Delay before delivery: 90s, 15m, 1h30m, 7d."),
    click.option("--at", "moment", metavar="TIME", help="Time of delivery: 2030-01-31T08:00:00+00:00."),
    click.option("--expires-in", "life", metavar="DURATION", help="Do not deliver after DURATION: 90s, 15m, 1h30m."),
    click.option("--lines", is_flag=True, help="Send each line of standard input as a message."),
    JSON,
)
async def send(
    setup: Setup, name: str, value: str | None, headers: Sequence[str], kind: str | None, ordering_key: str | None,
    own_id: str | None, delay: str | None, moment: str | None, life: str | None, lines: bool, as_json: bool,
) -> None:  # fmt: skip
    """Send VALUE, or `-` for all of standard input; prints the message's id."""
    check_queue_name(name)
    if lines == (value is not None):
        raise ConfigError("send: give either a VALUE (`-`: standard input) or --lines")
    if lines and own_id is not None:
        raise ConfigError("send: --deduplication-id is for a single VALUE, because --lines sends several messages")
    if delay is not None and moment is not None:
        raise ConfigError(f"send: --delay {delay} and --at {moment}: pass only one of them")
    key = None if ordering_key is None else check_ordering_key(ordering_key.encode("utf-8", "surrogateescape"))
    all_options: dict[str, Any] = {
        "headers": _headers(headers), "delay": None if delay is None else seconds("--delay", delay), "at": _at(moment),
        "ordering_key": key, "type": None if kind is None else check_type_name(kind), "deduplication_id": own_id,
        "expires_in": _life(life),
    }  # fmt: skip
    options = {name: option for name, option in all_options.items() if option is not None}
    limit = (await ensure_topics(setup.client)).messages_limit_bytes
    await note_if_no_consumer(setup.client, name)
    async with Producer.of(setup.client) as producer:
        if not lines:
            data = _all(limit) if value == "-" else str(value).encode("utf-8", "surrogateescape")
            _show([await producer.send(name, data, **options)], as_json=as_json)
            return
        sent = await _send_lines(producer, name, limit, options)
    print(json.dumps({"queue": name, "sent": sent}) if as_json else f"{sent} messages sent to queue {name!r}")


def _show(receipts: Sequence[Receipt], *, as_json: bool) -> None:
    for receipt in receipts:
        print(json.dumps({"queue": receipt.queue, "id": receipt.id}) if as_json else receipt.id)


async def _send_lines(producer: Producer, queue: str, limit: int, options: dict[str, Any]) -> int:
    """Send each line of standard input; return their number. Errors say how many were sent."""
    sent, pieces = 0, pieces_of(_input(), limit)
    with bar(f"to {queue}") as progress:
        while True:
            try:
                with typing(f"{sent:,} messages were sent"):
                    values = next(pieces, None)
                if values is None:
                    return sent
                await producer.send_many(queue, values, **options)
            except MarqError as error:
                raise MarqError(f"after {sent:,} sent messages: {error}") from error
            except asyncio.CancelledError:
                raise Interrupted(f"{sent:,} messages were sent, perhaps some of the next {_LINES:,}, too") from None
            sent += len(values)
            progress(sent, sent)


def pieces_of(stream: BinaryIO, limit: int) -> Iterator[list[bytes]]:
    """Yield lines in batches; an overlong line is not read to its end."""
    piece, size, number = list[bytes](), 0, 0
    while line := stream.readline(limit + 2):
        number, line = number + 1, line.rstrip(b"\r\n")
        if len(line) > limit:
            raise _too_large(f"line {number:,}", limit)
        piece.append(line)
        size += len(line)
        if len(piece) == _LINES or size >= _BYTES:
            yield piece
            piece, size = [], 0
    if piece:
        yield piece


def _all(limit: int) -> bytes:
    with typing("nothing was sent"):
        data = _input().read(limit + 1)
    if len(data) > limit:
        raise _too_large("standard input", limit)
    return data


def _input() -> BinaryIO:
    if sys.stdin is None:
        # Closed, as with `<&-`; the user probably does not mean an empty message.
        raise ConfigError("send: standard input is closed: give a VALUE, or pipe one in")
    return sys.stdin.buffer


def _too_large(what: str, limit: int) -> MessageTooLarge:
    return MessageTooLarge(f"send: {what} has more than {limit:,} bytes (max.message.bytes of the messages topic)")


def _headers(texts: Sequence[str]) -> dict[str, bytes] | None:
    headers: dict[str, bytes] = {}
    for header in texts:
        name, equals, value = header.partition("=")
        if not name or not equals or name in headers:
            raise ConfigError(f"--header {header}: expected NAME=VALUE, each name once")
        headers[name] = value.encode("utf-8", "surrogateescape")
    return headers or None


def _life(text: str | None) -> float | None:
    life_s = None if text is None else seconds("--expires-in", text)
    if life_s is not None and life_s <= 0:
        raise ConfigError(f"--expires-in {text}: expected a duration above 0")
    return life_s


def _at(text: str | None) -> datetime | None:
    moment = None if text is None else moment_of(text.strip())
    if moment is None and text is not None:
        raise ConfigError(f"--at {text}: expected a time with a time zone, as in 2030-01-31T08:00:00+00:00")
    return moment
