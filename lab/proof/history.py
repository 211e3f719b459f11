"""The history of a run: one JSON object per line, as in Jepsen, written by all processes that take part.

Each event has ``process``, ``type`` and ``op``. A client's operation is an ``invoke`` and later ``ok`` (done),
``fail`` (certainly not done) or ``unknown``; no second event means unknown, too. ``at_ms`` is the process' own
monotonic clock, ``time_ms`` a log's. A record of a messages topic is named ``topic/partition/offset``, which is also
the id of the message that it began; a log is named ``topic/partition``.

=============  ======================================================================================================
op             fields, and writer
=============  ======================================================================================================
``send``       ``message`` (its sender's name for it), ``queue``, ``content``; ``topic`` if queues name it;
               ``record`` when ok (for a delayed message its identity, which names no record); perhaps
               ``ordering_key``. A producer
``acquire``    ``holder``, ``queue``, ``source``, ``offsets``; ``took_ms`` when it is over. A consumer, as for all rows
               down to ``hang``
``commit``     the same
``deliver``    ``group``, ``holder``, ``record``, ``queue``, ``attempt``, ``content``: delivered to a handler; if known
               also ``log_end``, where the record's markers log ended then, and ``time_ms``, that log's time
``ack``        ``holder``, ``queue``, ``source``, ``offsets``, ``took_ms``; ``lost``: offsets for which it raised
               LeaseLost. Likewise ``release``, ``reject``, ``renew`` and ``dispatch``
``cancel``     ``holder``, ``queue`` (empty: of any queue), ``source``, ``offsets``; ``outcomes`` when ok: DONE or
               TOO_LATE for each. Any client; likewise ``reschedule``
``redrive``    ``source``, ``offsets``: a request to redrive these dead letters. Any client
``hang``       ``queue``, ``record``: its handler will not return within its lease, which is not renewed
``skipped``    ``source``, ``start``, ``end``: records that retention removed before they were read
``own``        ``holder``, ``log``, ``fenced_at``: a tracker has fenced its predecessor when the log ended there;
               ``position``: where it starts to read, if it does
``settings``   ``version``; a tracker uses that version from now on. From the queues topic itself also ``queues``:
               the settings of each by name (``*``: of all others)
``fire``       ``holder``, ``queue``, ``source``, ``offset``, ``kind``, ``attempt``, ``cause``, ``log``, ``applied``,
               ``tick`` (offset of the TICK): what a tracker decides before it writes
``halt``       ``log``, ``reason``: a tracker stops that partition with an alarm
``record``     a messages topic's record: ``offset``, ``time_ms``, ``queue``, ``content``, ``size``; for a copy ``id``,
               ``attempt``, ``first_sent_ms``, ``error``; ``deliver_at_ms`` if its sender set it; ``line`` if it
               has an ordering key; ``expires_at_ms`` (-1: never). ``fail``: of an aborted transaction. ``process`` is
               the log. In a topic that several queues name, each record has an event for each queue
``dead``       a dead letter: the same, and ``origin``, ``reason``
``note``       a note on dead letters: ``offsets`` of those that are settled, what they ``became``
``quarantine`` ``origin`` (a marker's place), ``content``
``marker``     a record of the markers topic, see :func:`marker`
``truncate``   ``offset``: the log begins there now
``limit``      ``log`` (a topic's name), ``bytes``: the largest record that a topic accepts
``kill``       and ``pause``, ``cut``, ``stop``, ``revoke``, ``clock``, ``offsets``: faults, with ``target`` (a process,
               a log or ``*``); ``info``, or from ``invoke`` to ``ok``
=============  ======================================================================================================

Several files are merged by ``at_ms``, so they must come from one machine; within one file the order of lines counts.
"""

from __future__ import annotations

import heapq
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields
from hashlib import blake2b
from pathlib import Path
from typing import Any

from marq.settings.definitions import Definitions
from marq.settings.ordering_keys import line_of
from marq.wire import dead_letter_notes, names
from marq.wire.markers import Acquire, Batch, Cause, Delay, Headers, Payload, RequestOutcome, Source, Tick, kind_of
from marq.wire.record_headers import last_value

Event = dict[str, Any]
#: How often to read the two clocks for their difference.
_READINGS = 3
#: The content of a message without its value.
LEFT_OUT = "left out"
#: In an ACQUIRE, the content of a message whose payload is only in its record.
IN_RECORD = "in its record"
#: The kind of a record of the markers topic that holds no marker; it has ``content``, too.
UNREADABLE = "unreadable"


