"""Dead letters chosen by SQL: what an expression sees, and redrives that are killed, doubled and without a worker."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shlex
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

from broker import EmbeddedBroker
from marq.core.markers import Source
from marq.core.notes import Became, Note, encoded
from pipeline import cli, letters, redriving
from pipeline.errors import PipelineError
from pipeline.jobs import redrive
from pipeline.kafka import Connection
from tests.pipeline.mortal import started
from tests.worker.conftest import workers
from tests.worker.harness import Worker, eventually
from tests.worker.test_dead_letters import yard_of

# Spark, a worker and a Kafka start in it.
pytestmark = pytest.mark.timeout(1_200)

TOPIC = "marq.dead-letters"
#: What a loaded machine may need to start Spark and send the first; a calm one takes a tenth.
START_SECONDS = 400.0
# As Spark gives them: without a zone, in that of the session.
DIED = datetime(2023, 11, 14, 22, 13, 20, 123_000)  # noqa: DTZ001
WRITTEN = datetime(2024, 1, 1)  # noqa: DTZ001
RECORDS = (
    "key binary, value binary, topic string, partition int, offset long, timestamp timestamp,"
    " headers array<struct<key:string,value:binary>>"
)


def record(offset: int, value: bytes | None, key: bytes = b"q", partition: int = 0, **headers: str | bytes) -> Any:
    given = {"marq-reason": "no good", "marq-died-at": "1700000000123"} | {
        name.replace("_", "-"): each for name, each in headers.items()
    }
    pairs = [(name, each.encode() if isinstance(each, str) else each) for name, each in given.items()]
    return (key, value, TOPIC, partition, offset, WRITTEN, pairs)


def note(offset: int, offsets: list[int], became: Became = Became.REDRIVEN) -> Any:
    [(value, headers)] = encoded(Note(Source(TOPIC, 0), offsets, became, "q", 0xA11CE))
    return (b"", value, TOPIC, 0, offset, WRITTEN, headers)


@pytest.fixture(scope="module")
def found(spark: SparkSession) -> DataFrame:
    records = [
        record(0, b'{"n": 1}', marq_attempt="5", tenant="acme", marq_error="LookupError: [/x]"),
        record(1, b"\xff\xfe", marq_died_at="soon", marq_id="marq.messages/3/7", tenant=b"\xff"),
        record(2, None, marq_attempt="many"),
        record(3, b"x", key=b"other"),
        note(4, [2]),
        (b"q", b"?", TOPIC, 0, 5, WRITTEN, [("a", b"first"), ("a", b"last"), ("marq-attempt", None)]),
        (b"q", b"bare", TOPIC, 1, 2, WRITTEN, None),
        (b"", b'{"offsets": [[0, 99999999999]]}', TOPIC, 0, 6, WRITTEN, [("marq-settled", b"redriven")]),
    ]
    return spark.createDataFrame(records, RECORDS).cache()


def test_an_expression_sees_what_a_dead_letter_says(found: DataFrame) -> None:
    rows = {(row["partition"], row["offset"]): row for row in letters.letters(found, "q").collect()}

    assert sorted(rows) == [(0, 0), (0, 1), (0, 2), (0, 5), (1, 2)]
    first, odd, none, doubled, bare = [rows[place] for place in sorted(rows)]
    assert (first["text"], first["headers"], first["attempts"]) == ('{"n": 1}', {"tenant": "acme"}, 5)
    assert (first["reason"], first["error"], first["size"]) == ("no good", "LookupError: [/x]", 8)
    assert (first["id"], first["died_at"]) == (f"{TOPIC}/0/0", DIED)
    assert (odd["id"], odd["text"], odd["died_at"]) == ("marq.messages/3/7", "\ufffd\ufffd", WRITTEN)
    assert odd["headers"] == {"tenant": "\ufffd"}
    assert (none["value"], none["text"], none["size"], none["attempts"]) == (None, None, 0, 1)
    assert doubled["headers"] == {"a": "last"}
    assert (bare["headers"], bare["reason"]) == ({}, "")
    noted = letters.notes(found, TOPIC)
    left = letters.unsettled(letters.letters(found, "q"), noted).select("partition", "offset").collect()
    assert sorted(map(tuple, left)) == [(0, 0), (0, 1), (0, 5), (1, 2)]
    assert [tuple(row) for row in noted.collect()] == [(0, 2, "redriven", "00000000000a11ce")]


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("nonsense > 1", "there is no column 'nonsense'; the columns are id, queue, value, text, headers, reason,"),
        ("size + 1", "it is of type int, but it has to be true or false"),
        ("size > > 1", "it is no SQL expression (Syntax error at or near '>')"),
        ("nofunction(id)", "Cannot resolve routine `nofunction`"),
        ("count(*) > 1", "; the columns are id, queue"),
    ],
)
def test_an_expression_that_can_not_be_used_is_one_sentence(found: DataFrame, where: str, said: str) -> None:
    with pytest.raises(PipelineError) as raised:
        letters.chosen(letters.letters(found, "q"), where)

    assert said in str(raised.value)
    assert str(raised.value).startswith("--where ")
    assert "\n" not in str(raised.value)


# --- with a worker ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def worker(broker: EmbeddedBroker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    made = contextlib.contextmanager(workers)(broker, tmp_path_factory.mktemp("worker"))
    with made as make:
        started = make().start()
        asyncio.run(started.ready())
        yield started


@pytest.fixture
def settings(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> Mapping[str, str]:
    """What a user sets for this installation, here and for processes."""
    found = {name: worker._environment[name] for name in ("MARQ_BOOTSTRAP_SERVERS", "MARQ_PREFIX")}
    for name, value in found.items():
        monkeypatch.setenv(name, value)
    return found


def call(words: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    """Run the job here, on the session's Spark; return its exit code and what it said."""
    given = cli._parser("redrive", redrive).parse_args([*shlex.split(words), "--json"])
    capsys.readouterr()
    code = redrive.run(given)
    return code, json.loads(capsys.readouterr().out)


