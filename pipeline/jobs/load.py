"""``load``: rows of files or a table become messages of a queue.

Each row is sent once, also by a load that was killed and is started again with the same command. Rows are first checked
and numbered into DATA/loads/NAME: those that can't be messages are set aside in .../bad, with the reason. The message
is the whole row as JSON, unless --value or --json-value say otherwise. Rows reach the queue by way of the workers.

  python -m pipeline load orders.csv orders --format csv --header shop=shop_id
  python -m pipeline load s3a://exports/mails/ emails --format parquet --value body --at send_at --rate 500
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import secrets
import sys
import time
from typing import Any

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from marq.core.names import check_queue_name
from pipeline import inputs, loading
from pipeline.errors import PipelineError
from pipeline.kafka import Connection, Topics
from pipeline.loading import Fields, Sent
from pipeline.progress import Progress
from pipeline.session import session
from pipeline.stage import Stages, Told
from pipeline.writing import Pace, keep_rows_small, limit_of, markers_of, write

MAX_RATE = 1_000_000
#: Rows that are written in one step, and their bytes.
STEP_ROWS, STEP_BYTES = 100_000, 256 << 20
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_ROWS = "value binary, key binary, headers array<struct<key:string,value:binary>>, time_ms bigint, row bigint"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "input", metavar="FILE|DIR|TABLE", help="a path or URI that Hadoop knows, or a table of Spark's"
    )
    parser.add_argument("queue", metavar="QUEUE", help="where the messages go")
    parser.add_argument("--format", required=True, choices=inputs.FORMATS, help="json: one object a line")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--value", metavar="COL", help="the message is this column")
    what.add_argument("--json-value", metavar="COL,COL", help="the message is a JSON object of these columns")
    parser.add_argument("--key", metavar="COL", help="the sender's key")
    parser.add_argument("--header", action="append", default=[], metavar="NAME=COL", help="repeatable")
    when = parser.add_mutually_exclusive_group()
    when.add_argument("--delay", metavar="COL", help="deliver after so many seconds; empty: at once")
    when.add_argument("--at", metavar="COL", help="deliver then: a timestamp, or ISO text with a zone; empty: at once")
    parser.add_argument("--rate", type=float, metavar="N", help="rows a second at the most")
    parser.add_argument("--limit", type=int, metavar="N", help="only so many rows of the input")
    parser.add_argument("--name", help="of the load (default: made of the input and these options)")
    parser.add_argument("--dry-run", action="store_true", help="only check the rows")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")


def run(given: argparse.Namespace) -> int:
    fields = _fields(given)
    connection = Connection.read()
    load = Load(session("load"), connection, given, fields)
    told = load.told()
    if given.dry_run:
        _report(given, told, load, 0, 0, False)
        return 0
    before = load.stages.position(told.name)
    interrupted = False
    try:
        load.send(told, before)
    except KeyboardInterrupt:
        interrupted = True
    _report(given, told, load, before, load.stages.position(told.name), interrupted)
    return 130 if interrupted else 0


class Load:
    """One load, from its input to durable markers."""

    def __init__(self, spark: SparkSession, connection: Connection, given: argparse.Namespace, fields: Fields) -> None:
        self._spark = spark
        self._connection = connection
        self._given = given
        self._fields = fields
        self.stages = Stages(spark, given.data)
        topics = Topics(spark, connection)
        self._markers = markers_of(topics, connection)
        self._messages_limit_bytes = limit_of(topics, connection.names.messages)
        self._installation = f"{topics.cluster_id()}/{connection.names.prefix}"
        self._arguments = {"format": given.format, "limit": given.limit} | fields._asdict()
        self._identity = self._look()

    def told(self) -> Told:
        """Return the stage of this load, made if there is none.

        Raises:
            PipelineError: the input can't be read, or the name is another load's.
        """
        name = self._given.name or self._made_name()
        found = self.stages.find(name)
        if found is None:
            return self._stage(name)
        self._check(found)
        return found

    def send(self, told: Told, position: int) -> None:
        """Write the rows from a position on; they are durable on return.

        Raises:
            PipelineError: it is not known how far it came: the same command again does the rest.
        """
        keep_rows_small(self._spark, told.largest_bytes)
        rows = self._spark.read.schema(_ROWS).parquet(self.stages.path(told.name, "rows"))
        placed = loading.placed(rows, told.source_partitions)
        sent = Sent(told.queue, told.topic, told.holder, told.staged_at_ms, self._fields.at is None, self._markers)
        tasks = min(told.source_partitions, 2 * self._spark.sparkContext.defaultParallelism)
        average = max(1, told.bytes // max(1, told.rows))
        pace = Pace(self._given.rate, max(1, min(STEP_ROWS, STEP_BYTES // average)))
        progress = Progress("sent", told.rows, position)
        try:
            for start in range(position, told.rows, pace.step):
                stop = min(start + pace.step, told.rows)
                time.sleep(pace.wait_s())
                pace.took(stop - start)
                step = placed.where((F.col("row") >= start) & (F.col("row") < stop))
                write(loading.markers(step, sent, tasks), self._connection, self._markers)
                # Afterwards: a position that is ahead would leave rows out.
                self.stages.advance(told.name, stop)
                progress.tell(stop)
        finally:
            progress.end()

    # --- the stage ----------------------------------------------------------------------------------------------------

    def _look(self) -> str | None:
        try:
            return inputs.identity(self._spark, self._given.input, self._given.format)
        except Exception as error:
            raise inputs.unreadable(self._given.input, self._given.format, error) from error

    def _made_name(self) -> str:
        what = json.dumps([self._arguments, self._given.queue, self._identity, self._installation], sort_keys=True)
        stem = re.sub(r"[^A-Za-z0-9]+", "-", self._given.input.rstrip("/").rpartition("/")[2]).strip("-")[:40]
        return f"{stem or 'load'}-{hashlib.sha256(what.encode()).hexdigest()[:12]}"

    def _check(self, found: Told) -> None:
        name = found.name
        if found.installation != self._installation:
            raise PipelineError(
                f"load {name} was made for another installation, {found.installation}: take another --name"
            )
        same = found.queue == self._given.queue and found.arguments == json.loads(json.dumps(self._arguments))
        # Without the input its stage still has all rows.
        if not same or (self._identity is not None and found.input != self._identity):
            raise PipelineError(
                f"load {name} was made of another input or with other options: take another --name, or the same as then"
            )

    def _stage(self, name: str) -> Told:
        rows = inputs.read(self._spark, self._given.input, self._given.format)
        if self._given.limit is not None:
            rows = rows._replace(frame=rows.frame.limit(self._given.limit))
        checked = loading.checked(rows, self._fields, self._given.queue, self._messages_limit_bytes)
        hidden = self.stages.hidden(name)
        try:
            told = self._write_stage(name, hidden, checked)
            if self._given.dry_run:
                self.stages.remove(hidden)
                return told
            return self.stages.publish(hidden, told)
        except BaseException:
            self.stages.remove(hidden)
            raise

    def _write_stage(self, name: str, hidden: str, checked: DataFrame) -> Told:
        path = self.stages.path(hidden, "checked")
        try:
            checked.write.parquet(path)
        except (PySparkException, Py4JError) as error:
            raise inputs.unreadable(self._given.input, self._given.format, error) from error
        done = self._spark.read.parquet(path)
        bad = done.where("reason IS NOT NULL").select("original", "reason")
        bad.write.parquet(self.stages.path(hidden, "bad"))
        # Counted and numbered by the same plan, so that each partition has the same rows both times.
        good = done.where("reason IS NULL").drop("original", "reason")
        counts = dict(good.groupBy(F.spark_partition_id()).count().collect())
        starts, total = [], 0
        for partition in range(max(counts, default=-1) + 1):
            starts.append(total)
            total += counts.get(partition, 0)
        loading.numbered(good, starts or [0]).write.parquet(self.stages.path(hidden, "rows"))
        size, largest = self._verified(self.stages.path(hidden, "rows"), total)
        reasons = dict(bad.groupBy("reason").count().collect())
        self.stages.remove(hidden, "checked")
        return Told(
            name, self._given.queue, self._installation, self._arguments, self._identity, secrets.token_hex(16),
            time.time_ns() // 1_000_000, self._markers.partitions, total, size, largest, reasons,
        )  # fmt: skip

    def _verified(self, path: str, total: int) -> tuple[int, int]:
        """Return the bytes of all rows and of the largest; the numbers have to be 0, 1, … without a gap."""
        size = F.octet_length("value")
        [found] = (
            self._spark.read.schema(_ROWS).parquet(path)
            .agg(F.count("*"), F.coalesce(F.max("row"), F.lit(-1)), F.coalesce(F.sum("row"), F.lit(0)),
                 F.coalesce(F.sum(size), F.lit(0)), F.coalesce(F.max(size), F.lit(0)))
            .collect()
        )  # fmt: skip
        count, last, numbers, all_bytes, largest = found
        if (count, last, numbers) != (total, total - 1, total * (total - 1) // 2):
            raise PipelineError(f"{path}: rows were numbered wrongly, and nothing was sent: run it again")
        return all_bytes, largest


def _fields(given: argparse.Namespace) -> Fields:
    check_queue_name(given.queue)
    if given.rate is not None and not 0 < given.rate <= MAX_RATE:
        raise PipelineError(f"--rate {given.rate:g}: expected rows a second, more than 0 and at most {MAX_RATE:,}")
    if given.limit is not None and given.limit < 1:
        raise PipelineError(f"--limit {given.limit}: expected a number of rows from 1 on")
    if given.name is not None and not _NAME.fullmatch(given.name):
        raise PipelineError(f"--name {given.name}: expected 1 to 100 of a-z A-Z 0-9 . _ -, a letter or digit first")
    headers = []
    for each in given.header:
        name, equals, column = each.partition("=")
        if not equals or not column:
            raise PipelineError(f"--header {each}: expected NAME=COL")
        headers.append((name, column))
    columns = None if given.json_value is None else tuple(name.strip() for name in given.json_value.split(","))
    return Fields(given.value, columns, given.key, tuple(headers), given.delay, given.at)


def _report(given: argparse.Namespace, told: Told, load: Load, before: int, position: int, interrupted: bool) -> None:
    bad_path = load.stages.path(told.name, "bad")
    if given.json:
        said: dict[str, Any] = {
            "name": told.name, "queue": told.queue, "rows": told.rows, "sent": position - before, "sent_before": before,
            "bad": told.bad, "bad_rows": sum(told.bad.values()), "bad_path": None if given.dry_run else bad_path,
            "source": told.topic, "dry_run": given.dry_run, "interrupted": interrupted,
        }  # fmt: skip
        print(json.dumps(said, ensure_ascii=False))
        return
    if given.dry_run:
        print(f"{told.rows:,} rows would be sent to queue {told.queue!r}; nothing was sent")
    else:
        again = f", {before:,} before" if before else ""
        print(f"load {told.name}: {position - before:,} of {told.rows:,} rows sent to queue {told.queue!r}{again}")
    for reason, count in sorted(told.bad.items(), key=lambda each: (-each[1], each[0])):
        print(f"  {count:,} set aside: {reason}")
    if told.bad and not given.dry_run:
        print(f"  they are in {bad_path}")
    if interrupted:
        print("interrupted: the same command again does the rest", file=sys.stderr)
