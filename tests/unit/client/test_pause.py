"""A paused queue: what consumers release, leave with the tracker, and do not read."""

from __future__ import annotations

from marq.settings.queue import QueueSettings
from marq.wire.markers import NOW, Acquire, Release
from tests.unit.client.fakes import P0, FakeRecord, Rig, spin

PAUSED = QueueSettings(paused=True)


def pause(rig: Rig, settings: dict[str, QueueSettings]) -> None:
    settings["q"] = PAUSED
    rig.receiver.apply_settings()


async def test_prefetched_messages_are_released_uncounted_and_nothing_is_read(make_rig) -> None:
    settings = {"q": QueueSettings()}
    rig = make_rig(queue=settings.__getitem__, max_in_flight=10)
    rig.add(20)
    rig.buffer.handler_demand = 10
    held = (await rig.take(3))[-1]

    pause(rig, settings)
    await rig.settled()
    rig.receiver.demand()
    await spin(50)

    assert not rig.buffer.ready
    given_back = {offset for each in rig.settler.of(Release) for offset in each.offsets}
    assert given_back == set(range(3, 10))
    assert not any(each.counted for each in rig.settler.of(Release))
    assert rig.receiver.prefetch.in_flight == 3
    assert max(max(each.offsets) for each in rig.acquirer.of(Acquire)) == 9
    # Running handlers finish as usual.
    await held.ack()
    assert rig.receiver.prefetch.in_flight == 2


async def test_others_of_the_group_go_on_and_what_is_paused_is_left_with_the_tracker(make_rig) -> None:
    settings = {"q": PAUSED, "other": QueueSettings()}
    rig = make_rig(("q", "other"), queue=settings.__getitem__)
    rig.reader.add(P0, *[FakeRecord(offset, key=b"other" if offset % 2 else b"q") for offset in range(6)])

    messages = await rig.take(3, "other")
    await spin(50)

    assert [message.offset for message in messages] == [1, 3, 5]
    assert not rig.receiver.prefetch.buffers["q"].ready
    parked = [each for each in rig.acquirer.of(Acquire) if each.queue == "q"]
    assert [offset for each in parked for offset in each.offsets] == [0, 2, 4]
    # Due at once: with the time of a sender whose clock is ahead they would come late.
    assert {due_ms for each in parked for due_ms in each.dues_ms or [NOW]} == {0}
    assert rig.receiver.prefetch.in_flight == 3


async def test_messages_acquired_during_a_pause_are_released(make_rig) -> None:
    settings = {"q": QueueSettings()}
    rig = make_rig(queue=settings.__getitem__)
    rig.reader.add(P0, FakeRecord(0))
    rig.acquirer.gate.clear()
    rig.buffer.call_demand += 1
    rig.receiver.demand()
    await spin(50)

    pause(rig, settings)
    rig.acquirer.gate.set()
    await rig.settler.until(lambda: bool(rig.settler.of(Release)))

    [given_back] = rig.settler.of(Release)
    assert (list(given_back.offsets), list(given_back.delays_ms), given_back.counted) == ([0], [0], False)
    assert not rig.buffer.ready
    assert rig.receiver.prefetch.in_flight == 0
