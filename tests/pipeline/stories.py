"""Stories of single messages, as rows of the topics."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from pipeline.tables import DEAD_LETTERS, MARKERS, MESSAGES
from tests.pipeline.directory import Directory, Tables, arrow

BEGIN = datetime(2026, 1, 5, tzinfo=UTC)
MESSAGES_TOPIC, LETTERS_TOPIC = "marq.messages", "marq.dead-letters"
LEASE_MS = 30_000
DRAWN = "~" + "5" * 32


def at(seconds: float) -> datetime:
    return BEGIN + timedelta(seconds=seconds)


@dataclass
class Log:
    """The contents of the topics; each line of a story is a call."""

    markers: list[dict[str, Any]] = field(default_factory=list)
    messages: list[dict[str, Any]] = field(default_factory=list)
    letters: list[dict[str, Any]] = field(default_factory=list)
    #: The contents of the round before.
    after: Log | None = None

    @property
    def end(self) -> int:
        """The offset of the next marker."""
        return len(self.markers) + (0 if self.after is None else self.after.end)

    def record(self, offset: int, seconds: float, *, copy_of: str | None = None, attempt: int | None = None) -> str:
        row = {"topic": MESSAGES_TOPIC, "partition": 0, "offset": offset, "sent_at": at(seconds), "queue": "q"}
        self.messages.append({**row, "size": 5, "id": copy_of, "attempt": attempt})
        return f"{MESSAGES_TOPIC}/0/{offset}"

    def letter(self, offset: int, of: int, id_: str, seconds: float, *, topic: str = MESSAGES_TOPIC) -> None:
        row = {"topic": LETTERS_TOPIC, "partition": 0, "offset": offset, "sent_at": at(seconds), "queue": "q"}
        origin = {"origin_topic": topic, "origin_partition": 0, "origin_offset": of, "dead_lettered_at": at(seconds)}
        self.letters.append({**row, "size": 5, "id": id_, "reason": "bad", **origin})

    def say(self, kind: str, offset: int | None, seconds: float, topic: str = MESSAGES_TOPIC, **said: Any) -> None:
        row = {"log_partition": 0, "log_offset": self.end, "index": 0, "logged_at": at(seconds), "version": 1}
        who = {"holder": "a" * 16, "queue": "q", "topic": topic, "partition": 0, "offset": offset}
        if kind == "ACQUIRE":
            said = {"lease_ms": LEASE_MS, "from_offset": offset, "attempt": 1, "size": 5, **said}
        if kind == "DELAY":
            said = {"attempt": 1, "size": 5, "record_at": at(seconds), **said}
        self.markers.append({**row, "kind": kind, **who, **said})

    def tables(self) -> Tables:
        return Tables(arrow(self.markers, MARKERS), arrow(self.messages, MESSAGES), arrow(self.letters, DEAD_LETTERS))


def directory_for(spark: SparkSession, path: Path, *, dated: bool = False) -> Directory:
    """Return a directory for the stories: retention has removed a record since the first ingest."""
    return Directory(spark, path, {MESSAGES_TOPIC: {"0": -1}}, {MESSAGES_TOPIC: {"0": 0}}, dated=dated)


def told() -> tuple[Log, dict[str, dict[str, Any]]]:
    """Return independent stories of single messages, and the expected rows."""
    log, wanted = Log(), {}
    say, record = log.say, log.record
    fact = {"holder": "f" * 16}
    say("TICK", None, 0, None, queue=None)

    wanted[record(0, 1)] = {"state": "acked", "outcomes": ["acked"], "wait_ms": [1_000], "run_ms": [3_000]}
    say("ACQUIRE", 0, 2)
    say("RENEW", 0, 3, lease_ms=LEASE_MS)
    say("ACK", 0, 5)

    one = record(1, 1)
    wanted[one] = {"state": "acked", "outcomes": ["released", "acked"], "attempts": 2, "late_ms": [500, None]}
    say("ACQUIRE", 1, 2)
    say("RELEASE", 1, 4, delay_ms=10_000, counted=True, text="boom 7")
    say("REDELIVERED", 1, 14.5, attempt=2, cause="RELEASED", **fact)
    record(101, 14.4, copy_of=one, attempt=2)
    say("ACQUIRE", 101, 15, attempt=2, id=one)
    say("ACK", 101, 16)

    one = record(2, 1)
    wanted[one] = {"state": "leased", "open": True, "outcomes": ["expired", None], "late_ms": [1_000, None]}
    say("ACQUIRE", 2, 2)
    say("RENEW", 2, 20, lease_ms=LEASE_MS)
    say("REDELIVERED", 2, 51, attempt=2, cause="EXPIRED", **fact)
    record(102, 50.9, copy_of=one, attempt=2)
    say("ACQUIRE", 102, 1_090, attempt=2, id=one)

    one = record(3, 1)
    wanted[one] = {"state": "dead", "outcomes": ["rejected"], "dead_letters": 1, "run_ms": [2_000]}
    say("ACQUIRE", 3, 2)
    say("REJECT", 3, 4, text="bad")
    say("DEAD_LETTERED", 3, 4.5, attempt=1, cause="REJECTED", **fact)
    log.letter(0, 3, one, 4.4)

    wanted[f"{DRAWN}/0/0"] = {"state": "acked", "outcomes": ["delivered", "acked"], "late_ms": [500, None]}
    say("DELAY", 0, 1, DRAWN, due_at=at(10))
    say("RESCHEDULE", 0, 2, DRAWN, due_at=at(20))
    say("DELIVERED", 0, 20.5, DRAWN, attempt=1, cause="DUE", **fact)
    record(104, 20.4, copy_of=f"{DRAWN}/0/0", attempt=1)
    say("ACQUIRE", 104, 21, id=f"{DRAWN}/0/0")
    say("ACK", 104, 22)

    wanted[f"{DRAWN}/0/1"] = {"state": "cancelled", "outcomes": ["cancelled"]}
    say("DELAY", 1, 1, DRAWN, due_at=at(100_000))
    say("CANCEL", 1, 2, DRAWN)
    say("CANCELLED", 1, 3, DRAWN, attempt=1, cause="CANCELLED", **fact)
    # The fact is still to come, and should have come long ago.
    wanted[f"{DRAWN}/0/2"] = {"state": "delayed", "open": True, "outcomes": [None], "differences": 1}
    say("DELAY", 2, 1, DRAWN, due_at=at(100_000))
    say("CANCEL", 2, 2, DRAWN)
    wanted[f"{DRAWN}/0/3"] = {"state": "delayed", "open": True, "outcomes": [None]}
    say("DELAY", 3, 1, DRAWN, due_at=at(100_000))

    one = record(5, 1)  # cancelled while it was held, which is too late, and again when it waited
    wanted[one] = {"state": "cancelled", "outcomes": ["cancelled"]}
    say("ACQUIRE", 5, 2)
    say("CANCEL", 5, 3)
    say("RELEASE", 5, 4, delay_ms=100_000, counted=True)
    say("CANCEL", 5, 5)
    say("CANCELLED", 5, 6, attempt=1, cause="CANCELLED", **fact)

    one = record(6, 1)  # the ack comes late, and its copy is acked, too
    wanted[one] = {"state": "acked", "outcomes": ["expired", "acked"], "causes": ["acked late"], "duplicates": 1}
    say("ACQUIRE", 6, 2)
    say("REDELIVERED", 6, 33, attempt=2, cause="EXPIRED", **fact)
    record(106, 32.9, copy_of=one, attempt=2)
    say("ACK", 6, 34)
    say("ACQUIRE", 106, 35, attempt=2, id=one)
    say("ACK", 106, 36)

    one = record(7, 1)  # the ack comes between copy and fact
    wanted[one] = {"state": "acked", "outcomes": ["acked", "acked"], "causes": ["acked behind the copy"]}
    say("ACQUIRE", 7, 2)
    record(107, 32.9, copy_of=one, attempt=2)
    say("ACK", 7, 32.95)
    say("REDELIVERED", 7, 33, attempt=2, cause="EXPIRED", **fact)
    say("ACQUIRE", 107, 34, attempt=2, id=one)
    say("ACK", 107, 35)

    one = record(8, 1)  # … and between a dead letter and its fact
    wanted[one] = {"state": "acked", "outcomes": ["acked"], "dead_letters": 1, "acked_and_dead": 1}
    say("ACQUIRE", 8, 2, attempt=5)
    log.letter(1, 8, one, 32.9)
    say("ACK", 8, 32.95)
    say("DEAD_LETTERED", 8, 33, attempt=5, cause="EXPIRED", **fact)

    wanted[record(9, 1)] = {"state": "acked", "outcomes": ["acked"], "holders": ["b" * 16]}  # its commit had failed
    say("ACQUIRE", 9, 2)
    say("ACQUIRE", 9, 3, holder="b" * 16)
    say("RELEASE", 9, 3.5, delay_ms=0, counted=True)
    say("ACK", 9, 4, holder="b" * 16)

    one = record(10, 1)  # a copy whose transaction was aborted was read, and acked: no record of it is left
    wanted[one] = {
        "state": "acked",
        "outcomes": ["expired", "acked", "acked"],
        "causes": ["ended while held", "aborted copy"],
    }
    say("ACQUIRE", 10, 2)
    say("ACQUIRE", 110, 33, attempt=2, id=one)
    say("ACK", 110, 34)
    record(111, 35, copy_of=one, attempt=2)
    say("REDELIVERED", 10, 35.1, attempt=2, cause="EXPIRED", **fact)
    say("ACQUIRE", 111, 36, attempt=2, id=one)
    say("ACK", 111, 37)

    wanted[record(11, 1)] = {"state": "acked", "outcomes": ["acked"]}  # at most once
    say("ACQUIRE", 11, 2)
    say("DISPATCH", 11, 3, lease_ms=LEASE_MS)
    say("ACK", 11, 4)
    wanted[record(12, 1)] = {"state": "abandoned", "outcomes": ["abandoned"], "late_ms": [1_000]}
    say("ACQUIRE", 12, 2)
    say("DISPATCH", 12, 3, lease_ms=LEASE_MS)
    say("ABANDONED", 12, 34, attempt=1, cause="EXPIRED", **fact)

    one = record(13, 1)  # died, was sent back, and is done
    wanted[one] = {"state": "acked", "outcomes": ["rejected", "delivered", "acked"], "redrives": 1, "dead_letters": 1}
    say("ACQUIRE", 13, 2)
    say("REJECT", 13, 3, text="bad")
    log.letter(2, 13, one, 3.4)
    say("DEAD_LETTERED", 13, 3.5, attempt=1, cause="REJECTED", **fact)
    say("DELAY", 2, 1_000, LETTERS_TOPIC, due_at=at(1_000), from_offset=2, id=one)
    record(113, 1_000.4, copy_of=one, attempt=1)
    say("DELIVERED", 2, 1_000.5, LETTERS_TOPIC, attempt=1, cause="DUE", **fact)
    say("ACQUIRE", 113, 1_001, id=one)
    say("ACK", 113, 1_002)

    one = record(14, 1)  # died, and its dead letter was deleted
    wanted[one] = {"state": "dead", "outcomes": ["rejected"], "dead_letters": 1}
    say("ACQUIRE", 14, 2)
    say("REJECT", 14, 3, text="bad")
    log.letter(3, 14, one, 3.4)
    say("DEAD_LETTERED", 14, 3.5, attempt=1, cause="REJECTED", **fact)
    say("DISCARD", 3, 1_000, LETTERS_TOPIC)

    one = record(15, 1)  # to be delivered later, by a header
    wanted[one] = {"state": "acked", "outcomes": ["delivered", "acked"], "wait_ms": [None, 1_000]}
    say("ACQUIRE", 15, 2, due_at=at(10))
    record(115, 10.4, copy_of=one, attempt=1)
    say("DELIVERED", 15, 10.5, attempt=1, cause="DUE", **fact)
    say("ACQUIRE", 115, 11.4, id=one)
    say("ACK", 115, 12)

    one = record(19, 1)  # failed its last attempt: the delay of its RELEASE is ignored
    wanted[one] = {"state": "dead", "outcomes": ["released"], "dead_letters": 1, "late_ms": [0]}
    say("ACQUIRE", 19, 2, attempt=5)
    say("RELEASE", 19, 3, delay_ms=40_000, counted=True, text="boom 7")
    log.letter(4, 19, one, 3.4)
    say("DEAD_LETTERED", 19, 3.5, attempt=5, cause="RELEASED", **fact)

    ordered = {"in_order": True}
    one = record(20, 1)  # of a queue with ordering: delivered again in its place, hours after its lease
    wanted[one] = {"state": "acked", "outcomes": ["acked"], "attempts": 3, "run_ms": [1_000]}
    wanted[one] |= {"duplicates": 1, "causes": ["ended while held"]}
    say("RESUME", 20, 1)
    say("RESUMED", 20, 1.5, attempt=1, **fact)
    say("ACQUIRE", 20, 2, **ordered)
    say("RELEASE", 20, 3, delay_ms=1_000, counted=True, text="boom 7")
    say("ACQUIRE", 20, 5, attempt=2, **ordered)
    say("ACQUIRE", 20, 900, attempt=3, holder="b" * 16, **ordered)
    say("ACK", 20, 901, holder="b" * 16)

    one = record(25, 1)  # delivered again only after releases; the last one is of a shutdown
    wanted[one] = {"state": "acked", "outcomes": ["acked"], "attempts": 2, "duplicates": 0}
    say("ACQUIRE", 25, 2, **ordered)
    say("RELEASE", 25, 3, counted=True, text="boom 7")
    say("ACQUIRE", 25, 5, attempt=2, **ordered)
    say("RELEASE", 25, 6, delay_ms=0, counted=False)
    say("ACQUIRE", 25, 7, attempt=2, holder="b" * 16, **ordered)
    say("ACK", 25, 8, holder="b" * 16)

    one = record(26, 1)  # delivered again after its lease, then released, and not delivered since then
    wanted[one] = {"state": "released", "open": True, "outcomes": [None], "attempts": 2, "duplicates": 1}
    say("ACQUIRE", 26, 2, **ordered)
    say("ACQUIRE", 26, 40, attempt=2, **ordered)
    say("RELEASE", 26, 41, counted=True, text="boom 7")

    # No tracker ends these, however late it is.
    wanted[record(21, 1)] = {"state": "leased", "open": True, "outcomes": [None], "differences": 0}
    say("ACQUIRE", 21, 2, **ordered)
    wanted[record(22, 1)] = {"state": "released", "open": True, "outcomes": [None], "differences": 0}
    say("ACQUIRE", 22, 2, **ordered)
    say("RELEASE", 22, 3, delay_ms=1_000, counted=True)
    wanted[record(23, 1)] = {"state": "rejected", "open": True, "outcomes": [None], "differences": 1}
    say("ACQUIRE", 23, 2, **ordered)
    say("REJECT", 23, 3, text="bad")

    one = record(24, 1)  # … but it makes a dead letter after the last attempt
    wanted[one] = {"state": "dead", "outcomes": ["released"], "dead_letters": 1, "attempts": 5}
    say("ACQUIRE", 24, 2, attempt=5, **ordered)
    say("RELEASE", 24, 3, counted=True, text="boom 7")
    log.letter(5, 24, one, 3.4)
    say("DEAD_LETTERED", 24, 3.5, attempt=5, cause="RELEASED", **fact)

    one = record(27, 1)  # its lease ended twice: the first time it was delivered again, the second time it died
    wanted[one] = {"state": "dead", "outcomes": ["expired", "expired"], "dead_letters": 1, "duplicates": 1}
    wanted[one] |= {"causes": ["ended while held"]}
    say("ACQUIRE", 27, 2, attempt=4)
    say("REDELIVERED", 27, 33, attempt=5, cause="EXPIRED", **fact)
    record(127, 32.9, copy_of=one, attempt=5)
    say("ACQUIRE", 127, 34, attempt=5, id=one)
    say("DEAD_LETTERED", 127, 65, attempt=5, cause="EXPIRED", **fact)
    log.letter(6, 127, one, 64.9)

    wanted[record(28, 5)] = {"state": "acked", "outcomes": ["acked"], "wait_ms": [0]}  # the sender's clock is ahead
    say("ACQUIRE", 28, 2)
    say("ACK", 28, 3)

    # Expired before its first delivery, and dropped.
    wanted[record(29, 1)] = {"state": "message_expired", "outcomes": ["message_expired"], "duplicates": 0}
    say("ACQUIRE", 29, 2, due_at=at(2))
    say("CANCELLED", 29, 2.5, attempt=1, cause="MESSAGE_EXPIRED", **fact)
    one = record(30, 1)  # expired while it waited for its second attempt, and dead-lettered
    wanted[one] = {"state": "dead", "outcomes": ["message_expired"], "dead_letters": 1, "duplicates": 0}
    say("ACQUIRE", 30, 2)
    say("RELEASE", 30, 3, delay_ms=1_000, counted=True, text="boom 7")
    log.letter(7, 30, one, 3.9)
    say("DEAD_LETTERED", 30, 4.1, attempt=1, cause="MESSAGE_EXPIRED", **fact)

    wanted[record(16, 1)] = {"state": "released", "open": True, "outcomes": [None]}
    say("ACQUIRE", 16, 2)
    say("RELEASE", 16, 3, delay_ms=10_000_000, counted=False)
    wanted[record(500, 1)] = {"state": "waiting", "open": True, "outcomes": [None]}
    wanted[record(-1, 1)] = {"state": "expired_unread", "outcomes": [None]}  # before where the topic begins now
    wanted[record(17, 1)] = {"state": "lost", "differences": 1}  # the queue has read on
    say("ACQUIRE", 18, 1_090, from_offset=17)
    wanted[record(18, 1)] = {"state": "leased", "open": True, "outcomes": [None]}
    say("TICK", None, 1_100, None, queue=None)
    return log, wanted
