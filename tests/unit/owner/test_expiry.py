"""Messages that have expired when their owner would send them."""

from __future__ import annotations

import pytest

from marq.core.redeliver_or_dead_letter import Destination
from marq.wire.markers import Cause, Fact, Kind, Payload
from tests.unit.owner.test_engine import LEASE_MS, Life
from tests.unit.owner.test_left_payloads import SENT_MS, acquire, dues, place


@pytest.fixture
def life() -> Life:
    life = Life()
    life.turn()
    return life


@pytest.mark.parametrize(("late_ms", "destination"), [(0, Destination.NOWHERE), (1, Destination.QUEUE)])
def test_the_header_in_a_record_counts_when_its_payload_was_copied(
    life: Life, late_ms: int, destination: Destination
) -> None:
    life.append(acquire(4))
    life.now_ms += LEASE_MS
    assert dues(life) == []
    headers = (("marq-expires-at", b"%d" % (life.engine.tracker.book.clock.now_ms + late_ms)),)

    life.engine.supply({place(4): Payload(SENT_MS, 1, b"q", headers, b"four")})
    [write] = dues(life)

    [(fire, _)] = write.due
    assert fire.destination is destination
    [fact] = [batch for batch in write.markers if isinstance(batch, Fact)]
    expired = destination is Destination.NOWHERE
    kind, cause = (Kind.CANCELLED, Cause.MESSAGE_EXPIRED) if expired else (Kind.REDELIVERED, Cause.EXPIRED)
    assert (fact.kind, [*fact.causes]) == (kind, [cause])
    counts = life.engine.tracker.book.counts["q"]
    assert (counts.messages_expired, counts.cancelled, counts.redelivered) == (expired, 0, not expired)