class MalformedHistory(Exception):
    """A line is not an event."""


class History:
    """Events in memory, in the order in which they happened."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def add(self, process: str, type_: str, op: str, **fields: Any) -> None:
        self.events.append({"process": process, "type": type_, "op": op, **fields})

    def write(self, path: Path) -> None:
        write(self.events, path)


def write(events: Iterable[Event], path: Path) -> None:
    with path.open("w", encoding="utf-8") as file:
        for event in events:
            file.write(json.dumps(event, separators=(",", ":"), ensure_ascii=False) + "\n")


def read(paths: Sequence[Path]) -> Iterator[Event]:
    """Return the events of some files.

    Raise MalformedHistory if a line is not an event; the text names file and line.
    """
    if len(paths) == 1:
        return _read(paths[0])
    return heapq.merge(*map(_read, paths), key=lambda event: event.get("at_ms", 0))


def wall_clock_ahead_s() -> float:
    """Return how far the wall clock of this machine is ahead of the monotonic one.

    An interruption between the two readings makes the difference too large, so this is the smallest of several.
    """
    differences = []
    for _ in range(_READINGS):
        monotonic_s = time.monotonic()
        differences.append(time.time() - monotonic_s)
    return min(differences)


def _read(path: Path) -> Iterator[Event]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                event = json.loads(line)
                event["process"], event["type"], event["op"]
            except (ValueError, KeyError, TypeError) as error:
                raise MalformedHistory(f"{path}, line {number}: expected an event, not {line[:80]!r}") from error
            yield event


def settings_of(definitions: Definitions, queue: str) -> Event:
    """Return the settings of a queue for the event ``settings``."""
    settings = definitions.settings(queue)
    backoff = settings.backoff
    names = (
        "max_attempts", "dead_letter", "delivery", "ordering", "by_key", "delay_ms", "expires_after_ms",
        "deduplication_window_ms",
    )  # fmt: skip
    return {
        **{name: getattr(settings, name) for name in names},
        "group": definitions.group(queue),
        "backoff": [backoff.base_ms, backoff.factor, backoff.max_ms, backoff.jitter, backoff.delays_ms],
    }


# --- events in the logs -----------------------------------------------------------------------------------------------


def holder_name(holder: int) -> str:
    """Return a holder's id as text, because many JSON parsers keep only 53 bits of a number."""
    return f"{holder:016x}"


def log_name(source: Source) -> str:
    # Fault tests create no topic again, and a record does not have the id of its topic.
    return "{}/{}".format(*source.log)


def content(queue: str, key: bytes | None, value: bytes | None, headers: Headers) -> str:
    """Return a digest of what must be the same on every copy: the sender's key, the value, the sender's headers.

    :data:`LEFT_OUT` stands for a message whose value a consumer or a tracker has left out because it is too large, or
    because its record was removed.
    """
    if value is None and any(name in (names.TOO_LARGE_HEADER, names.GONE_HEADER) for name, _ in headers):
        return LEFT_OUT
    users = [(name, header) for name, header in headers if not name.startswith(names.RESERVED_HEADER)]
    for name, header in headers:
        if name == names.KEY_HEADER:
            key = header
    if key == queue.encode():
        key = None
    return f"{digest(key)}.{digest(value)}.{digest(repr(users).encode() if users else None)}"


def digest(data: bytes | None) -> str:
    return "-" if data is None else blake2b(data, digest_size=6).hexdigest()


def record(
    log: str,
    offset: int,
    time_ms: int,
    queue: str,
    key: bytes | None,
    value: bytes | None,
    headers: Headers,
    *,
    committed: bool = True,
    op: str = "record",
) -> Event:
    """Return the event of a record of a messages topic, or (``op="dead"``) of the dead-letter topic."""
    event: Event = {"process": log, "type": "ok" if committed else "fail", "op": op, "offset": offset}
    event |= {"time_ms": time_ms, "queue": queue, "content": content(queue, key, value, headers)}
    event["size"] = len(key or b"") + len(value or b"") + sum(len(n) + len(h or b"") for n, h in headers)
    for name, header in headers:
        if header is not None and name in _FIELDS:
            field, read_field = _FIELDS[name]
            event[field] = read_field(header)
    if op == "record" and (ordering_key := _ordering_key(queue, key, headers)):
        event["line"] = f"{line_of(ordering_key):016x}"
    return event


