"""``lifecycle``: one row for each message, with all of its deliveries.

Processes what ``ingest`` added since the last run; messages that have not ended are carried forward.
"""

from __future__ import annotations

import argparse
import sys
import time

from pipeline.lake import Lake
from pipeline.lifecycle_runs import Run
from pipeline.session import session


class StepLog:
    """Prints the steps of a job on standard error, each with the time since the start."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    def seconds(self) -> float:
        return time.monotonic() - self._began

    def say(self, text: str) -> None:
        print(f"{self.seconds():7.1f} s  {text}", file=sys.stderr, flush=True)


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add nothing: this job has only the arguments that all jobs share."""


def run(options: argparse.Namespace) -> int:
    spark = session("lifecycle")
    steps = StepLog()
    count = Run(spark, Lake(spark, options.data), steps.say).take()
    print(f"lifecycle of {count:,} messages in {steps.seconds():.1f} s", flush=True)
    return 0
