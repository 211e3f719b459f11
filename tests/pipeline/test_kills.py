"""kill -9 of jobs, with all of their processes, in the middle of their work."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from marq_worker.broker import EmbeddedBroker
from pipeline import redriving
from pipeline.kafka import Connection
from pipeline.lake import Lake
from tests.pipeline.conftest import Command
from tests.pipeline.namespace import Namespace, ingest
from tests.pipeline.processes import LIMIT_SECONDS, kill_when, killed
from tests.pipeline.test_ingest import assert_each_record_once, made, table
from tests.pipeline.test_load import delivered
from tests.unit.core.batches import acquire
from tests.worker.harness import Namespace as Written
from tests.worker.harness import Worker, eventually
from tests.worker.test_dead_letters import yard_of

__all__ = ["made"]
pytestmark = [pytest.mark.verify, pytest.mark.timeout(1_200)]
COUNTS = {"markers": 300, "messages": 60}


#: While a batch is written; when it is renamed, about its commit; when it is committed.
MOMENTS = ("_staging/markers-*/_temporary", "markers/batch=000000001", "_commits/markers/000000003.json")


def test_after_kills_in_mid_batch_a_rerun_gives_what_an_undisturbed_one_gives(
    spark: SparkSession, connection: Connection, environment: dict[str, str], data: Path, tmp_path: Path,
    made: Namespace,
) -> None:  # fmt: skip
    made.mark(*[acquire([number]) for number in range(300)])
    made.send(60)

    for moment in MOMENTS:
        kill_when(moment, data, "ingest --markers-limit 60 --records-limit 20", environment, tmp_path)
    lake, undisturbed = Lake(spark, str(data)), Lake(spark, str(tmp_path / "undisturbed"))
    ingest(spark, connection, lake, limits=(60, 20))
    ingest(spark, connection, undisturbed, limits=(60, 20))

    assert_each_record_once(lake, data, COUNTS)
    for name in COUNTS:
        assert sorted(table(lake, name).collect()) == sorted(table(undisturbed, name).collect())


async def test_a_load_that_is_killed_and_forgets_how_far_it_was_sends_each_row_once(
    spark: SparkSession, written: Written, installed: Mapping[str, str], command: Command, data: Path, tmp_path: Path
) -> None:
    path, position = tmp_path / "rows.csv", data / "loads/mine/position"
    rows = [f"row {number}" for number in range(3_000)]
    path.write_text("\n".join(["id,name", *[f"{number},{row}" for number, row in enumerate(rows)]]))
    words = f"load {path} killed --format csv --value name --name mine --json"
    with killed(f"{words} --rate 250", installed, tmp_path):
        await eventually(
            lambda: delivered(written, "killed"),
            lambda counts: len(counts) > 500 and position.exists(),
            limit=LIMIT_SECONDS,
        )
    assert 0 < int(position.read_text()) < 3_000

    position.unlink()
    said = command(words).json

    assert (said["sent"], said["sent_before"], said["rows"], said["bad_rows"]) == (3_000, 0, 3_000, 0)
    found = await eventually(lambda: delivered(written, "killed"), lambda counts: len(counts) >= 3_000)
    assert found == dict.fromkeys([row.encode() for row in rows], 1)
    assert command(words).json["sent"] == 0
    assert await delivered(written, "killed") == found
    refusal = "load mine has another input or other options"
    assert refusal in command(words.replace(" killed ", " other ")).refusal
    path.write_text("id,name\n1,another row\n")
    assert refusal in command(words).refusal
    # The stage has the rows, even without the file.
    path.unlink()
    assert command(words).json["rows"] == 3_000


async def test_a_killed_redrive_and_two_concurrent_ones_send_each_dead_letter_once(
    spark: SparkSession, worker: Worker, broker: EmbeddedBroker, installed: Mapping[str, str], tmp_path: Path
) -> None:
    async with yard_of(worker, broker) as yard:
        ids = await yard.bury("k", 750) | await yard.bury("k", 750, partition=1)
        with killed("redrive k --yes --rate 100", installed, tmp_path):
            await eventually(lambda: yard.delivered("k"), lambda counts: len(counts) > 100, limit=LIMIT_SECONDS)
        assert len(await yard.delivered("k")) < 1_500

        request = redriving.Request("k", "k", wait_s=LIMIT_SECONDS)
        connection = Connection.read()
        surveys = [redriving.survey(spark, connection, request) for _ in range(2)]
        both = [redriving.Redrive(connection, survey, request) for survey in surveys]
        one, two = await asyncio.gather(*[asyncio.to_thread(job.run) for job in both])

        assert len(surveys[0]) == len(surveys[1]) == one.chosen == two.chosen > 0
        assert (one.unanswered, two.unanswered) == (0, 0)
        assert one.done + one.already_settled == two.done + two.already_settled == one.chosen
        assert one.done + two.done <= one.chosen
        await yard.each_once("k", ids)
