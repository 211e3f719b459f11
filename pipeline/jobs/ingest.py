"""``ingest``: from Kafka's topics to Parquet, up to now or for ever.

Markers, messages and dead letters become tables of the data directory, each record once, whatever is interrupted when.
Messages come without their payloads unless --payload asks for them.
"""

from __future__ import annotations

import argparse
import sys
import time

from pipeline.errors import PipelineError
from pipeline.ingest import MARKERS_LIMIT, RECORDS_LIMIT, Ingest
from pipeline.kafka import Connection, Topics
from pipeline.lake import Lake
from pipeline.session import session


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--follow", action="store_true", help="go on until Ctrl-C")
    parser.add_argument("--every", type=float, default=10.0, metavar="SECONDS", help="pause between rounds (10)")
    parser.add_argument(
        "--payload", action="store_true", help="keys, values and headers of messages and dead letters, too"
    )
    parser.add_argument(
        "--markers-limit", type=int, default=MARKERS_LIMIT, help="marker records in a batch (%(default)s)"
    )
    parser.add_argument(
        "--records-limit", type=int, default=RECORDS_LIMIT, help="other records in a batch (%(default)s)"
    )


def run(arguments: argparse.Namespace) -> int:
    if arguments.every < 0:
        raise PipelineError(f"--every {arguments.every:g}: expected seconds, 0 or more")
    if min(arguments.markers_limit, arguments.records_limit) < 1:
        raise PipelineError("--markers-limit and --records-limit: expected 1 or more")
    connection = Connection.read()
    spark = session("ingest")
    began = time.monotonic()
    ingest = Ingest(
        spark,
        connection,
        Topics(spark, connection),
        Lake(spark, arguments.data),
        payload=arguments.payload,
        say=lambda text: print(f"{time.monotonic() - began:7.1f} s  {text}", file=sys.stderr, flush=True),
        limits=(arguments.markers_limit, arguments.records_limit),
    )
    while True:
        rows = ingest.round()
        told = ", ".join(f"{count:,} {table}" for table, count in rows.items())
        print(f"ingested {told} in {time.monotonic() - began:.1f} s", flush=True)
        if not arguments.follow:
            return 0
        time.sleep(arguments.every)
