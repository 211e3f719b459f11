"""``lifecycle``: one row for each message, with all of its deliveries.

Takes what ``ingest`` has brought since the last time; messages that have not come to their end are carried forward.
"""

from __future__ import annotations

import argparse
import sys
import time

from pipeline.lake import Lake
from pipeline.runs import Run
from pipeline.session import session


def arguments(parser: argparse.ArgumentParser) -> None:
    """There are none but those of all jobs."""


def run(arguments: argparse.Namespace) -> int:
    spark = session("lifecycle")
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - began:7.1f} s  {text}", file=sys.stderr, flush=True)

    rows = Run(spark, Lake(spark, arguments.data), say).take()
    print(f"lifecycle of {rows['messages']:,} messages in {time.monotonic() - began:.1f} s", flush=True)
    return 0
