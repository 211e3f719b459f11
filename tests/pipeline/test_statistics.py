from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from marq.wire.names import ORDERING_KEY_HEADER
from pipeline import tables
from pipeline.errors import PipelineError
from pipeline.jobs.stats import chosen
from pipeline.lake import Lake
from pipeline.lifecycle import LIFECYCLE
from pipeline.statistics import MAX_ATTEMPTS, MAX_KEYS, UNKNOWN_QUEUE, message_keys, statistics
from pipeline.windows import Windows, chosen_windows, span
from tests.pipeline.conftest import Command
from tests.pipeline.directory import Directory, Tables, arrow

NOON = datetime(2026, 11, 21, 12, tzinfo=UTC)
NOON_MS = int(NOON.timestamp() * 1000)
MINUTE_MS = 60_000
#: The first query compiles everything, which takes as long as all others together.
pytestmark = pytest.mark.timeout(900)

Row = dict[str, Any]
#: Rows of the table by queue and number of the window; None for the totals.
Found = dict[tuple[str, int | None], Any]


def at(seconds: float) -> datetime:
    return NOON + timedelta(seconds=seconds)


def message(queue: str, sent: float, **columns: Any) -> Row:
    """A message that is open, and was sent this many seconds after noon."""
    found = {"queue": queue, "sent_at": at(sent), "state": "leased", "open": True, "size": 100, "deliveries": []}
    return {**found, **columns}


def delivery(acquired: float | None, **columns: Any) -> Row:
    holder = None if acquired is None else "00000000000000aa"
    acquired_at = None if acquired is None else at(acquired)
    return {"topic": "marq.messages", "holder": holder, "acquired_at": acquired_at, **columns}


def acked(queue: str, sent: float, acquired: float, ended: float, **columns: Any) -> Row:
    """A message that was delivered once."""
    one = delivery(
        acquired,
        available_at=at(sent),
        outcome="acked",
        settled_at=at(ended),
        ended_at=at(ended),
        wait_ms=round((acquired - sent) * 1000),
        run_ms=round((ended - acquired) * 1000),
    )
    end = {"state": "acked", "open": False, "ended_at": at(ended), "attempts": 1, "deliveries": [one]}
    return message(queue, sent, **{**end, **columns})


def frame(spark: SparkSession, *messages: Row) -> DataFrame:
    names = LIFECYCLE["deliveries"].dataType.elementType.names  # type: ignore[attr-defined]
    rows = [
        tuple(
            [tuple(delivery.get(name) for name in names) for delivery in row["deliveries"] or ()]
            if field == "deliveries" and row["deliveries"] is not None
            else row.get(field)
            for field in LIFECYCLE.names
        )
        for row in messages
    ]
    return spark.createDataFrame(rows, LIFECYCLE)


def windows(minutes: int) -> Windows:
    return Windows(NOON_MS, NOON_MS + minutes * MINUTE_MS, MINUTE_MS)


def by_window(found: DataFrame) -> Found:
    return {(row.queue, None if row.scope == "total" else row.starts_at.minute): row for row in found.collect()}


