"""Whether a history stayed within limits: what counts, until when, and what docs/limits.md excuses."""

from __future__ import annotations

from typing import Any

import pytest

from lab.faults.flow_control import Peaks, exceeded, passed_by, peaks_of, turns_of_others
from lab.proof.history import Event
from marq.settings.limits import KeyLimits, Limits, Rate

#: The key of each record of a history: two of one key, the others of another one, in two partitions.
KEYS = {"t/0/0": "a", "t/0/1": "a", "t/0/2": "b", "t/1/0": "b"}


def deliver(record: str, process: str = "one") -> dict[str, Any]:
    return {"process": process, "type": "ok", "op": "deliver", "queue": "q", "record": record, "attempt": 1}


def ack(record: str, process: str = "one", type_: str = "invoke") -> dict[str, Any]:
    source, _, offset = record.rpartition("/")
    return {"process": process, "type": type_, "op": "ack", "source": source, "offsets": [int(offset)]}


def fault(op: str, process: str = "one", type_: str = "info") -> dict[str, Any]:
    return {"process": "nemesis", "type": type_, "op": op, "target": process}


def history(*events: dict[str, Any], seconds: float = 0.001) -> list[Event]:
    send = {"process": "sender", "type": "ok", "op": "send", "queue": "q"}
    sent = [send | {"record": name, "ordering_key": key} for name, key in KEYS.items()]
    return [event | {"at_ms": number * 1000 * seconds} for number, event in enumerate([*sent, *events])]


@pytest.mark.parametrize(
    ("events", "peaks"),
    [
        ([deliver("t/0/0"), deliver("t/0/1"), deliver("t/1/0")], Peaks(2, 2, 3, 3)),
        ([deliver("t/0/0"), ack("t/0/0"), deliver("t/0/1")], Peaks(1, 1, 1, 1)),
        # The handler has ended when it begins to settle, not only when that is durable.
        ([deliver("t/0/0"), ack("t/0/0", type_="ok"), deliver("t/0/1")], Peaks(2, 2, 2, 2)),
        ([deliver("t/0/0"), ack("t/0/0", "two"), deliver("t/0/1")], Peaks(2, 2, 2, 2)),
        ([deliver("t/0/0"), fault("kill"), deliver("t/0/1", "two")], Peaks(1, 1, 1, 1)),
        # A delivery that the killed process still wrote.
        ([fault("kill"), deliver("t/0/0"), deliver("t/0/1", "two")], Peaks(1, 1, 1, 1)),
        ([deliver("t/0/0"), fault("pause", type_="invoke"), deliver("t/0/1", "two")], Peaks(1, 1, 1, 1)),
        ([deliver("t/0/0"), fault("revoke"), deliver("t/1/0", "two")], Peaks(1, 1, 2, 1)),
        # Its sender does not know where the message is.
        ([deliver("t/0/0"), deliver("t/0/9")], Peaks(1, 1, 1, 1)),
    ],
)
def test_a_message_runs_until_its_handler_ends_in_any_process(events: list[Event], peaks: Peaks) -> None:
    assert peaks_of(history(*events), "q", KEYS) == peaks


def test_each_limit_that_is_exceeded_or_not_reached_is_named() -> None:
    both = [deliver("t/0/0"), deliver("t/0/1")]

    assert exceeded(history(*both), "q", Limits(2, None, KeyLimits(2))) == []
    assert exceeded(history(*both), "q", Limits(None, None, KeyLimits(1))) == ["of_key: 2 ran at a time, 1 may"]
    assert exceeded(history(*both), "q", Limits(1)) == [
        "of_partition: 2 ran at a time, 1 may", "since_rebalance: 2 ran at a time, 1 may",
    ]  # fmt: skip
    assert exceeded(history(deliver("t/0/0")), "q", Limits(None, None, KeyLimits(2)))[0].startswith("no key came to")


def test_rates_are_counted_over_some_seconds_by_key_and_in_all() -> None:
    begun = [deliver("t/0/0"), deliver("t/0/1")] * 10

    assert exceeded(history(*begun, seconds=0.5), "q", Limits(None, Rate(2), KeyLimits(None, Rate(2)))) == []
    assert exceeded(history(*begun, seconds=0.25), "q", Limits(None, Rate(2))) == [
        "the queue: 20 began within 5 s, 2/s allows 13"
    ]
    assert exceeded(history(*begun, seconds=0.25), "q", Limits(None, None, KeyLimits(None, Rate(2)))) == [
        "a: 20 began within 5 s, 2/s allows 13"
    ]


def test_messages_that_wait_behind_many_of_a_busy_key_count_how_many_of_those_began_meanwhile() -> None:
    events = history(*map(deliver, ("t/0/0", "t/0/2", "t/0/1", "t/1/0")))

    # Both of "b" were sent after two of "a", but only one of them to the same partition.
    assert turns_of_others(events, "q", "a", least=2) == [1]
    assert turns_of_others(events, "q", "a", least=3) == []


@pytest.mark.parametrize(("before", "counted"), [([], [0]), ([deliver("t/0/0")], [1]), ([fault("revoke")], [0])])
def test_turns_of_others_are_counted_until_a_consumer_is_killed(before: list[Event], counted: list[int]) -> None:
    after = map(deliver, ("t/0/0", "t/0/1", "t/0/2"))

    assert turns_of_others(history(*before, fault("kill"), *after), "q", "a", least=2) == counted


def test_urgent_messages_count_that_a_process_begins_while_lower_ones_of_their_partition_wait() -> None:
    def event(op: str, queue: str, record: str, process: str = "one") -> dict[str, Any]:
        return {"process": process, "type": "ok", "op": op, "queue": queue, "record": record}

    def urgent(record: str, process: str = "one") -> dict[str, Any]:
        return event("deliver", "urgent", record, process)

    events = [
        urgent("t/0/0"),
        event("send", "low", "t/0/1"), event("send", "low", "t/0/2"),
        # One that waits in another partition does not count, nor do the messages of other processes.
        urgent("t/0/3"), urgent("t/1/0"), urgent("t/0/4"), urgent("t/0/5", "two"),
        event("deliver", "low", "t/0/1"),
        urgent("t/0/6"),
        # Its sender learns after the delivery where it is; and it is delivered again.
        event("deliver", "low", "t/0/2"), event("send", "low", "t/0/7"), event("deliver", "low", "t/0/2"),
        event("deliver", "low", "t/0/7", "two"), event("send", "low", "t/0/7"),
        urgent("t/0/8"),
    ]  # fmt: skip

    assert passed_by([one | {"at_ms": number} for number, one in enumerate(events)], "urgent", "low") == [2, 1, 0, 1, 0]
    # A run at the end counts, although no message of the lower queue follows.
    assert passed_by([one | {"at_ms": number} for number, one in enumerate(events[:4])], "urgent", "low") == [1]
