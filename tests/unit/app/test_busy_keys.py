"""What handler processes tell of the keys that wait for their turns."""

from __future__ import annotations

from typing import Any, cast

import pytest

from marq.consumer.ordering import KeyQueues
from marq.consumer.turns import Turns
from marq.settings.limits import Limits
from marq.settings.queue import QueueSettings
from marq_worker.busy_keys import MAX_KEYS, of_queue, report
from marq_worker.redaction import HIDDEN, Redaction


class Source:
    """A source whose messages were sent at their offsets."""

    def timestamp_ms(self, offset: int) -> int:
        return offset


def busy(*keys: bytes) -> Turns[KeyQueues]:
    turns: Turns[KeyQueues] = Turns(QueueSettings(limits=Limits.read({"per_key": {"concurrency": 1}})))
    turns.line(cast("KeyQueues", Source()), 0.0).add(range(len(keys)), keys)
    turns.take(0.0)
    return turns


def test_the_busiest_keys_come_first() -> None:
    keys = [b"%d" % number for number in range(20)]
    told = report(busy(*keys, b"noisy", b"noisy", *keys, b"noisy"), ["ordering"], Redaction(), 0.0)

    assert (told["waiting"], told["at_limit"], len(told["busiest"])) == (21, 21, MAX_KEYS)
    assert told["busiest"][0] == {
        "key": "noisy", "waiting": 2, "running": 1, "at_limit": True, "first_sent_ms": 21,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("setting", "hidden", "shown"),
    [
        (["ordering"], (), "acme"),
        (["ordering"], ("marq-ordering-key",), HIDDEN),
        (["header:Tenant"], ("marq-ordering-key",), "acme"),
        (["header:Tenant"], ("tenant",), HIDDEN),
        # It was changed, and messages keep their former keys.
        (["ordering", "header:Tenant"], ("tenant",), HIDDEN),
    ],
)
def test_a_key_is_hidden_with_its_header(setting: list[str], hidden: tuple[str, ...], shown: str) -> None:
    told = report(busy(b"acme", b"acme"), setting, Redaction(hidden), 0.0)

    assert [key["key"] for key in told["busiest"]] == [shown]


def test_a_key_in_several_partitions_is_one_key() -> None:
    turns = busy(b"a", b"a", b"a")
    turns.line(cast("KeyQueues", Source()), 0.0).add(range(7, 9), [b"a"] * 2)
    turns.take(0.0)
    told = [{"keys": {"mail": report(turns, ["ordering"], Redaction(), 0.0)}}] * 2

    [key] = of_queue("mail", [{"handlers": told}])["busiest"]

    assert key == {"key": "a", "waiting": 6, "running": 4, "at_limit": True, "first_sent_ms": 1}


def test_processes_are_added_up() -> None:
    first, second = busy(b"a", b"a", b"b", b"b", b"b"), busy(b"c", b"c", b"c", b"c")
    told = [{"keys": {"mail": report(turns, ["ordering"], Redaction(), 0.0)}} for turns in (first, second)]
    workers: list[dict[str, Any]] = [{"handlers": [told[0], {"keys": {}}]}, {"handlers": [told[1], {}]}, {}]

    found = of_queue("mail", workers)

    assert (found["waiting"], found["at_limit"]) == (3, 3)
    assert [(key["key"], key["waiting"]) for key in found["busiest"]] == [("c", 3), ("b", 2), ("a", 1)]
    assert of_queue("other", workers) == {"waiting": 0, "at_limit": 0, "busiest": []}
