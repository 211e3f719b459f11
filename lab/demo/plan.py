"""The plan of the demo, and the fate of each message: shared by the sender, the consumers and the final check.

A message is identified by its number. Numbers alternate between the queues, and the *place* of a message in its queue
decides what a consumer does with it. So each queue gets its share of every case, and a run can be checked without a
list.
"""

from __future__ import annotations

import math
import os
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

VALUE_BYTES = 200
_NUMBER_BYTES = 8

#: Which messages of a queue are forgotten at the first delivery, fail at the first two, or fail always.
FORGET_EVERY = 10
FAIL_EVERY, FAIL_AT, FAIL_ATTEMPTS = 50, 7, 2
HOPELESS_EVERY, HOPELESS_AT = 1_000, 13

LEAST_LEASE_SECONDS = 0.5
#: One day, because clients also use the limit as their timeout, in milliseconds.
MOST_LIMIT_SECONDS = 86_400.0

QUEUES_FILE = Path(__file__).with_name("queues.toml")


class Conduct(Enum):
    """What a consumer does with a delivery."""

    ACK = "ack"
    FORGET = "forget"
    FAIL = "fail"


@dataclass(frozen=True)
class Plan:
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

    def queue(self, number: int) -> str:
        return queue_name(number % self.queues)

    @property
    def queue_names(self) -> list[str]:
        return [queue_name(index) for index in range(self.queues)]

    def conduct(self, number: int, attempt: int) -> Conduct:
        place = number // self.queues
        if place % HOPELESS_EVERY == HOPELESS_AT:
            return Conduct.FAIL
        if attempt == 1 and place % FORGET_EVERY == 0:
            return Conduct.FORGET
        if attempt <= FAIL_ATTEMPTS and place % FAIL_EVERY == FAIL_AT:
            return Conduct.FAIL
        return Conduct.ACK

    def number(self, queue: str, value: bytes) -> int | None:
        """Return the number of a message; None if the demo did not send it, or not to this queue."""
        number = read_number(value)
        return number if number is not None and number < self.messages and self.queue(number) == queue else None


@cache
def queue_name(index: int) -> str:
    return f"demo-{index:02d}"


def make_value(number: int) -> bytes:
    """Return the value of a message: its number, and bytes that follow from it, so that damage shows."""
    head = b"%0*d" % (_NUMBER_BYTES, number)
    filling = sha256(head).hexdigest().encode() * (VALUE_BYTES // 64 + 1)
    return head + filling[: VALUE_BYTES - _NUMBER_BYTES]


def read_number(value: bytes | None) -> int | None:
    """Return the number in a value, or None if the demo did not send this value."""
    if value is None or len(value) != VALUE_BYTES or not value[:_NUMBER_BYTES].isdigit():
        return None
    number = int(value[:_NUMBER_BYTES])
    return number if value == make_value(number) else None


_OPTIONS: Mapping[str, tuple[str, type, str]] = {
    "messages": ("messages", int, "messages to send"),
    "queues": ("queues", int, "queues to spread them over"),
    "lease": ("lease_seconds", float, "seconds of a lease"),
    "held": ("least_held", int, "leases that the killed consumer must hold"),
    "limit": ("limit_seconds", float, "longest time without progress, in seconds"),
}


def read_plan(arguments: Sequence[str], environment: Mapping[str, str] = os.environ) -> Plan:
    """Return the plan from the command line, else from ``DEMO_…`` in the environment, else from the defaults."""
    parser = ArgumentParser(prog="python -m lab.demo", description=__doc__ and __doc__.splitlines()[0])
    values: dict[str, Any] = {}
    for option, (field, kind, text) in _OPTIONS.items():
        variable = f"DEMO_{option.upper()}"
        default = environment.get(variable) or getattr(Plan, field)
        about = f"{text} (default: ${variable}, else {getattr(Plan, field):g})"
        # A text default is parsed as if it had been typed, mistakes included.
        parser.add_argument(f"--{option}", dest=field, type=kind, default=default, help=about)
    values = vars(parser.parse_args(arguments))
    plan = Plan(**values)
    most = 10**_NUMBER_BYTES - 1
    if not 1 <= plan.messages <= most:
        parser.error(f"--messages: expected 1 to {most}, got {plan.messages}")
    if not 1 <= plan.queues <= plan.messages:
        parser.error(f"--queues: expected 1 to the number of messages, {plan.messages}, got {plan.queues}")
    if not LEAST_LEASE_SECONDS <= plan.lease_seconds < math.inf:
        parser.error(f"--lease: expected at least {LEAST_LEASE_SECONDS:g} s, got {plan.lease_seconds:g}")
    if plan.least_held < 0:
        parser.error(f"--held: expected 0 or more leases, got {plan.least_held}")
    if not 0 < plan.limit_seconds <= MOST_LIMIT_SECONDS:
        parser.error(f"--limit: expected more than 0, at most {MOST_LIMIT_SECONDS:g} s, got {plan.limit_seconds:g}")
    return plan