WAITED = delivery(None, topic=f"~{'0' * 32}", due_at=at(90), outcome="delivered", ended_at=at(90.2), late_ms=200)
EXPIRED = delivery(1, outcome="expired", due_at=at(30), ended_at=at(30.1), late_ms=100)
RELEASED = delivery(31, outcome="released", settled_at=at(32), ended_at=at(70), late_ms=300, run_ms=1000)
REJECTED = delivery(71, outcome="rejected", settled_at=at(72), ended_at=at(72.1), run_ms=1000)
#: When each message of the queue "many" was sent, and when it ended.
LIVES = [(start * 7 % 290, start * 7 % 290 + 1 + start * 37 % 200) for start in range(120)]
MINUTES = 9
#: By queue: each test looks at one. Spark takes longer to plan a query than to run it, so they share one.
MESSAGES = [
    acked("events", sent=50, acquired=59.999, ended=120),
    acked("events", 10, 20, 30),
    *[acked("hundred", 0, number / 1000, number / 1000 + 0.5) for number in range(1, 101)],
    acked("open", -500, -400, 70),  # from before, ended in the second window
    acked("open", 10, 10, 120),  # ended when the third one began
    message("open", 100),
    acked("open", 130, 131, 132),
    acked("open", -90, -80, -70),
    message("later", 5, due_at=at(90), deliveries=[WAITED, delivery(91, available_at=at(90), wait_ms=1000)]),
    message("later", 6, due_at=at(900), state="delayed", deliveries=[delivery(None, topic="~", due_at=at(900))]),
    message(
        "wrong", 0, state="dead", open=False, ended_at=at(72.1), attempts=3, deliveries=[EXPIRED, RELEASED, REJECTED]
    ),
    message("wrong", 1, state="cancelled", open=False, ended_at=at(2)),
    *[
        acked("attempts", 0, 1, end, attempts=attempts)
        for attempts, end in [(1, 5), (1, 6), (3, 70), (MAX_ATTEMPTS + 5, 71)]
    ],
    # Acknowledged after its dead letter.
    message(
        "both",
        0,
        state="acked",
        open=False,
        ended_at=at(30.1),
        attempts=5,
        dead_letters=1,
        redrives=0,
        deliveries=[delivery(1, outcome="expired", due_at=at(30), ended_at=at(30.1), acked_at=at(70))],
    ),
    message("bare", 1, size=None, deliveries=None),
    message("bare", 2, size=None, state="lost", open=False),
    {"queue": None, "sent_at": None, "state": "strange", "open": False, "deliveries": None},
    *[acked("many", begin, begin, end) for begin, end in LIVES],
]


@pytest.fixture(scope="module")
def found(spark: SparkSession) -> Found:
    return by_window(statistics(frame(spark, *MESSAGES), windows(MINUTES)))


def test_each_event_counts_in_the_window_in_which_it_happened(found: Found) -> None:
    counts = {
        window: (row.sent, row.delivered, row.acked) for (queue, window), row in found.items() if queue == "events"
    }
    nothing = dict.fromkeys((1, *range(3, MINUTES)), (0, 0, 0))
    assert counts == {0: (2, 2, 1), 2: (0, 0, 1), None: (2, 2, 2), **nothing}
    assert found["events", 0].sent_per_second == pytest.approx(2 / 60)
    assert found["events", None].acked_per_second == pytest.approx(2 / 540)
    assert (found["events", 1].seconds, found["events", None].seconds) == (60, 540)


def test_percentiles_are_values_that_occurred(found: Found) -> None:
    total = found["hundred", None]

    assert (total.wait_p50_ms, total.wait_p95_ms, total.wait_p99_ms, total.wait_max_ms) == (50, 95, 99, 100)
    assert (total.run_p50_ms, total.run_max_ms) == (500, 500)
    assert (total.size_mean_bytes, total.size_p99_bytes) == (100, 100)


def test_open_messages_are_counted_at_the_end_of_each_window(found: Found) -> None:
    assert [found["open", window].open for window in range(4)] == [2, 2, 1, 1]
    assert [found["open", window].oldest_open_ms for window in range(3)] == [560_000, 110_000, 80_000]
    assert found["open", None].open == 1


def test_a_delayed_message_is_delayed_until_it_is_out_and_open_from_then_on(found: Found) -> None:
    assert [(found["later", window].delayed, found["later", window].open) for window in range(2)] == [(2, 0), (1, 1)]
    assert found["later", 1].oldest_open_ms == 29_800
    assert (found["later", 1].late_delivery_p50_ms, found["later", 1].late_delivery_max_ms) == (200, 200)
    assert found["later", 1].delivered == 1


def test_failures_are_counted_by_kind(found: Found) -> None:
    kinds = ("expired", "released", "rejected", "dead", "cancelled")
    assert [getattr(found["wrong", 0], kind) for kind in kinds] == [1, 1, 0, 0, 1]
    assert [getattr(found["wrong", 1], kind) for kind in kinds] == [0, 0, 1, 1, 0]
    assert [found["wrong", window].late_redelivery_max_ms for window in (0, 1, None)] == [100, 300, 300]


def test_a_message_that_is_acknowledged_after_its_dead_letter_is_both_as_in_the_audit(found: Found) -> None:
    assert [(found["both", window].dead, found["both", window].acked) for window in (0, 1, None)] == [
        (1, 0), (0, 1), (1, 1),
    ]  # fmt: skip


