"""The sizes of a run of the demo; a message is identified by its number, and numbers alternate between the queues."""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

VALUE_BYTES = 200
#: Digits of a message's number, with which its value begins.
NUMBER_DIGITS = 8
LEAST_LEASE_SECONDS = 0.5
#: One day, because clients also use the limit as their timeout, in milliseconds.
MOST_LIMIT_SECONDS = 86_400.0
#: Messages in handlers at a time, of each queue and consumer.
AT_ONCE = 250
#: The backoff is short, so that failed messages come back during the run.
QUEUES = """[defaults]
lease = 5
max_attempts = 5
backoff = { base = 0.2, factor = 2, max = 2, jitter = true }
"""
#: The same for the checker.
SETTINGS = {"max_attempts": 5, "backoff": [200, 2, 2000, True]}


@dataclass(frozen=True)
class DemoPlan:
    """Sizes of a run.

    ``least_held`` is the number of leases that the killed consumer must hold. ``limit_seconds`` is the longest time
    without progress, so that a run on a busy machine may take longer.
    """

    messages: int = 100_000
    queues: int = 20
    consumers: int = 3
    lease_seconds: float = 5.0
    least_held: int = 100
    limit_seconds: float = 240.0

    @property
    def queue_names(self) -> list[str]:
        return [f"demo-{index:02d}" for index in range(self.queues)]

    @property
    def consumer_options(self) -> list[str]:
        """Options of :mod:`lab.consumer`; forgotten messages are redelivered, because no lease is renewed."""
        lease = f"{self.lease_seconds:g}"
        return ["--manner=demo", "--work=0", f"--at-once={AT_ONCE}", f"--lease={lease}", f"--max-lease={lease}"]


def make_value(number: int) -> bytes:
    """Return the value of a message."""
    return b"%0*d" % (NUMBER_DIGITS, number) + b"x" * (VALUE_BYTES - NUMBER_DIGITS)


#: Options by name: field, type, text, least and most; there is a queue for each message at most.
_OPTIONS: Mapping[str, tuple[str, type, str, float, float]] = {
    "messages": ("messages", int, "messages to send", 1, 10**NUMBER_DIGITS - 1),
    "queues": ("queues", int, "queues to spread them over", 1, 10**NUMBER_DIGITS - 1),
    "lease": ("lease_seconds", float, "seconds of a lease", LEAST_LEASE_SECONDS, sys.float_info.max),
    "held": ("least_held", int, "leases that the killed consumer must hold", 0, 10**NUMBER_DIGITS),
    "limit": ("limit_seconds", float, "longest time without progress, in seconds", 0.1, MOST_LIMIT_SECONDS),
}


def read_plan(arguments: Sequence[str], environment: Mapping[str, str] = os.environ) -> DemoPlan:
    """Return the plan from the command line, else from ``DEMO_…`` in the environment, else from the defaults."""
    parser = ArgumentParser(prog="python -m lab.demo", description="Run the main job: send, kill, account for all.")
    for option, (field, kind, text, _, _) in _OPTIONS.items():
        variable = f"DEMO_{option.upper()}"
        default = environment.get(variable) or getattr(DemoPlan, field)
        about = f"{text} (default: ${variable}, else {getattr(DemoPlan, field):g})"
        # A text default is parsed as if it had been typed, mistakes included.
        parser.add_argument(f"--{option}", dest=field, type=kind, default=default, help=about)
    plan = DemoPlan(**vars(parser.parse_args(arguments)))
    for option, (field, _, _, least, most) in _OPTIONS.items():
        most = plan.messages if option == "queues" else most
        if not least <= getattr(plan, field) <= most:
            parser.error(f"--{option}: expected {least:g} to {most:g}, got {getattr(plan, field):g}")
    return plan
