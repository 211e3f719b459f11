"""Sends messages; failed sends are repeated, those of unknown outcome by the idempotent producer or by its user."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lab.proof import history
from marq.wire.names import DELIVER_AT_HEADER, ORDERING_KEY_HEADER
from tests.simulation.actor import Actor
from tests.simulation.log import TooLarge

if TYPE_CHECKING:
    from tests.simulation.world import World


class Producer(Actor):
    """Sends ``count`` messages at random moments of the phase of faults."""

    def __init__(self, world: World, count: int) -> None:
        super().__init__(world, "producer")
        self.unsent = count
        for number in range(count):
            self.later(world.rng.randint(0, world.faults_end_ms - 500), self._choose, number)

    def _choose(self, number: int) -> None:
        world, rng = self.world, self.world.rng
        queue = rng.choice(world.queues)
        headers: list[tuple[str, bytes | None]] = []
        if rng.random() < 0.3:
            headers = [("tenant", b"acme"), ("tenant", None), ("n", b"%d" % number)][: rng.randint(1, 3)]
        value = None if rng.random() < 0.05 else b"%d" % number
        delayed = world.deliver_at_share > 0 and rng.random() < world.deliver_at_share
        if delayed and not self._ordered(queue):
            # The time is by the brokers' clocks, because the producer's own may be wrong by minutes.
            headers.append((DELIVER_AT_HEADER, b"%d" % (world.wall_ms() + rng.randint(-200, 2_000))))
        # The senders' clocks may be wrong, as above.
        headers += world.expiring.header(world.wall_ms())
        if value is not None and world.hit(world.faults.large):
            # Up to the topic's limit; with marq's own headers, some of these messages are too large.
            limit = rng.choice([world.limit_bytes, world.shared_limit_bytes])
            value += b"x" * rng.randint(limit - rng.choice([100, 1_200]), limit - 40)
        key = rng.choice([None, b"k"])
        if self._ordered(queue):
            key = world.ordering.key()
        self._send(number, queue, key, value, headers)

    def _ordered(self, queue: str) -> list[str]:
        """Return the queues with ordering that get the messages of a queue."""
        definitions = self.world.definitions.of(self)
        topic = definitions.settings(queue).topic
        queues = [queue] if topic is None else definitions.queues_of_topic(topic)
        return [each for each in queues if each in self.world.ordering.queues]

    def _send(
        self, number: int, queue: str, key: bytes | None, value: bytes | None, headers: list[tuple[str, bytes | None]]
    ) -> None:
        """Send a message: its key stays in the queue's own topic; in the shared topic, the key is the queue's name."""
        world, rng = self.world, self.world.rng
        topic = world.definitions.of(self).settings(queue).topic or world.names.messages
        again = (number, queue, key, value, headers)
        if topic != world.names.messages:
            # Kafka's clients refuse a record that has neither.
            key = key if value is not None else key or b"k"
            source = world.ordering.source(world, (self._ordered(queue) or [queue])[0], topic, key)
        else:
            source = world.ordering.source(world, queue, topic, key)
            if queue in world.ordering.queues and key is not None:
                headers = [*headers, (ORDERING_KEY_HEADER, key)]
            key = queue.encode()
        said = {"message": str(number), "queue": queue, "content": history.content(queue, key, value, headers)}
        if topic != world.names.messages:
            said["topic"] = topic
        world.history.add(self.name, "invoke", "send", **said)
        if world.hit(world.faults.send_failed):
            world.history.add(self.name, "fail", "send", **said)
            self.later(rng.randint(10, 100), self._send, *again)
            return
        unknown = world.hit(world.faults.send_unknown) and rng.random() < 0.5
        if not (unknown and rng.random() < 0.5):
            try:
                record = world.messages[source].append(value, key=key, headers=headers, timestamp=self.wall_ms())
            except TooLarge:
                # Its user is told at once, and gives up.
                world.history.add(self.name, "fail", "send", **said)
                self.unsent -= 1
                return
        if unknown:
            # Its user sends it again: two messages with one meaning, each of which must be delivered. (The other half
            # of uncertain sends is sent again by the idempotent producer, which the broker ignores.)
            world.history.add(self.name, "unknown", "send", **said)
            world.stats["sent_again"] += 1
            self.later(rng.randint(10, 100), self._send, *again)
            return
        self.unsent -= 1
        world.stats["sent"] += 1
        world.history.add(self.name, "ok", "send", **said, record=history.name_of(source, record.offset))
