"""What pages make of metrics, samples and markers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
from aiokafka import ConsumerRecord

from marq.core.storage.handling_times import BOUNDS_MS
from marq.dead_letters.dead_letters import Redriven
from marq.kafka.topics import Topics
from marq.settings.definitions import Definitions
from marq.wire.error_texts import with_traceback
from marq.wire.errors import ConfigError, MarqError
from marq.wire.marker_codec import encode
from marq.wire.markers import (
    ANY_QUEUE,
    BLOCKED_MS,
    LAST,
    Ack,
    Acquire,
    Batch,
    Cancel,
    Cause,
    Delay,
    Fact,
    Kind,
    MixedAcquire,
    Payload,
    Release,
    Renew,
    Resume,
    Resumed,
    Source,
)
from marq.wire.names import ID_HEADER, schedule_topic
from marq_worker.backlog.consumer_watch import NO_CONSUMER_S
from marq_worker.web.dashboard import history, rows_and_alarms
from marq_worker.web.dashboard.actions import MAX_IDS, AuditedActions, read_action
from marq_worker.web.dashboard.actor import RELEASED_BY_OPERATOR, Actor, DeadLetterSelection
from marq_worker.web.dashboard.buttons import inside, see
from marq_worker.web.dashboard.descriptions import markers_partitions, partitions
from marq_worker.web.dashboard.forms import read_dead_letters, read_ids
from marq_worker.web.dashboard.history import SAMPLES, MetricsHistory
from marq_worker.web.dashboard.queries import public
from marq_worker.web.dashboard.rendering import age, ago, load, memory, milliseconds, moment, rate, setting
from marq_worker.web.dashboard.tasks import MAX_RUNNING, Tasks, TooManyTasks
from marq_worker.web.dashboard.timeline import Timeline, last_place, status_after
from marq_worker.web.partition_statistics import add_up, backlog_of, empty_metrics
from tests.browser.pretend import PretendActor, PretendNamespace
from tests.unit.app.definitions import in_file

FIRST, AGAIN = Source("marq.messages", 0), Source("marq.messages", 3)


# --- history ----------------------------------------------------------------------------------------------------------


def sample(in_flight: float) -> dict[str, dict[str, float]]:
    return {"emails": empty_metrics() | {"in_flight": in_flight, "acked_per_second": 2.0}}


def test_samples_of_workers_are_added_up_by_their_time() -> None:
    ours, theirs = MetricsHistory(), MetricsHistory()
    ours.add(1_000, sample(3))
    ours.add(1_001, sample(4))
    # Whose clock is a sample behind.
    theirs.add(1_000, sample(10))

    found = history.add_up([ours.local("emails", 1_001), theirs.local("emails", 1_000)], 1_001)

    assert found["series"]["in_flight"][-3:] == [None, 13, 4]
    assert found["times"][-1] == 10_010
    assert len(found["times"]) == SAMPLES == 90


def test_samples_that_were_left_out_repeat_the_former_one_unless_the_worker_was_suspended() -> None:
    kept = MetricsHistory()
    for slot in (1_000, 1_001, 1_004, 1_020):
        kept.add(slot, sample(slot - 1_000))

    in_flight = kept.local("emails", 1_020)["series"]["in_flight"]

    assert in_flight[-21:-15] == [0, 1, 1, 1, 4, None]
    assert in_flight[-2:] == [None, 20]


def test_a_queue_that_was_silent_for_a_quarter_of_an_hour_has_no_history() -> None:
    kept = MetricsHistory()
    kept.add(1_000, sample(3))
    kept.add(1_000 + SAMPLES, {})

    assert set(kept.local("emails", 1_000 + SAMPLES)["series"]["in_flight"]) == {None}
    assert kept.local("", 1_000 + SAMPLES)["series"]["in_flight"][-1] == 0
    assert list(kept._rings) == [""]


def test_waiting_messages_have_a_history_where_they_are_counted_and_none_elsewhere() -> None:
    counting, other = MetricsHistory(), MetricsHistory()
    counting.add(1_000, {"emails": empty_metrics() | {"waiting": 5}, "webhooks": empty_metrics()})
    other.add(1_000, {"emails": empty_metrics() | {"in_flight": 1}})

    for queue in ("", "emails"):
        assert counting.local(queue, 1_000)["series"]["waiting"][-1] == 5
        assert other.local(queue, 1_000)["series"]["waiting"][-1] is None
    # A worker of an older version has no such samples.
    former = {"first_slot": 1_000 - SAMPLES + 1, "series": {"in_flight": [2.0] * SAMPLES}}
    added = history.add_up([counting.local("", 1_000), other.local("", 1_000), former], 1_000)["series"]
    assert (added["waiting"][-1], added["in_flight"][-1]) == (5, 3)


def test_queues_that_do_nothing_take_no_memory() -> None:
    kept = MetricsHistory()
    kept.add(1_000, {f"queue-{number}": empty_metrics() for number in range(100)})

    assert list(kept._rings) == [""]


# --- rows -------------------------------------------------------------------------------------------------------------


def found(counted: bool = False, **queues: dict[str, float]) -> dict[str, Any]:
    backlog = {
        "counted": counted, "complete": counted, "uncounted": 0, "unknown": 0, "unknown_queues": 0, "switched_off": 0,
        "trouble": [],
    }  # fmt: skip
    rows = {name: empty_metrics() | row for name, row in queues.items()}
    return {
        "queues": rows, "workers": [], "complete": True, "backlog": backlog, "removed_handlers": {},
        "recreated_topics": [],
    }  # fmt: skip


def alarms_of(metrics: dict[str, Any]) -> list[str]:
    return rows_and_alarms.alarms(metrics, Definitions())


def check_of(metrics: dict[str, Any], subject: str) -> dict[str, Any]:
    """Return the check of the page of health whose name contains the subject."""
    [check] = [check for check in rows_and_alarms.checks(metrics, [], Definitions()) if subject in check["what"]]
    return dict(check)


def worker_with(*handlers: dict[str, Any], **facts: Any) -> dict[str, Any]:
    """Return metrics with a worker that runs these handler processes."""
    worker = {"url": "http://a", "answered": True, "partitions": [], "handlers": list(handlers)}
    return found(emails={}) | {"workers": [worker | facts]}


#: A handler process that runs.
PROCESS = {"group": "mail", "queues": ["emails"], "pid": 7, "blocked_seconds": 0.0}


def test_a_row_counts_dead_letters_that_are_left_and_what_waits_in_either_way() -> None:
    metrics = found(
        emails={
            "dead_lettered": 9,
            "redriven": 4,
            "deleted": 2,
            "waiting_for_delivery": 5,
            "waiting_for_redelivery": 1,
        }
    )

    [row] = rows_and_alarms.queue_rows(metrics, (), {})

    assert (row["dead_letters"], row["delayed"], row["state"], row["waiting"]) == (3, 6, "idle", None)


WAITS = {"waiting": 500, "oldest_waiting_seconds": 320.0, "arrived_per_second": 0.0}
NOBODY = WAITS | {"no_consumer_seconds": NO_CONSUMER_S, "idle_seconds": 900.0}


def test_queues_without_consumers_are_alarms_and_wrong_on_the_page_of_health() -> None:
    many = {f"queue-{number:02}": NOBODY | {"oldest_waiting_seconds": 100.0 + number} for number in range(12)}
    metrics = found(counted=True, one=WAITS, **many)

    alarms, check = alarms_of(metrics), check_of(metrics, "consumers")

    assert alarms[0] == "Queue queue-11: has no consumer; 500 messages wait, the oldest for 1 m 51 s."
    assert alarms[-1] == "Queues: 2 more have waiting messages and no consumer."
    assert len(alarms) == 11
    assert (check["ok"], check["found"].endswith("queues: 2 more have waiting messages and no consumer")) == (
        False,
        True,
    )
    check = check_of(found(one=WAITS), "consumers")
    assert (check["ok"], check["found"]) == (True, "all have")


def test_a_handler_that_blocks_its_event_loop_is_an_alarm_and_wrong_on_the_page_of_health() -> None:
    blocked = worker_with(PROCESS | {"blocked_seconds": 4.0, "blocked_by": "handler mail:send of queue emails"})
    healthy = worker_with(PROCESS)

    alarm, *_ = alarms_of(blocked)
    wrong, right = (check_of(metrics, "event loops") for metrics in (blocked, healthy))

    said = "handler mail:send of queue emails has blocked the event loop of handler process 7 of http://a for 4 s"
    assert alarm == f"Group mail: {said}."
    assert (wrong["ok"], wrong["found"]) == (False, f"group mail: {said}")
    assert "asyncio.to_thread" in wrong["advice"]
    assert (right["ok"], right["found"]) == (True, "all do")
    assert not alarms_of(healthy)


def test_the_page_of_health_does_not_ask_for_another_worker_while_one_is_stopped() -> None:
    [worker] = worker_with(PROCESS | {"stopped": True})["workers"]
    silent = {"url": "http://b", "answered": False, "partitions": [], "handlers": []}
    metrics = found(counted=True, emails=NOBODY) | {"workers": [worker, silent]}

    checks = {check["what"]: check for check in rows_and_alarms.checks(metrics, [], Definitions())}

    stopped = checks["handler processes run their event loops"]
    assert (stopped["ok"], stopped["advice"].startswith("Resume it on that machine with kill -CONT 7")) == (False, True)
    assert checks["queues with waiting messages have consumers"]["ok"]
    assert "Start a worker" not in checks["a tracker runs"]["advice"]


def test_a_quiet_worker_is_an_alarm_and_wrong_on_the_page_of_health() -> None:
    others = worker_with(PROCESS | {"quiet": False}, url="http://b")
    quiet = others | {"workers": worker_with(PROCESS | {"quiet": True})["workers"] + others["workers"]}

    checks = [check_of(metrics, "quiet") for metrics in (quiet, others)]

    assert alarms_of(quiet) == [
        "Worker http://a: it is quiet: its running handlers continue, but it takes no more messages."
    ]
    assert alarms_of(others) == []
    assert [(check["ok"], check["found"]) for check in checks] == [
        (False, "worker http://a: it is quiet: its running handlers continue, but it takes no more messages"),
        (True, "none"),
    ]


def test_messages_that_are_late_because_no_worker_ran_are_not_blamed_on_the_workers() -> None:
    part = {"partition": 0, "state": "owner", "alarm": None, "clock_jump_ms": 0, "quarantined": 0}

    late = check_of(worker_with(partitions=[part | {"lateness_p99_ms": 46_553}]), "leases and delays expire on time")

    assert (late["ok"], late["found"]) == (False, "99% within 46,553 ms")
    assert late["advice"].startswith("If no worker ran for a while, wait: this is of the last 10 min.")


def test_a_topic_that_was_created_again_is_an_alarm() -> None:
    [alarm] = alarms_of(
        found(orders={}) | {"recreated_topics": [{"queue": "orders", "topic": "sales", "seconds": 61.0}]}
    )

    assert alarm == (
        "Queue orders: its topic sales was deleted and created again, noticed 1 min ago: its records are new messages,"
        " and unfinished messages of the former topic are redelivered."
    )


def test_a_handler_that_no_worker_runs_is_an_alarm_and_wrong_on_the_page_of_health() -> None:
    metrics = found(emails={}) | {"removed_handlers": {"emails": {"handler": "mail.work:send", "seconds": 420.0}}}

    [alarm], check = alarms_of(metrics), check_of(metrics, "published handlers")

    assert alarm == (
        "Queue emails: no worker has run its handler mail.work:send for 7 min. Start a worker with the module mail.work"
        " in MARQ_HANDLERS. If the handler was removed, consumers may serve the queue in 8 min, or after"
        " `marq queue emails --forget`."
    )
    assert (check["ok"], f"Q{check['found'][1:]}.") == (False, alarm)
    check = check_of(found(emails={}), "published handlers")
    assert (check["ok"], check["found"]) == (True, "all do")


def test_workers_together_say_how_long_nothing_of_a_queue_was_acquired() -> None:
    one, two = NOBODY, NOBODY | {"waiting": 2, "no_consumer_seconds": 0.0, "idle_seconds": 4.0}
    answers = [{"queues": {"emails": empty_metrics() | metrics}} for metrics in (one, two, {})]

    added = add_up(answers)["emails"]

    assert (added["waiting"], added["no_consumer_seconds"], added["idle_seconds"]) == (502, NO_CONSUMER_S, 4.0)


def test_where_a_backlog_is_taken_nothing_waits_in_a_queue_without_metrics() -> None:
    metrics = found(counted=True, emails=WAITS)

    rows = rows_and_alarms.queue_rows(metrics, ["defined"], {})

    assert [(row["waiting"], row["oldest_waiting_seconds"]) for row in rows] == [(0, None), (500, 320.0)]


def test_a_backlog_that_is_not_complete_is_said() -> None:
    metrics = found(counted=True)
    metrics["backlog"] |= {"complete": False, "uncounted": 12_000}

    assert alarms_of(metrics) == ["The backlog is still being counted: 12,000 records are left to read."]
    assert rows_and_alarms.least(metrics["backlog"]) == "≥ "

    metrics["backlog"] |= {"uncounted": 0, "switched_off": 1, "trouble": ["topic orders can't be read: no right"]}

    assert alarms_of(metrics) == [
        "The backlog is incomplete: topic orders can't be read: no right.",
        "The backlog is incomplete: 1 workers do not count (MARQ_COUNT_WAITING).",
    ]


def test_a_count_is_complete_when_each_worker_answered_and_counts() -> None:
    counts = {"complete": True, "uncounted": 0, "unknown": 2, "trouble": ""}
    one, none = {"partitions": [1], "backlog": counts}, {"partitions": [2], "backlog": None}

    assert backlog_of([one], everyone=True)["complete"]
    # One that did not respond may have more.
    assert not backlog_of([one], everyone=False)["complete"]
    partly = backlog_of([one, none, {"partitions": [], "backlog": None}], everyone=True)
    assert (partly["counted"], partly["complete"], partly["switched_off"]) == (True, False, 1)
    assert backlog_of([{**one, "backlog": counts | {"trouble": "why"}}], everyone=True)["trouble"] == ["why"]


def test_rows_are_in_the_order_that_is_asked_for_with_what_is_not_known_at_the_end() -> None:
    metrics = found(a={"oldest_lease_seconds": 5.0}, b={}, c={"oldest_lease_seconds": 9.0, "in_flight": 1})
    table = rows_and_alarms.queue_rows(metrics, ["defined"], {})

    shown = rows_and_alarms.Shown.read({"sort": "oldest_seconds", "order": "desc"})
    busy = rows_and_alarms.Shown.read({"state": "busy", "sort": "nonsense", "page": "-1"})

    assert [row["queue"] for row in shown.of(table)] == ["c", "a", "b", "defined"]
    assert [row["queue"] for row in busy.of(table)] == ["c"]
    assert busy.query(page=2) == {"state": "busy", "page": "2"}


def test_a_row_has_the_time_within_which_most_messages_are_done() -> None:
    metrics = found(a={}, b={}) | {"handled": {"a": [0] * 4 + [100] + [0] * (len(BOUNDS_MS) - 4)}}

    done, idle = rows_and_alarms.queue_rows(metrics, (), {})

    assert (done["p95_seconds"], idle["p95_seconds"]) == (0.0975, None)
    assert rows_and_alarms.p95_seconds([]) is None
    assert (
        rows_and_alarms.p95_seconds([(), [0] * 4 + [10] + [0] * (len(BOUNDS_MS) - 4), [90] + [0] * len(BOUNDS_MS)])
        == 0.075
    )


def test_partitions_say_how_far_the_group_is_and_what_is_open_before() -> None:
    sources = [{"topic": "t", "partition": 0, "first_open": 90, "in_flight": 2, "waiting": 1, "oldest_seconds": 4.0}]
    members = [{"client_id": "billing", "host": "10.0.0.9", "partitions": {"t": [1]}}]

    first, second = partitions("t", {0: 120, 1: 7}, {0: 100}, sources, members)

    assert (first["lag"], first["gap"], first["in_flight"], first["consumer"]) == (20, 10, 2, None)
    assert (second["lag"], second["gap"], second["consumer"]) == (None, None, "billing")


def test_a_partition_that_nobody_owns_is_shown_all_the_same() -> None:
    workers = [{"url": "http://a", "partitions": [{"partition": 1, "applied_offset": 41}]}]

    nobody, owned = markers_partitions(workers, {0: 10, 1: 50})

    assert (nobody["partition"], nobody["owner"], nobody["lag"]) == (0, None, None)
    assert (owned["owner"], owned["lag"]) == ("http://a", 8)


def test_no_secret_is_among_the_settings_of_a_page() -> None:
    assert public(
        {"prefix": "marq", "web_password": "x", "web_tokens": ["y"], "basic_auth": "z", "ssl_keyfile": "k"}
    ) == {"prefix": "marq"}


# --- markers ----------------------------------------------------------------------------------------------------------


def read(timeline: Timeline, *batches: tuple[int, Batch]) -> list[str]:
    """Give markers to a timeline, each at a time; return the kinds of events."""
    for offset, (at_ms, batch) in enumerate(batches):
        value = encode(batch)
        record: Any = ConsumerRecord("marq.markers", 0, offset, at_ms, 1, None, value, None, -1, len(value), [])
        timeline.read(record, 0)
    return [event["kind"] for event in timeline.told()]


def acquire(source: Source, offsets: list[int], identity: bytes | None = None, attempt: int = 1) -> Acquire:
    headers = [] if identity is None else [(ID_HEADER, identity)]
    payloads = [Payload(1, attempt, b"emails", headers, b"v%d" % offset) for offset in offsets]
    return Acquire("emails", 7, source, offsets, 30_000, offsets[0], payloads)


def test_a_message_is_followed_through_its_redeliveries() -> None:
    timeline = Timeline("marq.messages/0/5")
    identity = b"marq.messages/0/5"

    kinds = read(
        timeline,
        (10, acquire(FIRST, [4, 5, 6])),
        (20, Release("emails", 7, FIRST, [5], [-1], True, ["ValueError: no"])),
        (30, Ack("emails", 7, FIRST, [4, 6])),
        (40, Fact(Kind.REDELIVERED, "emails", 1, FIRST, [5], [2], [Cause.RELEASED])),
        (50, acquire(AGAIN, [8], b"marq.messages/0/9")),
        (60, acquire(AGAIN, [9], identity, attempt=2)),
        (70, Ack("", 7, AGAIN, [8, 9])),
    )

    assert kinds == ["ACQUIRE", "RELEASE", "REDELIVERED", "ACQUIRE", "ACK"]
    assert timeline.places == {(FIRST, 5), (AGAIN, 9)}
    assert (timeline.queues, timeline.payload and timeline.payload.value) == ({"emails"}, b"v9")
    events = timeline.told({f"{7:016x}": "worker-2"}, since_ms=5)
    assert [(event["text"], event["detail"]) for event in events] == [
        ("Delivered to worker-2, attempt 1", "lease of 30 s"),
        ("Released by worker-2, to be redelivered after its backoff", "ValueError: no"),
        ("Redelivered for attempt 2, because it failed: ValueError: no", ""),
        ("Delivered to worker-2, attempt 2", "lease of 30 s"),
        ("Acknowledged by worker-2", ""),
    ]
    assert [event["elapsed_seconds"] for event in events] == [0.005, 0.015, 0.035, 0.055, 0.065]
    # One that has left its group.
    assert timeline.told()[0]["text"] == "Delivered to a consumer, attempt 1"


def test_a_message_acquired_with_those_of_other_queues_has_an_event_and_only_its_marker_is_expanded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    timeline, expanded, acquires = Timeline("marq.messages/0/5"), list[list[int]](), MixedAcquire.acquires

    def expand(batch: MixedAcquire) -> list[Acquire]:
        expanded.append([*batch.offsets])
        return acquires(batch)

    monkeypatch.setattr(MixedAcquire, "acquires", expand)
    markers = [
        MixedAcquire(ANY_QUEUE, 7, FIRST, offsets, 30_000, ["a", "emails", "b"], offsets, [1, 1, 1])
        for offsets in ([1, 2, 3], [4, 5, 6], [7, 8, 9])
    ]

    read(timeline, *enumerate(markers))

    assert [(event["kind"], event["queue"]) for event in timeline.told()] == [("ACQUIRE", "emails")]
    assert (timeline.queues, expanded) == ({"emails"}, [[4, 5, 6]])


def test_a_message_that_expired_before_its_first_attempt_says_so() -> None:
    timeline = Timeline("marq.messages/0/5")

    read(timeline, (10, Fact(Kind.DEAD_LETTERED, "emails", 1, FIRST, [5], [0], [Cause.MESSAGE_EXPIRED])))

    assert [event["text"] for event in timeline.told()] == [
        "Dead-lettered before its first attempt, because it had expired before it could be delivered"
    ]


def test_a_message_that_failed_says_how_often_and_why_and_shows_the_last_traceback() -> None:
    timeline, identity = Timeline("marq.messages/0/5"), b"marq.messages/0/5"
    error = "ValueError: cannot bill order 2"

    read(
        timeline,
        (10, acquire(FIRST, [5])),
        (20, Release("emails", 7, FIRST, [5], [-1], True, [error])),
        (30, Fact(Kind.REDELIVERED, "emails", 1, FIRST, [5], [2], [Cause.RELEASED])),
        (40, acquire(AGAIN, [9], identity, attempt=2)),
        (50, Release("emails", 7, AGAIN, [9], [-1], True, [with_traceback(error, "Traceback: in bill")])),
        (60, Fact(Kind.DEAD_LETTERED, "emails", 1, AGAIN, [9], [2], [Cause.RELEASED])),
    )

    events = timeline.told()
    assert [event["text"] for event in events if event["kind"] in ("REDELIVERED", "DEAD_LETTERED")] == [
        "Redelivered for attempt 2, because it failed: ValueError: cannot bill order 2",
        "Dead-lettered after attempt 2, because it failed 2 times: ValueError: cannot bill order 2",
    ]
    released = [(event["detail"], event["traceback"]) for event in events if event["kind"] == "RELEASE"]
    assert released == [(error, ""), (error, "Traceback: in bill")]


@pytest.mark.parametrize(
    ("queue", "kinds", "places"),
    [
        ("emails", ["ACQUIRE", "RELEASE", "REDELIVERED", "ACQUIRE", "CANCEL"], {(FIRST, 5), (AGAIN, 9)}),
        ("search", ["ACQUIRE", "ACK", "CANCEL"], {(FIRST, 5)}),
    ],
)
def test_each_queue_of_a_topic_has_a_story_of_its_own(
    queue: str, kinds: list[str], places: set[tuple[Source, int]]
) -> None:
    timeline = Timeline("marq.messages/0/5", queue)

    told = read(
        timeline,
        (10, acquire(FIRST, [5])),
        (15, replace(acquire(FIRST, [5]), queue="search", holder=8)),
        (20, Release("emails", 7, FIRST, [5], [-1], True, ["ValueError: no"])),
        (30, Ack("search", 8, FIRST, [5])),
        (40, Fact(Kind.REDELIVERED, "emails", 1, FIRST, [5], [2], [Cause.RELEASED])),
        (50, acquire(AGAIN, [9], b"marq.messages/0/5", attempt=2)),
        # Of all queues.
        (60, Cancel(ANY_QUEUE, 9, FIRST, [5])),
    )

    assert (told, timeline.places) == (kinds, places)
    assert timeline.queues == {"emails", "search"}


def test_renewals_are_one_event_until_something_else_happens() -> None:
    timeline = Timeline("marq.messages/0/5")

    kinds = read(
        timeline,
        (10, acquire(FIRST, [5])),
        *((10 + second, Renew("emails", 7, FIRST, [5], 30_000)) for second in range(3)),
        (30, Release("emails", 7, FIRST, [5], [0], False, [RELEASED_BY_OPERATOR])),
        (40, Renew("emails", 7, FIRST, [5], 30_000)),
    )

    assert kinds == ["ACQUIRE", "RENEW", "RELEASE", "RENEW"]
    events = timeline.told()
    assert [event["markers"] for event in events] == [["0/0"], ["0/1", "0/2", "0/3"], ["0/4"], ["0/5"]]
    released = "Released by an operator, to be redelivered at once, without counting the attempt"
    assert (events[2]["text"], events[2]["detail"]) == (released, "")


def test_the_deliveries_of_a_queue_with_ordering_are_told_from_its_markers() -> None:
    timeline = Timeline("marq.messages/0/5")
    ordered = replace(acquire(FIRST, [5]), in_order=True)
    again = replace(acquire(FIRST, [5], attempt=2), in_order=True)

    read(
        timeline,
        (10, Resume("emails", 9, FIRST, [5], onwards=True)),
        (11, Resumed("emails", 9, FIRST, [5], 0, 0, [], [0], [0], [0], [""])),
        (12, ordered),
        (20, Release("emails", 7, FIRST, [5], [5_000], True, ["boom"])),
        (30, again),
        (35, Release("emails", 7, FIRST, [5], [BLOCKED_MS], True, ["once more"])),
        (40, Release("emails", 7, FIRST, [5], [LAST], True, ["again"])),
        (50, Fact(Kind.DEAD_LETTERED, "emails", 1, FIRST, [5], [2], [Cause.RELEASED])),
    )

    in_line = "lease of 30 s, delivered at its turn"
    assert [(event["text"], event["detail"]) for event in timeline.told()] == [
        ("Acquired by a consumer, attempt 1", in_line),
        ("Released by a consumer, to be redelivered in 5 s", "boom"),
        ("Acquired by a consumer, attempt 2", in_line),
        ("Released by a consumer; it blocks its key until it is delivered now or cancelled", "once more"),
        ("Released by a consumer after its last attempt", "again"),
        ("Dead-lettered after attempt 2, because it failed 2 times: again", ""),
    ]


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[Release]:
    """The releases that operators have written."""
    releases: list[Release] = []

    async def write(_: Actor, batches: Sequence[Release]) -> None:
        releases.extend(batches)

    monkeypatch.setattr(Actor, "_write", write)
    return releases


def actor_of(look: Callable[[str, str], Awaitable[Mapping[str, Any]]], **queues: Mapping[str, Any]) -> Actor:
    """Return the actor of a namespace with these queues; ``look`` finds open messages by queue and id."""
    return Actor(None, None, Mock(definitions=in_file(**queues), start=AsyncMock()), look, Mock(), Mock())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("delivery", "state", "holder", "released"),
    [
        ("at-least-once", "leased", 7, True),
        ("at-least-once", "leased_in_order", 7, False),
        ("at-least-once", "waiting_in_order", 0, False),
        ("at-least-once", "dispatched", 7, False),
        # Its consumer may dispatch it.
        ("at-most-once", "leased", 7, False),
    ],
)
async def test_an_operator_releases_a_message_only_if_that_repeats_no_dispatch_and_leaves_its_line_alone(
    written: list[Release], delivery: str, state: str, holder: int, released: bool
) -> None:
    async def look(queue: str, place: str) -> Mapping[str, Any]:
        return {"queue": queue, "state": state, "holder": holder, "place": place}

    assert await actor_of(look, emails={"delivery": delivery}).release("emails", ["t/0/1"]) == [released]
    assert [(batch.holder, batch.offsets) for batch in written] == [(7, [1])] * released


async def test_a_purge_is_refused_if_no_worker_reported_on_a_markers_partition(monkeypatch: pytest.MonkeyPatch) -> None:
    extent_now = AsyncMock()
    monkeypatch.setattr("marq_worker.web.dashboard.actor.extent_now", extent_now)
    cluster = Mock(topics=AsyncMock(return_value=Topics(4, 4, 10_000, 10_000)))
    monkeypatch.setattr("marq_worker.web.dashboard.actor.cluster_of", lambda settings: cluster)
    actor = actor_of(AsyncMock())

    with pytest.raises(MarqError, match="nothing was purged, because no worker reported on markers partition 1, 3"):
        await actor.extent("emails", {0: 1_000, 2: 1_000})
    extent_now.assert_not_called()
    assert await actor.extent("emails", dict.fromkeys(range(4), 1_000)) is extent_now.return_value


@pytest.mark.parametrize(("queue", "released"), [("emails", {"emails": 7}), ("", {"emails": 7, "search": 8})])
async def test_a_release_is_written_for_each_queue_that_is_meant(
    written: list[Release], queue: str, released: dict[str, int]
) -> None:
    holders = {"emails": 7, "search": 8}

    async def look(queue: str, place: str) -> Mapping[str, Any]:
        return {"queue": queue, "state": "leased", "holder": holders[queue], "place": "orders@aaaaaaaaaaaa/0/5"}

    actor = actor_of(look, emails={"topic": "orders"}, search={"topic": "orders"})

    assert await actor.release(queue, ["orders/0/5"]) == [True]
    assert {batch.queue: batch.holder for batch in written} == released
    # The id that the operator sees does not name the incarnation of the topic.
    assert {batch.source for batch in written} == {Source("orders@aaaaaaaaaaaa", 0)}


@pytest.mark.parametrize(
    ("batches", "status"),
    [
        ([], "waiting"),
        ([Ack("emails", 7, FIRST, [5])], "acknowledged"),
        ([Fact(Kind.REDELIVERED, "emails", 1, FIRST, [5], [2], [Cause.EXPIRED])], "waiting"),
        # The answer of a consumer whose lease has expired does not count.
        (
            [
                Fact(Kind.REDELIVERED, "emails", 1, FIRST, [5], [2], [Cause.EXPIRED]),
                Ack("emails", 7, FIRST, [5]),
            ],
            "waiting",
        ),
        ([Fact(Kind.CANCELLED, "emails", 1, FIRST, [5], [1], [Cause.CANCELLED])], "cancelled"),
        ([Renew("emails", 7, FIRST, [5], 30_000)], "finished"),
    ],
)
def test_the_last_event_that_counts_tells_the_status_of_a_message(batches: list[Batch], status: str) -> None:
    timeline = Timeline("marq.messages/0/5")
    read(timeline, *enumerate(batches))

    events = timeline.told()

    assert status_after(events) == status
    assert [event["late"] for event in events] == [number == 1 for number, _ in enumerate(events)]


def test_a_message_stands_where_it_was_taken_last_whatever_is_told_late_of_a_former_place() -> None:
    timeline = Timeline("marq.messages/0/5")
    identity = b"marq.messages/0/5"

    read(
        timeline,
        (10, acquire(FIRST, [5])),
        (20, Fact(Kind.REDELIVERED, "emails", 1, FIRST, [5], [2], [Cause.EXPIRED])),
        (30, acquire(AGAIN, [9], identity, attempt=2)),
        # From a consumer that has lost its lease.
        (40, Ack("emails", 7, FIRST, [5])),
    )

    assert last_place(timeline.told()) == "marq.messages/3/9"
    # A read that was cut off, or that began later.
    assert last_place(timeline.told()[-1:]) == "marq.messages/0/5"
    assert last_place([]) == ""


def test_a_message_that_was_delayed_is_known_by_its_sender_s_number() -> None:
    drawn = Source("~" + "ab" * 16, 1)
    timeline = Timeline(f"{drawn.topic}/1/3")
    delay = Delay("emails", 7, drawn, [3], [60_000], True, 3, [Payload(1, 1, b"emails", [], b"x")])

    assert read(timeline, (10, delay)) == ["DELAY"]
    assert timeline.told()[0]["text"] == "Delayed by its sender, due in 60 s"


def test_a_redrive_and_a_schedule_are_told_from_a_delay() -> None:
    for topic, text in (("marq.dead-letters", "Redriven, due at once"), (schedule_topic("nightly", "4f"), "Scheduled")):
        timeline = Timeline(f"{topic}/1/3")
        read(timeline, (10, Delay("emails", 7, Source(topic, 1), [3], [0], True, 3, [Payload(1, 1, b"e", [], b"x")])))

        assert timeline.told()[0]["text"].startswith(text)


def test_what_is_no_marker_is_passed_over() -> None:
    timeline = Timeline("marq.messages/0/5")
    record: Any = ConsumerRecord("marq.markers", 0, 0, 1, 1, None, b"\x00garbage", None, -1, 8, [])

    timeline.read(record, 0)

    assert timeline.told() == []


# --- forms ------------------------------------------------------------------------------------------------------------


def test_a_form_says_which_dead_letters_are_meant() -> None:
    selection = read_dead_letters({"queue": "emails", "kind": "", "to": "again", "limit": "5", "rate": "0.5"}, [])

    assert selection == DeadLetterSelection("emails", {"kind": ""}, "again", 5, 0.5)


@pytest.mark.parametrize(
    "form",
    [
        {},
        {"queue": "emails", "limit": "0"},
        {"queue": "emails", "limit": "1" * 5_000},
        {"queue": "emails", "rate": "fast"},
    ],
)
def test_a_form_that_means_nothing_or_everything_is_refused(form: dict[str, str]) -> None:
    with pytest.raises(ConfigError):
        read_dead_letters(form, [])


@pytest.mark.parametrize("ids", [[], [" "], ["nonsense"], [f"t/0/{number}" for number in range(MAX_IDS + 1)]])
def test_ids_that_are_none_or_too_many_are_refused(ids: list[str]) -> None:
    with pytest.raises(ConfigError):
        read_ids(ids)


@pytest.mark.parametrize("address", ["https://else.where/", "//else.where/", "/\\else.where", "x", "/a\r\nb: c", "//["])
def test_nobody_is_led_elsewhere_after_an_action(address: str) -> None:
    assert inside(address) == "/"


def test_the_notice_of_an_action_takes_the_place_of_the_former_one() -> None:
    answer = see("/queues/a%2Fb/messages?state=dead&did=cancel&done=1&late=0", {"did": "release"})

    assert answer.headers["Location"] == "/queues/a%2Fb/messages?state=dead&did=release"


# --- tasks ------------------------------------------------------------------------------------------------------------


async def test_a_task_that_is_stopped_says_how_far_it_came_and_is_audited(caplog: pytest.LogCaptureFixture) -> None:
    began = asyncio.Event()

    class Slow(PretendActor):
        async def settle(self, action: str, selection: DeadLetterSelection, progress: Any) -> Any:
            progress(Redriven(9, 3, 2))
            began.set()
            await asyncio.Event().wait()

    actions = AuditedActions(Slow(PretendNamespace()), Tasks())
    number = actions.to_dead_letters(
        read_action("redrive"), DeadLetterSelection("emails", {}), 9, {"who": "ann", "from": "::1"}
    )
    await began.wait()

    task = await actions.tasks.stop_one(number)

    assert task is not None
    assert (task.state, task.told()["done"], task.told()["requested"]) == ("stopped", 2, 3)
    lines = [record.getMessage() for record in caplog.records if record.name == "marq.audit"]
    assert len(lines) == 2
    assert all('"audit": "redrive", "who": "ann"' in line for line in lines)
    assert '"error": "CancelledError"' in lines[1]


async def test_an_action_whose_request_is_cancelled_is_audited(caplog: pytest.LogCaptureFixture) -> None:
    class Slow(PretendActor):
        async def pause(self, queue: str, duration_s: float | None) -> None:
            raise asyncio.CancelledError

    actions = AuditedActions(Slow(PretendNamespace()), Tasks())
    with pytest.raises(asyncio.CancelledError):
        await actions.run(read_action("pause"), {"queue": "emails"}, {"who": "ann"})

    assert [record.getMessage() for record in caplog.records if record.name == "marq.audit"] == [
        '{"audit": "pause", "who": "ann", "queue": "emails", "error": "CancelledError"}'
    ]


async def test_many_messages_are_acted_on_in_pieces_and_what_came_too_late_is_told() -> None:
    class Counting(PretendActor):
        async def cancel(self, queue: str, ids: Sequence[str]) -> Sequence[bool]:
            self.asked.append(("cancel", len(ids)))
            return [number != 0 for number, _ in enumerate(ids)]

    actor = Counting(PretendNamespace())
    actions = AuditedActions(actor, Tasks())
    ids = [f"t/0/{number}" for number in range(2 * MAX_IDS + 500)]

    actions.to_matching(read_action("cancel"), "emails", ids, {"who": "ann", "from": "::1"})
    [task] = actions.tasks.all()
    assert task.running is not None
    await task.running

    told = task.told()
    assert (told["state"], told["chosen"], told["requested"], told["done"], told["already_settled"]) == (
        "done", 2_500, 2_500, 2_497, 3,
    )  # fmt: skip
    assert actor.asked == [("cancel", 1_000), ("cancel", 1_000), ("cancel", 500)]


async def test_so_many_tasks_run_at_a_time_and_no_more() -> None:
    tasks = Tasks()

    async def wait(progress: Any) -> Any:
        await asyncio.Event().wait()

    for _ in range(MAX_RUNNING):
        tasks.begin("redrive", "emails", "all", Redriven(1), wait)
    with pytest.raises(TooManyTasks):
        tasks.begin("redrive", "emails", "all", Redriven(1), wait)
    await tasks.stop()

    assert {task.state for task in tasks.all()} == {"stopped"}


# --- words ------------------------------------------------------------------------------------------------------------


def test_durations_have_two_units_at_the_most() -> None:
    assert [age(seconds) for seconds in (None, 0, 9.96, 75, 3_661, 90_061, -12)] == [
        "\N{EN DASH}", "0.0 s", "10.0 s", "1 min 15 s", "1 h 1 min", "1 d 1 h", "-12 s",
    ]  # fmt: skip
    assert [rate(value) for value in (None, 0.01, 3.14159, 1_234.5)] == ["\N{EN DASH}", "0", "3.1", "1,234"]


def test_a_time_ago_has_one_unit_and_the_moment_as_its_title() -> None:
    now = datetime.now(UTC)
    shown = [str(ago(now - timedelta(seconds=seconds))) for seconds in (-5, 0, 59, 200, 7_300, 200_000)]

    assert [text[text.index(">") + 1 : -len("</time>")] for text in shown] == [
        "just now", "just now", "59 s ago", "3 min ago", "2 h ago", "2 d ago",
    ]  # fmt: skip
    assert f'title="{now - timedelta(seconds=200):%Y-%m-%d %H:%M:%S} UTC"' in shown[3]
    assert [ago(None), ago("never")] == ["\N{EN DASH}", "never"]


def test_memory_and_load_have_units_and_unknown_ones_a_dash() -> None:
    assert [memory(size) for size in (None, 0, 200 << 20, 3 << 29)] == ["\N{EN DASH}", "0 MiB", "200 MiB", "1.5 GiB"]
    assert [load(share) for share in (None, 0.004, 1.5)] == ["\N{EN DASH}", "0%", "150%"]


def test_a_moment_that_is_none_is_shown_as_it_is_and_escaped_later() -> None:
    assert moment("never") == "never"
    assert str(moment("2026-11-22T06:00:00+01:00")).endswith(">2026-11-22 05:00:00</time>")


def test_a_lateness_that_is_not_known_has_no_unit_and_a_long_one_is_in_minutes() -> None:
    assert [milliseconds(value) for value in (None, 210, 121_317)] == ["\N{EN DASH}", "210 ms", "2 min 1 s"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"delays": [1, 5], "jitter": False}, "delays = [1, 5], jitter = no"),
        (
            {"per_key": {"concurrency": 1, "rate": "9/s"}, "rate": None},
            "per_key = { concurrency = 1, rate = 9/s }, rate = none",
        ),
        ([1, 2], "1, 2"),
        ({}, "none"),
        ([], "none"),
    ],
)
def test_a_setting_shows_which_values_are_those_of_a_table_in_it(value: Any, text: str) -> None:
    assert setting(value) == text
