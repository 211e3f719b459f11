"""``load``: rows of files or a table become messages of a queue.

Each row is sent once, even if a load is killed and started again with the same command. Rows are first checked and
numbered into DATA/loads/NAME; rejected ones are set aside in .../bad, with the reason. The message is the whole row as
JSON, unless --value or --json-value choose columns. A running worker moves the rows to the queue.

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
from itertools import accumulate

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from marq.wire.names import check_queue_name
from pipeline import inputs, load_rows
from pipeline.errors import PipelineError
from pipeline.kafka import Connection, TopicAdmin
from pipeline.load_rows import Fields
from pipeline.load_stage import LoadStage, Stages
from pipeline.session import session
from pipeline.writing import HEADERS, MarkersTopic, Progress, StepPacer, check_limits, write

#: Limits of one step.
STEP_ROWS, STEP_BYTES = 100_000, 256 << 20
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_ROWS = f"value binary, key binary, headers {HEADERS}, time_ms bigint, row bigint"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("input", metavar="FILE|DIR|TABLE", help="path or URI that Hadoop supports, or a Spark table")
    parser.add_argument("queue", metavar="QUEUE", help="target queue")
    parser.add_argument("--format", required=True, choices=inputs.FORMATS, help="json: one object a line")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--value", metavar="COL", help="the message is this column")
    what.add_argument("--json-value", metavar="COL,COL", help="the message is a JSON object of these columns")
    parser.add_argument("--key", metavar="COL", help="the sender's key")
    parser.add_argument("--header", action="append", default=[], metavar="NAME=COL", help="a header; repeatable")
    when = parser.add_mutually_exclusive_group()
    when.add_argument("--delay", metavar="COL", help="deliver after this many seconds; empty: now")
    when.add_argument(
        "--at", metavar="COL", help="deliver at this time: a timestamp, or ISO text with a zone; empty: now"
    )
    parser.add_argument("--rate", type=float, metavar="N", help="at most N rows a second")
    parser.add_argument("--limit", type=int, metavar="N", help="at most N rows of the input")
    parser.add_argument("--name", help="name of the load (default: derived from the input and these options)")
    parser.add_argument("--dry-run", action="store_true", help="only check the rows")
    parser.add_argument("--json", action="store_true", help="print one JSON object on standard output")


def run(options: argparse.Namespace) -> int:
    fields = _fields(options)
    connection = Connection.read()
    load = Load(session("load"), connection, options, fields)
    stage = load.stage()
    if options.dry_run:
        _report(options, stage, load, 0, 0, False)
        return 0
    before = load.stages.position(stage.name)
    interrupted = False
    try:
        load.send(stage, before)
    except KeyboardInterrupt:
        interrupted = True
    _report(options, stage, load, before, load.stages.position(stage.name), interrupted)
    return 130 if interrupted else 0


class Load:
    """One load, from its input to durable markers."""

    def __init__(
        self, spark: SparkSession, connection: Connection, options: argparse.Namespace, fields: Fields
    ) -> None:
        self._spark = spark
        self._connection = connection
        self._options = options
        self._fields = fields
        self.stages = Stages(spark, options.data)
        topics = TopicAdmin(spark, connection)
        markers = connection.names.markers
        self._markers = MarkersTopic(markers, topics.partitions([markers])[markers], topics.limit_bytes(markers))
        self._messages_limit_bytes = topics.limit_bytes(connection.names.messages)
        self._namespace = f"{topics.cluster_id()}/{connection.names.prefix}"
        self._arguments = {"format": options.format, "limit": options.limit} | fields._asdict()
        try:
            self._identity = inputs.identity(spark, options.input, options.format)
        except Exception as error:
            raise inputs.unreadable(options.input, options.format, error) from error

    def stage(self) -> LoadStage:
        """Return the stage of this load, created if there is none; raise PipelineError if another load has the name."""
        name = self._options.name or self._default_name()
        stage = self.stages.find(name)
        if stage is None:
            return self._create_stage(name)
        if stage.namespace != self._namespace:
            raise PipelineError(
                f"load {name} belongs to another cluster or prefix, {stage.namespace}: use another --name"
            )
        same = stage.queue == self._options.queue and stage.arguments == json.loads(json.dumps(self._arguments))
        # The stage has all rows even if the input is gone.
        if not same or (self._identity is not None and stage.input != self._identity):
            raise PipelineError(
                f"load {name} has another input or other options: use another --name, or the same options"
            )
        return stage

    def send(self, stage: LoadStage, position: int) -> None:
        """Write the rows from a position on; they are durable on return."""
        rows = self._spark.read.schema(_ROWS).parquet(self.stages.path(stage.name, "rows"))
        placed = load_rows.placed(rows, stage.source_partitions)
        tasks = min(stage.source_partitions, 2 * self._spark.sparkContext.defaultParallelism)
        average = max(1, stage.bytes // max(1, stage.rows))
        pace = StepPacer(self._options.rate, max(1, min(STEP_ROWS, STEP_BYTES // average)))
        progress = Progress("sent", stage.rows, position)
        try:
            for start in range(position, stage.rows, pace.step):
                stop = min(start + pace.step, stage.rows)
                pace.wait(stop - start)
                step = placed.where((F.col("row") >= start) & (F.col("row") < stop))
                markers = load_rows.markers(step, stage, self._markers, tasks)
                write(markers, self._connection, self._markers)
                # After the write: a position that is ahead would skip rows.
                self.stages.advance(stage.name, stop)
                progress.show(stop)
        finally:
            progress.clear()

    def _default_name(self) -> str:
        what = json.dumps([self._arguments, self._options.queue, self._identity, self._namespace], sort_keys=True)
        stem = re.sub(r"[^A-Za-z0-9]+", "-", self._options.input.rstrip("/").rpartition("/")[2]).strip("-")[:40]
        return f"{stem or 'load'}-{hashlib.sha256(what.encode()).hexdigest()[:12]}"

    def _create_stage(self, name: str) -> LoadStage:
        rows = inputs.read(self._spark, self._options.input, self._options.format)
        if self._options.limit is not None:
            rows = rows._replace(frame=rows.frame.limit(self._options.limit))
        checked = load_rows.checked(rows, self._fields, self._options.queue, self._messages_limit_bytes)
        # Readers ignore this name.
        hidden = f".{name}-{secrets.token_hex(16)}"
        try:
            stage = self._write_stage(name, hidden, checked)
            return stage if self._options.dry_run else self.stages.publish(hidden, stage)
        finally:
            self.stages.remove(hidden)

    def _write_stage(self, name: str, hidden: str, checked: DataFrame) -> LoadStage:
        path = self.stages.path(hidden, "checked")
        try:
            checked.write.parquet(path)
        except (PySparkException, Py4JError) as error:
            raise inputs.unreadable(self._options.input, self._options.format, error) from error
        done = self._spark.read.parquet(path)
        bad = done.where("reason IS NOT NULL").select("original", "reason")
        bad.write.parquet(self.stages.path(hidden, "bad"))
        # The same plan counts and numbers, so that each partition has the same rows both times.
        good = done.where("reason IS NULL").drop("original", "reason")
        counts: dict[int, int] = dict(good.groupBy(F.spark_partition_id()).count().collect())
        ends = [*accumulate(counts.get(partition, 0) for partition in range(max(counts, default=-1) + 1))]
        total = ends[-1] if ends else 0
        load_rows.numbered(good, [0, *ends]).write.parquet(self.stages.path(hidden, "rows"))
        size = self._verified(self.stages.path(hidden, "rows"), total)
        reasons: dict[str, int] = dict(bad.groupBy("reason").count().collect())
        self.stages.remove(hidden, "checked")
        return LoadStage(
            name, self._options.queue, self._namespace, self._arguments, self._identity, secrets.token_hex(16),
            time.time_ns() // 1_000_000, self._markers.partitions, total, size, reasons,
        )  # fmt: skip

    def _verified(self, path: str, total: int) -> int:
        """Return the bytes of all rows, which must be numbered 0, 1, … without gaps."""
        sums = [F.max("row"), F.sum("row"), F.sum(F.octet_length("value"))]
        [(count, last, numbers, size)] = self._spark.read.schema(_ROWS).parquet(path).agg(F.count("*"), *sums).collect()
        if count != total or (total and (last, numbers) != (total - 1, total * (total - 1) // 2)):
            raise PipelineError(f"{path}: the rows were numbered incorrectly, and nothing was sent: run it again")
        return size or 0


def _fields(options: argparse.Namespace) -> Fields:
    check_queue_name(options.queue)
    check_limits(options.rate, options.limit, "rows")
    if options.name is not None and not _NAME.fullmatch(options.name):
        raise PipelineError(f"--name {options.name}: expected 1 to 100 characters (a-z A-Z 0-9 . _ -), not . _ - first")
    headers = []
    for text in options.header:
        name, equals, column = text.partition("=")
        if not equals or not column:
            raise PipelineError(f"--header {text}: expected NAME=COL")
        headers.append((name, column))
    columns = None if options.json_value is None else tuple(name.strip() for name in options.json_value.split(","))
    return Fields(options.value, columns, options.key, tuple(headers), options.delay, options.at)


def _report(
    options: argparse.Namespace, stage: LoadStage, load: Load, before: int, position: int, interrupted: bool
) -> None:
    bad_path = load.stages.path(stage.name, "bad")
    if options.json:
        document = {
            "name": stage.name, "queue": stage.queue, "rows": stage.rows, "sent": position - before,
            "sent_before": before, "bad": stage.bad, "bad_rows": sum(stage.bad.values()),
            "bad_path": None if options.dry_run else bad_path, "source": stage.topic, "dry_run": options.dry_run,
            "interrupted": interrupted,
        }  # fmt: skip
        print(json.dumps(document, ensure_ascii=False))
        return
    if options.dry_run:
        print(f"{stage.rows:,} rows would be sent to queue {stage.queue!r}; nothing was sent")
    else:
        earlier = f", {before:,} before" if before else ""
        print(f"load {stage.name}: {position - before:,} of {stage.rows:,} rows sent to queue {stage.queue!r}{earlier}")
    for reason, count in sorted(stage.bad.items(), key=lambda item: (-item[1], item[0])):
        print(f"  {count:,} set aside: {reason}")
    if stage.bad and not options.dry_run:
        print(f"  they are in {bad_path}")
    if interrupted:
        print("interrupted: the same command again does the rest", file=sys.stderr)