def test_attempts_are_counted_when_a_message_ends(found: Found) -> None:
    assert found["attempts", 0].attempts == {1: 2}
    assert found["attempts", 1].attempts == {3: 1, MAX_ATTEMPTS: 1}
    assert found["attempts", 2].attempts == {}
    assert found["attempts", None].attempts == {1: 2, 3: 1, MAX_ATTEMPTS: 1}
    assert found["attempts", None].attempts_max == MAX_ATTEMPTS + 5


def test_unknown_values_are_ignored(found: Found) -> None:
    assert (found["bare", 0].sent, found["bare", 0].open, found["bare", 0].size_mean_bytes) == (2, 1, None)
    assert found[UNKNOWN_QUEUE, 0].sent == 0


def test_the_oldest_message_of_each_window_is_found_among_many(found: Found) -> None:
    for window in range(MINUTES):
        end = (window + 1) * 60
        held = [begin for begin, ended in LIVES if begin < end <= ended]
        assert found["many", window].open == len(held)
        assert found["many", window].oldest_open_ms == ((end - min(held)) * 1000 if held else None)


def test_a_range_that_cuts_windows_counts_only_what_is_in_it(spark: SparkSession) -> None:
    rows = frame(spark, *[acked("emails", second, second, second) for second in (10, 40, 70, 110)])

    found = by_window(statistics(rows, Windows(NOON_MS + 30_000, NOON_MS + 90_000, MINUTE_MS)))

    assert [found["emails", window].sent for window in (0, 1, None)] == [1, 1, 2]
    assert [found["emails", window].seconds for window in (0, 1, None)] == [30, 30, 60]


def test_the_range_is_all_that_is_known_and_its_windows_are_few(spark: SparkSession) -> None:
    rows = frame(spark, acked("emails", 1, 2, 3000))

    first = span(rows).first()
    found = chosen_windows(rows, None, None, None)

    assert first is not None
    assert (first.begin_ms, first.last_ms) == (NOON_MS + 1_000, NOON_MS + 3_000_000)
    assert (found.begin_ms, found.length_ms, found.count) == (NOON_MS, 30_000, 101)


@pytest.mark.parametrize(
    ("begin", "end", "length", "said"),
    [
        (2000, 1000, None, "is not before --to"),
        (0, 10**12, 1000, "expected at most 10,000; take"),
    ],
)
def test_an_invalid_range_is_refused(begin: int, end: int, length: int | None, said: str) -> None:
    with pytest.raises(PipelineError, match=said):
        Windows.cut(begin, end, length)


def test_an_unknown_queue_is_refused_with_similar_names(spark: SparkSession) -> None:
    rows = frame(spark, message("emails", 1), message("reports", 2))

    with pytest.raises(PipelineError, match="--queue email: not in the table lifecycle, which has emails"):
        chosen(rows, ["email"])


def test_a_table_without_messages_is_refused(spark: SparkSession) -> None:
    with pytest.raises(PipelineError, match="no messages: run ingest and lifecycle"):
        chosen_windows(frame(spark), None, None, None)


def record(offset: int, *headers: tuple[str, bytes], queue: str | None = "emails", **columns: Any) -> Row:
    """A record of the messages topic, or without ``queue`` of a queue's own topic, with its payload."""
    return {"topic": "marq.messages", "partition": 0, "offset": offset, "queue": queue, "headers": headers, **columns}


def records(spark: SparkSession, *rows: Row) -> DataFrame:
    schema = StructType([*tables.MESSAGES.fields, *tables.PAYLOAD.fields])
    return spark.createDataFrame([tuple(row.get(name) for name in schema.names) for row in rows], schema)


def test_a_key_is_the_ordering_key_or_the_value_of_a_header(spark: SparkSession) -> None:
    tenant = ("tenant", b"acme")
    rows = records(
        spark,
        record(0, (ORDERING_KEY_HEADER, b"a"), (ORDERING_KEY_HEADER, b"b"), tenant, key=b"emails"),
        record(1, key=b"emails"),
        record(2, (ORDERING_KEY_HEADER, b""), key=b"emails"),
        # A redelivery.
        record(3, (ORDERING_KEY_HEADER, b"b"), tenant, id="marq.messages/0/0", key=b"emails"),
        record(4, (ORDERING_KEY_HEADER, b"header"), topic="orders", queue=None, key=b"\xff"),
    )

    def keys(key: str) -> dict[str, str]:
        return {row.id: row.key for row in message_keys(rows, key).collect()}

    assert keys("ordering") == {"marq.messages/0/0": "b", "orders/0/4": "\ufffd"}
    assert keys("header:tenant") == {"marq.messages/0/0": "acme"}


