"""Queues that deliver at most once are started in a transaction: a crash leaves nothing between ACQUIRE and commit.

Found by the fault scenario ``at-most-once-killed``: a consumer that died between the two left messages which were
redelivered when their leases ended, and their records were read and handed out, too.
"""

from __future__ import annotations

from collections.abc import Callable

from marq.core.markers import Acquire, Source, Spend
from marq.core.queue import AT_MOST_ONCE, QueueSettings
from tests.unit.client.fakes import FakeRecord, Rig

P0 = Source("t", 0)


async def test_what_is_delivered_at_most_once_is_acquired_and_committed_in_one(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(queue=lambda _: QueueSettings(delivery=AT_MOST_ONCE))
    rig.reader.add(P0, FakeRecord(5), FakeRecord(6))

    messages = await rig.take(2)

    assert [message.offset for message in messages] == [5, 6]
    assert [list(each.offsets) for each in rig.once.of(Acquire)] == [[5, 6]]
    assert rig.acquirer.of(Acquire) == []
    assert [list(each.offsets) for each in rig.settler.of(Spend)] == [[5, 6]]


async def test_all_other_queues_are_started_as_the_consumer_says(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    rig.reader.add(P0, FakeRecord(5))

    await rig.take(1)

    assert len(rig.acquirer.of(Acquire)) == 1
    assert rig.once.of(Acquire) == []
