"""Dead letters chosen by SQL, and redrives with and without a worker. test_kills.py kills redrives."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

from marq.kafka.topics import ensure_topics
from marq.settings.client import ClientSettings
from marq.wire.dead_letter_notes import Disposition, Note, encoded
from marq.wire.markers import Source
from marq.wire.names import Names
from marq_worker.broker import EmbeddedBroker
from pipeline import dead_letters, redriving
from pipeline.errors import PipelineError
from pipeline.kafka import Connection
from tests.pipeline.conftest import Command
from tests.pipeline.namespace import Namespace
from tests.worker.conftest import new_worker
from tests.worker.dead_letters import Yard, yard_of
from tests.worker.harness import Worker
from tests.worker.test_dead_letters import Make

__all__ = ["new_worker"]

# Spark, a worker and a Kafka start in it.
pytestmark = pytest.mark.timeout(1_200)

TOPIC = "marq.dead-letters"
#: With more time for a worker's answer than a loaded machine needs.
ANSWERED = "--yes --json --wait 300"
COUNTS = ("chosen", "requested", "redriven", "unanswered")
# As Spark gives them: without a zone, in that of the session.
DIED = datetime(2023, 11, 14, 22, 13, 20, 123_000)  # noqa: DTZ001
WRITTEN = datetime(2024, 1, 1)  # noqa: DTZ001
RECORDS = (
    "key binary, value binary, topic string, partition int, offset long, timestamp timestamp,"
    " headers array<struct<key:string,value:binary>>"
)


def record(offset: int, value: bytes | None, key: bytes = b"q", partition: int = 0, **headers: str | bytes) -> Any:
    given = {"marq-reason": "no good", "marq-dead-lettered-at": "1700000000123"} | {
        name.replace("_", "-"): value for name, value in headers.items()
    }
    pairs = [(name, header.encode() if isinstance(header, str) else header) for name, header in given.items()]
    return (key, value, TOPIC, partition, offset, WRITTEN, pairs)


def note(offset: int, offsets: list[int], became: Disposition = Disposition.REDRIVEN) -> Any:
    [(value, headers)] = encoded(Note(Source(TOPIC, 0), offsets, became, "q", 0xA11CE))
    return (b"", value, TOPIC, 0, offset, WRITTEN, headers)


#: What a sender may write, with the header of a note.
FORGED = b'{"offsets": [[0, 999]], "became": "deleted", "queue": "q", "by": "1"}'


@pytest.fixture(scope="module")
def found(spark: SparkSession) -> DataFrame:
    records = [
        record(0, b'{"n": 1}', marq_attempt="5", tenant="acme", marq_error="LookupError: [/x]"),
        record(1, b"\xff\xfe", marq_dead_lettered_at="soon", marq_id="marq.messages/3/7", tenant=b"\xff"),
        record(2, None, marq_attempt="many"),
        record(3, b"x", key=b"other"),
        note(4, [2]),
        (b"q", b"?", TOPIC, 0, 5, WRITTEN, [("a", b"first"), ("a", b"last"), ("marq-attempt", None)]),
        (b"q", b"bare", TOPIC, 1, 2, WRITTEN, None),
        (b"", b'{"offsets": [[0, 99999999999]]}', TOPIC, 0, 6, WRITTEN, [("marq-settled", b"redriven")]),
        record(7, FORGED, marq_settled="deleted"),
        note(8, [8, 9]),
        record(9, b"after a note about it"),
    ]
    return spark.createDataFrame(records, RECORDS).cache()


def test_an_expression_sees_the_content_of_a_dead_letter(found: DataFrame) -> None:
    rows = {(row["partition"], row["offset"]): row for row in dead_letters.of_queue(found, "q").collect()}

    assert sorted(rows) == [(0, 0), (0, 1), (0, 2), (0, 5), (0, 7), (0, 9), (1, 2)]
    first, odd, none, doubled, _, _, bare = [rows[place] for place in sorted(rows)]
    assert (first["text"], first["headers"], first["attempts"]) == ('{"n": 1}', {"tenant": "acme"}, 5)
    assert (first["reason"], first["error"], first["size"]) == ("no good", "LookupError: [/x]", 8)
    assert (first["id"], first["dead_lettered_at"]) == (f"{TOPIC}/0/0", DIED)
    assert (odd["id"], odd["text"], odd["dead_lettered_at"]) == ("marq.messages/3/7", "\ufffd\ufffd", WRITTEN)
    assert odd["headers"] == {"tenant": "\ufffd"}
    assert (none["value"], none["text"], none["size"], none["attempts"]) == (None, None, 0, 1)
    assert doubled["headers"] == {"a": "last"}
    assert (bare["headers"], bare["reason"]) == ({}, "")
    # Not the place that is forged, nor those that are not before their notes.
    assert [tuple(row) for row in dead_letters.settled(found, TOPIC).collect()] == [(0, 2)]


def test_an_unreadable_header_counts_as_absent(spark: SparkSession) -> None:
    attempts = ["-1", "4294967296", "00000000000000000005", "3000000000", "0"]
    records = [record(offset, b"", marq_attempt=text) for offset, text in enumerate(attempts)]

    rows = dead_letters.of_queue(spark.createDataFrame(records, RECORDS), "q").collect()

    assert {row["offset"]: row["attempts"] for row in rows} == {0: 1, 1: 1, 2: 5, 3: 2**31 - 1, 4: 0}


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("nonsense > 1", "there is no column 'nonsense'; the columns are id, queue, value, text, headers, reason,"),
        ("size + 1", "it is of type int, but it must be true or false"),
        ("size > > 1", "it is not a valid SQL expression (Syntax error at or near '>')"),
        ("nofunction(id)", "Cannot resolve routine `nofunction`"),
        ("count(*) > 1", "; the columns are id, queue"),
    ],
)
def test_an_invalid_expression_is_one_sentence(found: DataFrame, where: str, said: str) -> None:
    with pytest.raises(PipelineError) as raised:
        dead_letters.chosen(dead_letters.of_queue(found, "q"), where)

    assert said in str(raised.value)
    assert str(raised.value).startswith("--where ")
    assert "\n" not in str(raised.value)


@contextmanager
def yard_between_commands(worker: Worker, broker: EmbeddedBroker) -> Iterator[tuple[Yard, Callable[..., Any]]]:
    """Dead letters of a worker, and a function that runs their coroutines: no loop may run while a command does."""
    with asyncio.Runner() as runner:
        yards = yard_of(worker, broker)
        yield runner.run(yards.__aenter__()), runner.run
        runner.run(yards.__aexit__(None, None, None))


@pytest.mark.verify
def test_chosen_dead_letters_are_redriven_once_and_the_others_stay(
    spark: SparkSession, worker: Worker, broker: EmbeddedBroker, installed: object, command: Command
) -> None:
    with yard_between_commands(worker, broker) as (yard, run):
        odd, good = run(yard.bury("q", 5, reason="odd")), run(yard.bury("q", 20, partition=1))

        done = command("redrive q --where \"reason = 'odd' AND headers['tenant'] = 'acme'\" --dry-run --json")
        said = done.json
        assert (done.code, said["chosen"], said["redriven"], said["preview"]["reasons"]) == (0, 5, 0, {"odd": 5})
        refused = command("redrive q --json")
        assert refused.code == 2
        assert "this is not a terminal, so nothing was changed: add --yes" in refused.errors
        done = command(f"redrive q --where \"reason = 'odd'\" --to hospital {ANSWERED}")
        said = done.json
        assert [done.code, *(said[name] for name in COUNTS)] == [0, 5, 5, 5, 0]
        run(yard.each_once("hospital", odd))
        done = command(f"redrive q --limit 4 --delete {ANSWERED}")
        assert (done.code, done.json["deleted"]) == (0, 4)

        done = command(f"redrive q --where 'cast(text as int) >= 4' {ANSWERED}")

        said = done.json
        assert (done.code, said["chosen"], said["redriven"]) == (0, 16, 16)
        run(yard.each_once("q", {value for value in good if int(value.split(b"/")[2].split(b"-")[0]) >= 4}))
        assert run(yard.dead_letters.count("q")) == []
        none_left = command("redrive q --yes --json")
        assert none_left.code == 0
        assert none_left.json == said | {
            "where": None, "chosen": 0, "requested": 0, "redriven": 0,
            "preview": {"dead_letters": 0, "oldest": None, "newest": None, "reasons": {}, "rows": []},
        }  # fmt: skip


@pytest.mark.verify
def test_without_a_worker_it_says_so_and_nothing_is_lost(
    spark: SparkSession, broker: EmbeddedBroker, new_worker: Make, prefix: str, command: Command,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    worker = new_worker(prefix=prefix)
    settings = ClientSettings.read(broker.bootstrap_servers, {"prefix": prefix, "partitions": 2}, environment={})
    asyncio.run(ensure_topics(settings))
    monkeypatch.setenv("MARQ_BOOTSTRAP_SERVERS", broker.bootstrap_servers)
    monkeypatch.setenv("MARQ_PREFIX", prefix)
    with yard_between_commands(worker, broker) as (yard, run):
        ids = run(yard.bury("w", 5))

        for _ in range(2):
            done = command("redrive w --yes --wait 1 --json")
            said = done.json
            assert (done.code, said["requested"], said["redriven"], said["unanswered"]) == (1, 5, 0, 5)

        run(worker.start().ready())
        run(yard.each_once("w", ids))
        assert run(yard.dead_letters.redrive("w")).chosen == 0


@pytest.mark.verify
def test_a_dead_letter_that_retention_removes_meanwhile_is_not_waited_for(
    spark: SparkSession, servers: str, names: Names, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MARQ_BOOTSTRAP_SERVERS", servers)
    monkeypatch.setenv("MARQ_PREFIX", names.prefix)
    asyncio.run(ensure_topics(ClientSettings.read(servers, {"prefix": names.prefix}, environment={})))
    topics, request = Namespace(servers, names), redriving.Request("q", "q", wait_s=1.0)
    for _ in range(2):
        topics.write(names.dead_letters, b"v", key=b"q")
    chosen = redriving.survey(spark, Connection.read(), request)
    topics.delete_records(names.dead_letters, 1)

    result = redriving.Redrive(Connection.read(), chosen, request).run()

    # No worker answers the other one.
    assert result == redriving.Result(chosen=2, requested=2, removed=1)
    assert result.unanswered == 1