def test_the_busiest_keys_of_each_queue_have_totals_of_their_own(spark: SparkSession) -> None:
    noisy = [acked("emails", 0, number, number + 1, id=f"noisy/{number}") for number in range(1, 4)]
    failed = message("emails", 1, id="quiet/1", state="dead", open=False, ended_at=at(72.1), deliveries=[REJECTED])
    stale = message("emails", 2, id="quiet/2", state="message_expired", open=False, ended_at=at(9))
    waits = message("reports", 3, id="quiet/3")
    rare = [message("rare", 1, id=f"key {number:02}/1") for number in range(MAX_KEYS + 5)]
    rows = [*noisy, failed, stale, waits, *rare, acked("emails", 0, 5, 6, id="without a key")]
    keys = spark.createDataFrame(
        [(row["id"], row["id"].partition("/")[0]) for row in rows if "/" in row["id"]], "id string, key string"
    )

    found = statistics(frame(spark, *rows), windows(2), keys).collect()

    of_key = {(row.queue, row.key): row for row in found if row.scope == "key"}
    busy, quiet = of_key["emails", "noisy"], of_key["emails", "quiet"]
    assert (busy.sent, busy.acked, busy.wait_p50_ms, busy.wait_p99_ms) == (3, 3, 2_000, 3_000)
    assert (quiet.sent, quiet.rejected, quiet.dead, quiet.message_expired, quiet.open) == (2, 1, 1, 1, 0)
    assert (of_key["reports", "quiet"].sent, of_key["reports", "quiet"].open) == (1, 1)
    assert [key for queue, key in sorted(of_key) if queue == "rare"] == [
        f"key {number:02}" for number in range(MAX_KEYS)
    ]
    totals = {row.queue: row.sent for row in found if row.scope == "total"}
    assert totals == {"emails": 6, "reports": 1, "rare": MAX_KEYS + 5}
    assert {row.key for row in found if row.scope != "key"} == {None}


@pytest.mark.verify
def test_the_job_writes_table_json_plots_and_page(spark: SparkSession, data: Path, command: Command) -> None:
    directory = Directory(spark, data)
    schema = StructType([*tables.MESSAGES.fields, *tables.PAYLOAD.fields])
    sent = record(7, (ORDERING_KEY_HEADER, b"<b>"), queue="<script>", sent_at=at(1))
    directory.bring(Tables(arrow([], tables.MARKERS), arrow([sent], schema), arrow([], tables.DEAD_LETTERS)))
    one = acked("<script>", 1, 2, 3, id="marq.messages/0/7")
    directory.lake.write("lifecycle", frame(spark, one, acked("emails", 1, 2, 3)))

    done = command("stats --window 1s --queue '<script>'")

    assert (done.code, done.errors) == (0, "")
    assert "<script>" in done.out
    written = json.loads((data / "stats.json").read_text())
    assert written["queues"]["<script>"]["total"]["acked"] == 1
    assert written["queues"]["<script>"]["windows"]["sent_per_second"] == [1, 0, 0]
    assert sorted(path.name for path in (data / "plots").glob("*.png")) == [
        "attempts.png", "lateness.png", "open.png", "rates.png", "times.png",
    ]  # fmt: skip
    [key] = written["queues"]["<script>"]["keys"]
    assert (key["key"], key["acked"], key["wait_p99_ms"]) == ("<b>", 1, 1000)
    page = (data / "report.html").read_text()
    assert "&lt;b&gt;" in page
    assert "<script>" not in page
    assert Lake(spark, str(data)).read("stats").where("scope = 'total'").count() == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--window 0s", "--window '0s': expected at least 1s"),
        ("--window soon", "--window 'soon': expected a number and a unit"),
        ("--key tenant", '--key: expected "ordering" for the ordering key, or "header:NAME"'),
    ],
)
def test_invalid_options_are_one_sentence(command: Command, words: str, said: str) -> None:
    assert command(f"stats {words}").refusal.startswith(said)
