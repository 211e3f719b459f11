"""What a consumer does with messages that it has when it learns of a purge."""

from __future__ import annotations

from marq.settings.skipped_records import SkippedRecords
from marq.wire.markers import Acquire
from tests.unit.client.fakes import P0, Rig, spin

ENDS = {P0: 10}


def learn(rig: Rig, purges: dict[str, SkippedRecords], *, in_flight: bool = False) -> None:
    purges["q"] = SkippedRecords(10**15, ENDS, in_flight=ENDS if in_flight else {})
    rig.receiver.apply_settings()


async def test_prefetched_messages_are_in_flight_so_a_purge_leaves_them(make_rig) -> None:
    purges: dict[str, SkippedRecords] = {}
    rig = make_rig(skipped=purges.get, max_in_flight=10)
    rig.add(20)
    rig.buffer.handler_demand = 10
    first = await rig.take(1)

    learn(rig, purges)
    rest = await rig.take(9)

    assert sorted(message.offset for message in [*first, *rest]) == list(range(10))
    assert rig.released == {}


async def test_prefetched_messages_that_a_purge_has_ended_are_not_delivered(make_rig) -> None:
    purges: dict[str, SkippedRecords] = {}
    rig = make_rig(skipped=purges.get, max_in_flight=10)
    rig.add(20)
    rig.buffer.handler_demand = 10
    [first] = await rig.take(1)

    learn(rig, purges, in_flight=True)
    [later] = await rig.take(1)

    assert (first.offset, later.offset) == (0, 10)
    # A RELEASE of a message that has ended changes nothing, and this consumer counts it no longer.
    assert rig.released == dict.fromkeys(range(1, 10), (0, False, ""))


async def test_messages_that_are_being_acquired_when_a_purge_becomes_known_are_released(make_rig) -> None:
    """Their ACQUIRE may come after the PURGE, and then no tracker knows them."""
    purges: dict[str, SkippedRecords] = {}
    rig = make_rig(skipped=purges.get, max_in_flight=20)
    rig.acquirer.gate.clear()
    rig.add(12)
    rig.buffer.handler_demand = 20
    await spin(50)

    learn(rig, purges)
    rig.acquirer.gate.set()
    messages = await rig.take(2)

    assert [message.offset for message in messages] == [10, 11]
    await rig.settled()
    assert rig.released == dict.fromkeys(range(10), (0, False, ""))


async def test_records_before_the_end_of_a_purge_are_not_acquired(make_rig) -> None:
    rig = make_rig(skipped={"q": SkippedRecords(10**15, ENDS)}.get)
    rig.add(12)
    rig.buffer.handler_demand = 20

    messages = await rig.take(2)

    assert [message.offset for message in messages] == [10, 11]
    # Without its PURGE, nothing else tells which records were purged.
    assert [batch.from_offset for batch in rig.acquirer.of(Acquire)] == [10]
