"""Sends messages; a failed send is tried again, one of unknown outcome by the idempotent producer or by its user."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.simulation.world import World


class Producer:
    """Sends ``count`` messages at random moments of the phase of faults."""

    def __init__(self, world: World, count: int) -> None:
        self.world = world
        self.unsent = count
        for number in range(count):
            world.schedule(world.rng.randint(0, world.faults_end_ms - 500), self._send, number)

    def _send(self, number: int) -> None:
        world, rng = self.world, self.world.rng
        if world.hit(world.faults.send_failed):
            world.schedule(rng.randint(10, 100), self._send, number)
            return
        queue = rng.choice(world.queues)
        source = rng.choice(world.sources)
        headers: list[tuple[str, bytes | None]] = []
        if rng.random() < 0.3:
            headers = [("tenant", b"acme"), ("tenant", None), ("n", b"%d" % number)][: rng.randint(1, 3)]
        value = None if rng.random() < 0.05 else b"%d" % number
        record = world.messages[source].append(value, key=queue.encode(), headers=headers)
        world.checker.sent(source, record, queue)
        if world.hit(world.faults.send_unknown) and rng.random() < 0.5:
            # Its user sends it again: two messages with one meaning, each of which must be delivered. (The other half
            # is sent again by the idempotent producer, which the broker ignores.)
            world.checker.stats["sent_again"] += 1
            world.schedule(rng.randint(10, 100), self._send, number)
            return
        self.unsent -= 1
