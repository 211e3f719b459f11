"""Invented statistics that the pages show in tests and screenshots, without a broker."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from math import sin
from typing import Any

import faust
from aiohttp import web

from marq.admin.purge import Extent
from marq.core.storage.handling_times import BOUNDS_MS
from marq.dead_letters.dead_letters import Deleted, Redriven
from marq.dead_letters.filters import Filters
from marq.dead_letters.snapshots import Snapshot
from marq.kafka.group_members import DescribedMember
from marq.settings.definitions import Definitions
from marq.settings.effective_settings import queue_document
from marq.settings.queue import QueueSettings, settings_document
from marq.wire.errors import BrokerUnavailable, ConfigError, UnknownQueue
from marq.wire.markers import Source
from marq.wire.names import Names, closest_name
from marq_worker.process_usage import UNKNOWN
from marq_worker.redaction import Redaction
from marq_worker.web.dashboard import history
from marq_worker.web.dashboard.actions import AuditedActions
from marq_worker.web.dashboard.actor import DeadLetterSelection
from marq_worker.web.dashboard.live_history import RANGES, LiveHistory
from marq_worker.web.dashboard.tasks import Reached, Tasks
from marq_worker.web.dashboard.views import DashboardViews
from marq_worker.web.dashboard.waiting_search import WaitingSearch
from marq_worker.web.message_listing import SHOWN_BYTES
from marq_worker.web.partition_statistics import empty_metrics
from tests.unit.app.definitions import in_file

#: A message that tries to attack those who look at it.
HOSTILE = b'{"card": "4111-1111", "name": "<img src=x onerror=alert(1)>", "note": "</script><script>alert(2)</script>"}'
NOW = datetime(2026, 11, 22, 6, 0, 0, tzinfo=UTC)
#: How many messages took how long.
HANDLED = [0, 0, 5, 80, 15, *[0] * (len(BOUNDS_MS) - 4)]
URLS = ("http://10.0.0.7:6066", "http://10.0.0.8:6066")
QUEUES = ("emails", "invoices", "reports", "thumbnails", "webhooks")
#: A message of two queues.
SHARED_ID = "orders/0/7"
#: Addresses of all pages.
PAGES = {
    "overview": "/",
    "queue": "/queues/emails",
    "queue that nobody consumes": "/queues/reports",
    "queue with blocked keys": "/queues/invoices",
    "in flight": "/queues/emails/messages?state=in_flight",
    "delayed": "/queues/emails/messages?state=delayed",
    "waiting": "/queues/emails/messages?state=waiting",
    "nothing waits": "/queues/reports/messages?state=waiting",
    "dead": "/queues/invoices/messages?state=dead",
    "message": "/message?id=marq.messages/0/1&since=1",
    "message of several queues": f"/message?id={SHARED_ID}",
    "kinds": "/dead-letters",
    "schedules": "/schedules",
    "workers": "/workers",
    "health": "/health",
}


#: Kind, text and detail of events.
_STORY = (
    ("ACQUIRE", "Delivered to worker-1, attempt 1", "lease of 30 s"),
    ("RENEW", "Lease renewed by worker-1", "for 30 s each time"),
    ("RELEASE", "Released by worker-1, to be redelivered after its backoff", "ConnectionError: <i>refused</i>"),
    ("REDELIVERED", "Redelivered for attempt 2, because it was released", ""),
    ("ACQUIRE", "Delivered to worker-2, attempt 2", "lease of 30 s"),
)
#: The event after which a message is a dead letter.
DEAD_LETTERED = ("DEAD_LETTERED", "Dead-lettered after attempt 2, because it was rejected", "")


def statistics_of(queues: Sequence[str]) -> dict[str, Any]:
    """Return statistics of some queues, each of its own."""
    found = {}
    for number, queue in enumerate(queues):
        found[queue] = empty_metrics() | {
            "in_flight": 12 * number % 50,
            "waiting_for_delivery": 7 * number % 40,
            "waiting_for_redelivery": number % 3,
            "acquired": 10_000 * number,
            "acked": 9_950 * number,
            "dead_lettered": 4 if number % 4 == 1 else 0,
            "oldest_lease_seconds": 3.5 * (number % 40),
            "acquired_per_second": 110.5 * (number % 7),
            "acked_per_second": 108.0 * (number % 7),
            "redelivered_per_second": 0.4 * (number % 3),
            "waiting": 31 * number % 90,
            "oldest_waiting_seconds": 0.4 * (number % 9),
            "arrived": 10_040 * number,
            "arrived_per_second": 111.0 * (number % 7),
        }
    return found


def partition(number: int, **changed: Any) -> dict[str, Any]:
    """Return the statistics of a markers partition."""
    return {
        "partition": number,
        "state": "owner",
        "alarm": "",
        "applied_offset": 120_000 + number,
        "unfinished": 40,
        "recovered_records": 0,
        "folded": 120_000,
        "skipped": 0,
        "quarantined": 0,
        "transactions": 900,
        "clock_ms": int(NOW.timestamp() * 1000),
        "clock_jump_ms": 0,
        "lateness_p50_ms": 40,
        "lateness_p99_ms": 210,
        **changed,
    }


BACKLOG = {
    "counted": True,
    "complete": True,
    "uncounted": 0,
    "unknown": 0,
    "unknown_queues": 0,
    "switched_off": 0,
    "trouble": [],
}


#: What a worker reports of itself, and of a handler process.
PROCESS = {"version": "0.1.0", "uptime_seconds": 93_784.0, "cpu": 0.37, "memory_bytes": 187 << 20,
           "loop_lag_seconds": 0.002}  # fmt: skip
HANDLERS = {"group": "handlers", "queues": ["emails"], "pid": 4711, "starts": 1, "breakers": {}, "keys": {},
            "blocked_seconds": 0.0, "partitions": 4, "in_flight": 12, "processing": 8, "cpu": 0.52,
            "memory_bytes": 96 << 20}  # fmt: skip


_KEYS = {
    "waiting": 12,
    "at_limit": 1,
    "busiest": [
        {"key": "<b>acme</b>", "waiting": 1_200, "running": 2, "at_limit": True, "first_sent_ms": 1_750_000_000_000},
        {"key": "initech", "waiting": 3, "running": 0, "at_limit": False, "first_sent_ms": 1_750_000_000_500},
    ],
}


class PretendNamespace:
    """Statistics that only an actor changes; ``queues``: by name."""

    payload = HOSTILE
    error = "ConnectionError: mail server refused <script>alert(3)</script>"
    rare_kind = "<b>TimeoutError</b>"
    story = _STORY
    consumer = "billing-1c4f"
    missing = ""

    def __init__(self, queues: Sequence[str] = QUEUES, redact: Sequence[str] = ("card",)) -> None:
        self.queues = list(queues)
        self.redaction = Redaction(redact)
        #: The ends of pauses in ms since 1970, None for a pause without an end.
        self.paused: dict[str, int | None] = {}
        self.complete = True
        #: The windows of the data pipeline.
        self.live: LiveHistory | None = None
        self.alarm = ""
        #: Addresses of workers that take no more messages.
        self.quiet: set[str] = set()
        #: The searches of waiting messages.
        self.searches: list[WaitingSearch] = []
        #: Schedules that an operator has resumed.
        self.resumed: set[str] = set()
        #: Handler processes that do not answer.
        self.silent: list[dict[str, str]] = []
        self.tasks_of_others: list[dict[str, Any]] = []
        self.old_handlers: list[dict[str, Any]] = []
        self.removed_handlers: dict[str, dict[str, Any]] = {}
        self.open = {f"marq.messages/0/{number}": self._open(number) for number in range(4)}
        #: Known without being defined.
        self.undefined = {"a/b&c"}
        self.delayed = {f"~{'ab' * 16}/0/{number}": self._delayed(number) for number in range(3)}
        self.dead = [self.dead_letter(number) for number in range(5)] if queues else []

    async def statistics(self) -> dict[str, Any]:
        workers = [
            {"url": URLS[0], "answered": True, "partitions": [partition(1, alarm=self.alarm), partition(0)],
             "process": PROCESS, "handlers": [HANDLERS | {"quiet": URLS[0] in self.quiet}]},
            {"url": URLS[1], "answered": self.complete, "partitions": [partition(2)] if self.complete else [],
             "process": UNKNOWN, "handlers": self.old_handlers},
        ]  # fmt: skip
        return {
            "complete": self.complete, "queues": statistics_of(self.queues), "workers": workers, "backlog": BACKLOG,
            "handled": dict.fromkeys(self.queues, HANDLED), "waited": dict.fromkeys(self.queues, HANDLED),
            "removed_handlers": self.removed_handlers,
            "recreated_topics": [],
        }  # fmt: skip

    async def consumers(self, queues: Sequence[str], wait_s: float) -> dict[str, int]:
        return {queue: 2 for queue in queues if queue != "reports"}

    def definitions(self) -> Definitions:
        return Definitions()

    def documents(self, queues: Sequence[str]) -> dict[str, dict[str, Any]]:
        return {
            queue: settings_document(QueueSettings(paused=queue in self.paused, paused_until_ms=self.paused.get(queue)))
            for queue in queues
        }

    def defined(self) -> Sequence[str]:
        return self.queues[:1]

    async def known(self, statistics: Mapping[str, Any]) -> None:
        return None

    def ranges(self) -> Sequence[str]:
        return ("15m",) if self.live is None else ("15m", *RANGES)

    async def history(self, queue: str, query: Mapping[str, str]) -> dict[str, Any]:
        if self.live is not None and "range" in query:
            return self.live.read(queue, query["range"], time.time())
        now_slot = history.slot_now()
        kept = history.MetricsHistory()
        for slot in range(now_slot - 89, now_slot + 1):
            wave = 1 + sin(slot / 9)
            row = empty_metrics() | {
                "waiting": 60 * wave, "arrived_per_second": 905 * wave,
                "in_flight": 40 * wave, "waiting_for_delivery": 25, "waiting_for_redelivery": 5 * (2 - wave),
                "acquired_per_second": 900 * wave, "acked_per_second": 880 * wave, "redelivered_per_second": 12,
            }  # fmt: skip
            kept.add(slot, {"emails": row})
        return {"complete": self.complete, **history.add_up([kept.local("", now_slot)], now_slot)}

    async def queue(self, name: str, query: Mapping[str, str]) -> dict[str, Any]:
        defined = in_file(**{name: {"backoff": [1, 5], "max_attempts": 5}})
        return {
            **queue_document(name, defined, Names()),
            "complete": self.complete,
            "statistics": statistics_of(self.queues).get(name),
            "backlog": BACKLOG,
            "handled": HANDLED,
            "waited": HANDLED if name != "reports" else [],
            "removed_handler": self.removed_handlers.get(name),
            "messages": [
                {"partition": number, "consumer": self.consumer, "host": "10.0.0.9", "end": 52_000, "committed": 51_990,
                 "lag": 10, "first_open": 51_940, "gap": 50, "in_flight": 12, "waiting": 1, "oldest_seconds": 3.5}
                for number in range(2)
            ],
            "blocked_keys": self._blocked() if name == "invoices" else None,
            "keys": _KEYS if name == "emails" else None,
            "elsewhere": 3,
            "markers": await self.markers(await self.statistics()),
            "consumers": [] if name == "reports" else [self._member()],
        }  # fmt: skip

    async def messages(self, queue: str, query: Mapping[str, str]) -> dict[str, Any]:
        if query["state"] not in ("in_flight", "delayed"):
            raise ConfigError(f"state={query['state']}: expected one of in_flight, delayed")
        found = self.open if query["state"] == "in_flight" else self.delayed
        wanted = query.get("error", "")
        return {
            "complete": self.complete,
            "messages": [message for message in found.values() if wanted in message["error"]],
        }

    async def waiting(self, queue: str, limit: int, search: WaitingSearch) -> dict[str, Any]:
        self.searches.append(search)
        searched = {"records": 4_000, "waiting": 0 if queue == "reports" else 3, "matching": 0}
        if queue == "reports" or search.text == "nothing":
            return {"complete": queue != "reports", "messages": [], "searched": searched}
        messages = [
            self._message(f"marq.messages/1/{77 + number}", "", 0.0)
            | {"not_before": NOW.isoformat() if number else None, "attempt": number + 1, "error": ""}
            for number in range(3)
        ]
        return {"complete": True, "messages": messages, "searched": searched | {"matching": 3}}

    async def message(self, message_id: str, queue: str, since_ms: int | None) -> dict[str, Any]:
        if message_id.count("/") < 2:
            raise ConfigError(f"expected the id of a message, topic/partition/offset, not {message_id!r}")
        now = self.open.get(message_id) or self.delayed.get(message_id)
        known = message_id != "marq.messages/0/999"
        events = [_event(number, *step) for number, step in enumerate(self.story)] if known else []
        # A record of a topic of two queues.
        queues = [] if not known else ["emails", "invoices"] if message_id == SHARED_ID else [queue or "emails"]
        queue = queue or (queues[0] if len(queues) == 1 else "")
        if not queue:
            events, now = [], None
        return {
            "id": message_id,
            "queue": queue,
            "queues": queues,
            "sent": NOW.isoformat() if known else None,
            "sent_ms": 1_795_327_200_000 if known else None,
            "places": [message_id],
            "events": events,
            "cut": NOW.isoformat() if since_ms else None,
            "cut_ms": since_ms,
            "missing": self.missing,
            "known": known,
            "bytes": len(self.payload) if known else 0,
            "forms": [form._asdict() for form in self.redaction.forms(self.payload)] if known else [],
            "invalid_deliver_at": False,
            "ordering_key": "customer-42" if known else None,
            "headers": self.redaction.headers([("tenant", b"acme"), ("card", b"4111")], SHOWN_BYTES) if known else {},
            "complete": self.complete,
            "now": now,
        }

    async def check_known(self, queue: str) -> None:
        known = {*self.queues, *self.undefined}
        if queue not in known:
            raise UnknownQueue(queue, closest_name(queue, known))

    async def open_message(self, query: Mapping[str, str]) -> dict[str, Any]:
        return {"complete": self.complete, "message": self.open.get(query.get("place", ""))}

    async def dead_letters(self, queue: str | None, limit: int, filters: Filters) -> list[dict[str, Any]]:
        wanted = filters.get("id")
        return [letter for letter in self._fitting(filters) if not wanted or letter["id"] in wanted][:limit]

    def _fitting(self, filters: Filters) -> list[dict[str, Any]]:
        """The dead letters that existed at a moment and have a text in their reason, where a filter says so."""
        as_of, reason = filters.get("as_of"), filters.get("reason") or ""
        ends = len(self.dead) if as_of is None else as_of.ends.get(0, 0)
        return [letter for letter in self.dead[:ends] if reason in letter["reason"]]

    async def kinds(self, queue: str | None, filters: Filters) -> list[dict[str, Any]]:
        if not self.dead or queue not in (None, "invoices"):
            return []
        kind = {
            "queue": "invoices",
            "kind": "ValueError: no customer N",
            "dead_letters": len(self.dead),
            "first_dead_lettered_at": (NOW - timedelta(hours=3)).isoformat(),
            "last_dead_lettered_at": NOW.isoformat(),
            "sample": self.dead[-1],
        }
        return [kind, {**kind, "kind": self.rare_kind, "dead_letters": 2, "sample": None}]

    def dead_counts(self) -> tuple[dict[str, int], float]:
        return ({"invoices": len(self.dead)} if self.dead else {}), NOW.timestamp()

    async def schedules(self, query: Mapping[str, str]) -> dict[str, Any]:
        row = {"name": "nightly", "queue": "reports", "cron": "0 2 * * *", "timezone": "Europe/Berlin", "enabled": True,
               "catch_up": False, "next": NOW.isoformat(), "last": NOW.isoformat(), "problem": "",
               "last_id": "~schedule/nightly/5f0c2a4b6d8e/3/1795240800",
               "runs": [{"time": (NOW - timedelta(days=day)).isoformat(),
                         "id": f"~schedule/nightly/5f0c2a4b6d8e/3/{1795240800 - day * 86400}"} for day in range(10)]
               }  # fmt: skip
        off = row | {"name": "hourly", "cron": "0 * * * *", "enabled": "hourly" in self.resumed, "last": None,
                     "last_id": None, "runs": [], "next": None}  # fmt: skip
        return {"complete": self.complete, "schedules": [row, off] if self.queues else []}

    async def tasks(self, ours: Sequence[Mapping[str, Any]], query: Mapping[str, str]) -> dict[str, Any]:
        own = [{**task, "worker": URLS[0], "here": True} for task in ours]
        return {"complete": self.complete, "tasks": [*own, *self.tasks_of_others]}

    async def running(self, query: Mapping[str, str]) -> dict[str, Any]:
        call = {"group": "handlers", "worker": URLS[0], "queue": "emails", "handler": "shop.mail:send_welcome",
                "attempt": 1, "cancellable": True}  # fmt: skip
        calls = [call | {"id": f"marq.messages/0/{number}", "seconds": 340.0 / 9**number} for number in range(3)]
        calls[1] |= {"handler": "shop.mail:resize", "cancellable": False, "worker": URLS[1]}
        return {"complete": self.complete, "calls": calls if self.queues else [], "silent": self.silent}

    async def markers(self, statistics: Mapping[str, Any]) -> list[dict[str, Any]]:
        parts = [(worker["url"], part) for worker in statistics["workers"] for part in worker["partitions"]]
        return [{**part, "owner": url, "end": 120_010, "lag": 9} for url, part in parts]

    async def groups(self) -> list[dict[str, Any]] | None:
        return [
            {"group": "marq.queue.emails", "members": [self._member()]},
            {"group": "marq.queue.reports", "members": []},
        ]

    def _member(self) -> dict[str, Any]:
        member = DescribedMember(self.consumer, "billing", "10.0.0.9", pid=4711, partitions={"marq.messages": [0]})
        return member.document()

    def configuration(self) -> dict[str, Any]:
        return {"worker": {"prefix": "marq", "roles": ["tracker", "web"]}, "client": {"connect_timeout": 10.0}}

    async def stop(self) -> None: ...

    # --- messages -----------------------------------------------------------------------------------------------------

    def _open(self, number: int) -> dict[str, Any]:
        return self._message(f"marq.messages/0/{number}", "leased", 12.5 + number)

    def _delayed(self, number: int) -> dict[str, Any]:
        return self._message(f"~{'ab' * 16}/0/{number}", "delayed", 3_600.0 * (number + 1))

    def _blocked(self) -> list[dict[str, Any]]:
        keys = ("customer-42", "<b>customer</b>", None)
        place = "marq.messages/1/{}".format
        return [
            self._message(place(number), "waiting_in_order", 40.0 * number)
            | {"key": key, "attempt": 4 - number, "waits_for_operator": number == 0}
            for number, key in enumerate(keys)
        ]

    def _message(self, place: str, state: str, due_in_s: float) -> dict[str, Any]:
        return {
            "id": place,
            "place": place,
            "queue": "emails",
            "state": state,
            "due": NOW.isoformat(),
            "due_in_seconds": due_in_s,
            "since": NOW.isoformat(),
            "attempt": 2,
            "error": self.error,
            "holder": 7,
            "consumer": {"id": self.consumer, "client_id": "billing", "host": "10.0.0.9", "name": self.consumer},
            "sent": NOW.isoformat(),
            "bytes": len(self.payload),
            "value": self.redaction.text(self.payload, SHOWN_BYTES),
            "headers": {},
        }

    def dead_letter(self, number: int) -> dict[str, Any]:
        return {
            "id": f"marq.messages/1/{number}",
            "queue": "invoices",
            "reason": "5 of 5 attempts used: the last time it was released",
            "why": f"given up after 5 attempts, last error: ValueError: no customer {number}",
            "error": f"ValueError: no customer {number}",
            "traceback": f'Traceback (most recent call last):\n  File "billing.py", line {number}, in <bill>',
            "attempt": 5,
            "sent": NOW.isoformat(),
            "dead_lettered_at": NOW.isoformat(),
            "origin": f"marq.messages/1/{number + 9}",
            "bytes": len(self.payload),
            "value": self.redaction.text(self.payload, SHOWN_BYTES),
            "headers": {},
        }


def _event(number: int, kind: str, text: str, detail: str) -> dict[str, Any]:
    at = NOW + timedelta(seconds=3 * number)
    return {"at": at.isoformat(), "at_ms": int(at.timestamp() * 1000), "elapsed_seconds": 3.0 * number, "kind": kind,
            "text": text, "detail": detail, "consumer": None, "late": False, "queue": "emails",
            "holder": "00c0ffee00c0ffee", "place": "marq.messages/0/1", "markers": [f"2/{number}"]}  # fmt: skip


class PretendSender:
    """Notes what was sent."""

    def __init__(self, asked: list[tuple[str, Any]]) -> None:
        self._asked = asked

    async def send(self, queue: str, form: Mapping[str, str]) -> dict[str, Any]:
        self._asked.append(("send", (queue, {name: value for name, value in form.items() if value})))
        return {"sent": "marq.messages/2/9", "to": queue, "bytes": len(form["value"])}

    async def editable(self, queue: str, message_id: str) -> str:
        return HOSTILE.decode()

    async def resend(self, queue: str, message_id: str, form: Mapping[str, str]) -> dict[str, Any]:
        self._asked.append(("resend", (queue, message_id, {name: value for name, value in form.items() if value})))
        return {"sent": "marq.messages/2/9", "to": form.get("to") or queue, "bytes": 1, "deleted": 1}


class PretendActor:
    """Notes its calls and applies them to the invented statistics."""

    def __init__(self, namespace: PretendNamespace) -> None:
        self.asked: list[tuple[str, Any]] = []
        self.sender = PretendSender(self.asked)
        self.fails = False
        #: What purges were given.
        self.extents: list[Extent | None] = []
        self.before_ms: int | None = None
        self._namespace = namespace

    async def cancel(self, queue: str, ids: Sequence[str]) -> Sequence[bool]:
        return self._take("cancel", queue, ids, self._namespace.delayed)

    async def deliver_now(self, queue: str, ids: Sequence[str]) -> Sequence[bool]:
        return self._take("deliver-now", queue, ids, self._namespace.delayed)

    async def release(self, queue: str, ids: Sequence[str]) -> Sequence[bool]:
        return self._take("release", queue, ids, self._namespace.open)

    async def pause(self, queue: str, duration_s: float | None) -> None:
        self.asked.append(("pause", queue if duration_s is None else (queue, duration_s)))
        self._namespace.paused[queue] = None if duration_s is None else int((time.time() + duration_s) * 1000)

    async def resume(self, queue: str) -> None:
        self.asked.append(("resume", queue))
        self._namespace.paused.pop(queue, None)

    async def command(self, worker: str, command: str, details: Mapping[str, str], who: str) -> None:
        self.asked.append((command, (worker, dict(details))))
        (self._namespace.quiet.add if command == "quiet" else self._namespace.quiet.discard)(worker)

    async def setting(self, queue: str, key: str) -> str:
        return "5"

    async def change_setting(self, queue: str, key: str, text: str) -> None:
        self.asked.append(("set", (queue, key, text)))

    async def run_schedule(self, name: str) -> dict[str, Any]:
        self.asked.append(("run-schedule", name))
        return {"sent": "marq.messages/2/9", "to": "reports", "bytes": 5}

    async def switch_schedule(self, name: str, *, enabled: bool) -> None:
        self.asked.append(("switch-schedule", (name, enabled)))
        (self._namespace.resumed.add if enabled else self._namespace.resumed.discard)(name)

    async def extent(self, queue: str, clocks: Mapping[int, int], before_ms: int | None = None) -> Extent:
        self.before_ms = before_ms
        return Extent({Source("marq.messages", 0): 7 if before_ms is None else 3}, clocks)

    async def purge(self, queue: str, *, delayed: bool, extent: Extent | None) -> Reached:
        self.asked.append(("purge", (queue, delayed)))
        self.extents.append(extent)
        return Deleted(7, 7, 6, 1)

    async def snapshot(self) -> Snapshot:
        return Snapshot(int(NOW.timestamp() * 1000), {0: len(self._namespace.dead)})

    async def count(self, action: str, selection: DeadLetterSelection) -> int:
        return len(self._meant(selection))

    async def settle(self, action: str, selection: DeadLetterSelection, progress: Callable[[Reached], None]) -> Reached:
        self.asked.append((action, selection))
        kind = Redriven if action == "redrive" else Deleted
        meant = self._meant(selection)
        progress(kind(len(meant), 1, 1))
        self._namespace.dead = [letter for letter in self._namespace.dead if letter not in meant]
        return kind(len(meant), len(meant), len(meant))

    def _meant(self, selection: DeadLetterSelection) -> list[dict[str, Any]]:
        wanted, fitting = selection.filters.get("id"), self._namespace._fitting(selection.filters)
        return [letter for letter in fitting if not wanted or letter["id"] in wanted]

    def _take(self, action: str, queue: str, ids: Sequence[str], there: dict[str, Any]) -> list[bool]:
        self.asked.append((action, (queue, list(ids))))
        if self.fails:
            raise BrokerUnavailable("no tracker answered within 10 s: is a worker running (marq worker)?")
        return [there.pop(message_id, None) is not None for message_id in ids]


def site(namespace: PretendNamespace, actor: PretendActor, **options: Any) -> web.Application:
    """Return the web application of a Faust app with the dashboard; ``options``: of the web application."""
    app = faust.App("pretend", web_application_options=options)
    DashboardViews(namespace, AuditedActions(actor, Tasks())).attach(app)  # type: ignore[arg-type]
    return app.web.web_app
