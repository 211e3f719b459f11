"""The statistics of a run, from the history of tests/unit/proof/story.py."""

from __future__ import annotations

from lab.demo.report import Account, account_of
from lab.proof.history import Event
from marq.wire.markers import Cause
from tests.unit.proof.story import FIRST, LEASE_MS, Story, clean, events_of


def judged(events: list[Event], held: int = 1, rows: int = 3, least_held: int = 1) -> Account:
    return account_of(events, held, rows, least_held, 61.24)


def test_the_checkers_report_and_the_histories_counts_are_the_statistics() -> None:
    found = judged(clean()).statistics()

    wanted = {
        "sent": 5, "acked": 3, "dead": 1, "lost": 0, "duplicates": 1, "redelivered": 2, "acked_and_dead": 0,
        "redelivered_expired": 1, "redelivered_released": 1, "failed": 1, "seconds": 61.2, "open_at_end": 0,
        "duplicates_unexplained": 0, "from_nowhere": 0, "false_acks": 0,
    }  # fmt: skip
    assert {name: found[name] for name in wanted} == wanted


def test_a_message_whose_ack_came_before_the_fact_is_not_counted_as_redelivered() -> None:
    def told(story: Story) -> None:
        story.send(0)
        story.take("first", FIRST, 0, 0)
        story.tick()
        story.tick(LEASE_MS)
        story.ack("first", FIRST, 0)
        story.redeliver(Cause.EXPIRED)

    found = judged(events_of(told)).statistics()

    assert (found["acked"], found["redelivered"]) == (1, 0)


def test_kills_are_described_by_what_was_open_then() -> None:
    account = judged(clean(), held=1, rows=3)

    assert (account.counts["held_at_kill"], account.counts["rows_at_worker_kill"]) == (1, 3)
    assert account.broken == []


def test_kills_of_programs_that_had_nothing_open_break_promises() -> None:
    assert judged(clean(), held=0).broken == ["the consumer that was killed held 0 leases, not at least 1"]
    assert judged(clean(), rows=0).broken == ["the worker that was killed had no row open"]
