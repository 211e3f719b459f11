"""``ingest``: from Kafka's topics to Parquet, up to now or continuously.

Markers, messages and dead letters become tables of the data directory, each record once, even after interruptions.
Payloads of messages are left out unless --payload is given.
"""

from __future__ import annotations

import argparse
import sys
import time

from py4j.protocol import Py4JNetworkError

from pipeline.error_sentences import sentence
from pipeline.errors import PipelineError
from pipeline.ingest import MARKERS_LIMIT, RECORDS_LIMIT, Ingest
from pipeline.jobs.lifecycle import StepLog
from pipeline.kafka import Connection, TopicAdmin
from pipeline.lake import Lake
from pipeline.session import session


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--follow", action="store_true", help="continue until Ctrl-C")
    parser.add_argument("--every", type=float, default=10.0, metavar="SECONDS", help="pause between rounds (10)")
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
    connection = Connection.read()
    spark = session("ingest")
    steps, topics, lake = StepLog(), TopicAdmin(spark, connection), Lake(spark, options.data)
    ingest = Ingest(spark, connection, topics, lake, payload=options.payload, say=steps.say, limits=limits)
    done = False
    while True:
        try:
            rows = ingest.round()
            done = True
        except Exception as error:
            # The first round shows whether the settings are right. What fails later may pass: a broker restarts, a
            # topic is recreated, an operator quarantines a record.
            if not options.follow or not done or isinstance(error, Py4JNetworkError):
                raise
            print(f"error: {sentence(error)}; trying again in {options.every:g} s", file=sys.stderr, flush=True)
        else:
            shown = ", ".join(f"{count:,} {table}" for table, count in rows.items())
            print(f"ingested {shown} in {steps.seconds():.1f} s", flush=True)
        if not options.follow:
            return 0
        time.sleep(options.every)