def _ordering_key(queue: str, key: bytes | None, headers: Headers) -> bytes | None:
    """Return the ordering key: from a header in the shared topic, from the record's key in a queue's own topic."""
    keys = [header for name, header in headers if name == names.ORDERING_KEY_HEADER]
    if keys:
        return keys[-1]
    return None if key == queue.encode() else key


def note(log: str, value: bytes | None) -> Event:
    """Return the event of a note in the dead-letter topic; without ``became``, of an unreadable one."""
    found = dead_letter_notes.decode(Source("", 0), value)
    said = {} if found is None else {"offsets": list(found.offsets), "became": found.became.value}
    return {"process": log, "type": "ok", "op": "note", **said}


def marker(log: str, offset: int, time_ms: int, batch: Batch | None, value: bytes | None = None) -> Event:
    """Return the event of a record of the markers topic; without a batch, of an unreadable ``value``."""
    event: Event = {"process": log, "type": "ok", "op": "marker", "offset": offset, "time_ms": time_ms}
    if batch is None:
        return event | {"kind": UNREADABLE, "content": digest(value)}
    if isinstance(batch, Tick):
        return event | {"kind": "TICK", "holder": holder_name(batch.holder), "monotonic_ms": batch.monotonic_ms}
    event |= {"kind": kind_of(batch).name, "queue": batch.queue, "holder": holder_name(batch.holder)}
    event |= {"source": log_name(batch.source), "offsets": list(batch.offsets)}
    return event | _columns(batch)


def _columns(batch: Batch) -> Event:
    columns = {field.name: getattr(batch, field.name) for field in fields(batch) if field.name not in _FRAME}
    columns = {name: value if isinstance(value, int | None) else list(value) for name, value in columns.items()}
    columns |= {
        name: [type_(value).name for value in columns[name]] for name, type_ in _NAMED.items() if name in columns
    }
    if isinstance(batch, Acquire | Delay):
        columns["attempts"] = [payload.attempt for payload in batch.payloads]
        columns["contents"] = [
            IN_RECORD if payload.left else content(batch.queue, payload.key, payload.value, payload.headers)
            for payload in batch.payloads
        ]
    if isinstance(batch, Delay):
        columns["timestamps_ms"] = [payload.timestamp_ms for payload in batch.payloads]
        columns["expire_at_ms"] = [
            _expiry(last_value(payload.headers, names.EXPIRES_AT_HEADER)) for payload in batch.payloads
        ]
        topic = batch.source.topic
        if not names.is_synthetic(topic):
            # Dead letters contain the ids of their messages.
            ids = [dict(payload.headers).get(names.ID_HEADER) or b"" for payload in batch.payloads]
            columns["ids"] = [id_.decode() for id_ in ids]
        elif not names.is_scheduled(topic):
            # Only ids that senders chose count.
            own_ids = [_deduplication_id(payload) for payload in batch.payloads]
            columns |= {"deduplication_ids": own_ids} if any(own_ids) else {}
    return columns


#: Fields of markers that are not columns of their events, or have other names there; and those with names of values.
_FRAME = {"queue", "holder", "source", "offsets", "payloads", "kind"}
_NAMED: dict[str, type[Cause | RequestOutcome]] = {"causes": Cause, "outcomes": RequestOutcome}


def _deduplication_id(payload: Payload) -> str:
    """Return the id of a message within its ordering key, "" without an id."""
    values = dict(payload.headers)
    own_id = values.get(names.DEDUPLICATION_ID_HEADER)
    return f"{digest(values.get(names.ORDERING_KEY_HEADER))}.{digest(own_id)}" if own_id else ""


def name_of(source: Source, offset: int) -> str:
    return f"{log_name(source)}/{offset}"


def _expiry(text: bytes | None) -> int | None:
    """Return when a message expires: -1 for never, None if its sender does not say, or says nothing readable."""
    if text == b"never":
        return -1
    return int(text) if text is not None and text.isdigit() and int(text) < 2**62 else None


_FIELDS: dict[str, tuple[str, Callable[[bytes], Any]]] = {
    names.ID_HEADER: ("id", bytes.decode),
    names.ATTEMPT_HEADER: ("attempt", int),
    names.FIRST_SENT_HEADER: ("first_sent_ms", int),
    names.ERROR_HEADER: ("error", bytes.decode),
    names.REASON_HEADER: ("reason", bytes.decode),
    names.ORIGIN_HEADER: ("origin", bytes.decode),
    names.DELIVER_AT_HEADER: ("deliver_at_ms", lambda text: int(text) if text.isdigit() else None),
    names.EXPIRES_AT_HEADER: ("expires_at_ms", _expiry),
}