async def test_letters_that_fit_go_back_once_and_the_others_stay(
    spark: SparkSession, worker: Worker, broker: EmbeddedBroker, settings: object, capsys: pytest.CaptureFixture[str]
) -> None:
    async with yard_of(worker, broker) as yard:
        odd, good = await yard.bury("q", 5, reason="odd"), await yard.bury("q", 20, partition=1)

        code, said = call("q --where \"reason = 'odd' AND headers['tenant'] = 'acme'\" --dry-run", capsys)
        assert (code, said["chosen"], said["redriven"], said["preview"]["reasons"]) == (0, 5, 0, {"odd": 5})
        with pytest.raises(PipelineError, match="no terminal to ask on, so nothing was changed: add --yes"):
            call("q", capsys)
        code, said = call("q --where \"reason = 'odd'\" --yes --to hospital", capsys)
        assert (code, said["chosen"], said["asked"], said["redriven"], said["unanswered"]) == (0, 5, 5, 5, 0)
        await yard.each_once("hospital", odd)
        code, said = call("q --limit 4 --delete --yes", capsys)
        assert (code, said["deleted"]) == (0, 4)

        code, said = call("q --where 'cast(text as int) >= 4' --yes", capsys)

        assert (code, said["chosen"], said["redriven"]) == (0, 16, 16)
        await yard.each_once("q", {each for each in good if int(each.split(b"/")[2].split(b"-")[0]) >= 4})
        assert await yard.letters.count("q") == []
        assert call("q --yes", capsys) == (0, said | {
            "where": None, "chosen": 0, "asked": 0, "redriven": 0,
            "preview": {"letters": 0, "oldest": None, "newest": None, "reasons": {}, "rows": []},
        })  # fmt: skip


async def test_a_redrive_that_is_killed_and_two_at_once_after_it_send_each_letter_once(
    spark: SparkSession, worker: Worker, broker: EmbeddedBroker, settings: Mapping[str, str], tmp_path: Path
) -> None:
    async with yard_of(worker, broker) as yard:
        ids = await yard.bury("k", 1_500) | await yard.bury("k", 1_500, partition=1)
        with started("redrive", "k --yes --rate 300", settings, tmp_path):
            await eventually(lambda: yard.delivered("k"), lambda counts: len(counts) > 200, limit=START_SECONDS)
        assert len(await yard.delivered("k")) < 3_000

        request = redriving.Request("k", "k")
        letters_now = redriving.Letters(spark, Connection.read())
        surveys = [letters_now.survey(request) for _ in range(2)]
        both = [redriving.Settling(letters_now, survey, request) for survey in surveys]
        one, two = await asyncio.gather(*[asyncio.to_thread(each.run) for each in both])

        assert len(surveys[0]) == len(surveys[1]) == one.chosen == two.chosen > 0
        assert (one.unanswered, two.unanswered) == (0, 0)
        assert one.done + one.already_settled == two.done + two.already_settled == one.chosen
        assert one.done + two.done <= one.chosen
        await yard.each_once("k", ids)


async def test_without_a_worker_it_says_so_and_nothing_is_lost(
    spark: SparkSession, worker: Worker, broker: EmbeddedBroker, settings: object, capsys: pytest.CaptureFixture[str]
) -> None:
    async with yard_of(worker, broker) as yard:
        ids = await yard.bury("w", 5)
        await worker.stop()

        code, said = call("w --yes --wait 1", capsys)
        assert (code, said["asked"], said["redriven"], said["unanswered"]) == (1, 5, 0, 5)
        code, said = call("w --yes --wait 1", capsys)
        assert (code, said["unanswered"]) == (1, 5)

        again = worker.again().start()
        try:
            await again.ready()
            await yard.each_once("w", ids)
            assert (await yard.letters.redrive("w")).chosen == 0
        finally:
            again.close()
