"""``ingest``: from Kafka's topics to Parquet, up to now or continuously.

Markers, messages and dead letters become tables of the data directory, each record once, even after interruptions.
Payloads of messages are left out unless --payload is given. With --follow, it also computes live windows for the
dashboard, and continues after errors.
"""

from __future__ import annotations

import argparse
import sys
import time
from functools import cache

from pipeline.errors import PipelineError
from pipeline.ingest import MARKERS_LIMIT, RECORDS_LIMIT, Ingest
from pipeline.jobs.lifecycle import StepLog
from pipeline.kafka import Connection, TopicAdmin
from pipeline.lake import Lake
from pipeline.live_windows import TABLE, LiveWindows
from pipeline.service import INGEST, WINDOWS, Service, served
from pipeline.session import for_few_rows, session

#: Rows of a round whose windows are computed without compiling the queries.
SMALL_ROWS = 100_000


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--follow", action="store_true", help="continue until Ctrl-C")
    parser.add_argument(
        "--every", type=float, default=10.0, metavar="SECONDS", help="time between the starts of two rounds (10)"
    )
    parser.add_argument(
        "--metrics-port", type=int, metavar="PORT", help="serve /metrics and /healthz here while it follows"
    )
    parser.add_argument(
        "--metrics-bind", default="127.0.0.1", metavar="ADDRESS", help="address for --metrics-port (%(default)s)"
    )
    parser.add_argument(
        "--payload", action="store_true", help="include keys, values and headers of messages and dead letters"
    )
    parser.add_argument(
        "--markers-limit", type=int, default=MARKERS_LIMIT, help="marker records in a batch (%(default)s)"
    )
    parser.add_argument(
        "--records-limit", type=int, default=RECORDS_LIMIT, help="other records in a batch (%(default)s)"
    )


def run(options: argparse.Namespace) -> int:
    limits = (options.markers_limit, options.records_limit)
    if options.every < 0:
        raise PipelineError(f"--every {options.every:g}: expected seconds, 0 or more")
    if min(limits) < 1:
        raise PipelineError("--markers-limit and --records-limit: expected 1 or more")
    if options.metrics_port is not None and not options.follow:
        raise PipelineError("--metrics-port is for --follow: a single round ends before anything reads its metrics")
    connection = Connection.read()
    spark = session("ingest")
    steps, topics, lake = StepLog(), TopicAdmin(spark, connection), Lake(spark, options.data)
    ingest = Ingest(spark, connection, topics, lake, payload=options.payload, say=steps.say, limits=limits)
    few_rows_session = cache(for_few_rows)
    service = Service(options.every, options.follow, lambda text: print(text, file=sys.stderr, flush=True))

    def read() -> None:
        try:
            rows = ingest.round()
        finally:
            service.rows.update(ingest.rows)
            service.news += ingest.rows.total()
            service.unread = ingest.unread
        shown = ", ".join(f"{count:,} {table}" for table, count in rows.items())
        print(f"ingested {shown} in {time.monotonic() - began:.1f} s", flush=True)

    def compute() -> None:
        # The first windows are those of the whole history.
        is_small = lake.last_commit(TABLE) is not None and service.news < SMALL_ROWS
        chosen = few_rows_session(spark) if is_small else spark
        windows_began = time.monotonic()
        changed = LiveWindows(chosen, Lake(chosen, options.data)).update(int(began_s * 1000))
        service.news = 0
        if changed:
            print(f"computed {changed:,} windows in {time.monotonic() - windows_began:.1f} s", flush=True)

    with served(service, options.metrics_bind, options.metrics_port) as port:
        if port is not None:
            print(f"metrics on http://{options.metrics_bind}:{port}/metrics", flush=True)
        while True:
            began, began_s = time.monotonic(), time.time()
            is_ingested = service.part(INGEST, began_s, read)
            # Once there are windows, maintain keeps what they have not counted, so every round has to count it.
            if is_ingested and (options.follow or lake.last_commit(TABLE) is not None):
                service.part(WINDOWS, began_s, compute)
            if not options.follow:
                return 0
            # Rounds that take longer still leave a pause.
            time.sleep(max(options.every / 10, options.every - (time.monotonic() - began)))
