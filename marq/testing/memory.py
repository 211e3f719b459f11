"""The state of an in-memory broker: topics, groups, namespaces, and virtual time."""

from __future__ import annotations

import asyncio
import threading
import warnings
from collections.abc import Callable, Iterator
from itertools import count

from marq.kafka.offset_snapshots import OffsetSnapshot
from marq.kafka.records import Row
from marq.queues.definition_log import UnfinishedMessages, unfinished
from marq.settings.client import MEMORY_SCHEME, ClientSettings
from marq.testing.clock import VirtualClock
from marq.testing.group import Group
from marq.testing.namespace import Namespace
from marq.testing.time_passing import Passage
from marq.testing.topics import Topic
from marq.wire.errors import ConfigError
from marq.wire.markers import Source


class ClientLeftRunning(UserWarning):
    """A test ended without stopping a client that it started."""


class Memory:
    """One in-memory broker.

    Its consumers and its time belong to the first event loop that uses them; when that is closed, to the next one.
    Producers may send from any loop.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.clock = VirtualClock()
        self.topics: dict[str, Topic] = {}
        self._deleted: dict[str, Topic] = {}
        self._topic_ids = count(1)
        self.groups: dict[str, Group] = {}
        self.snapshots: dict[str, OffsetSnapshot] = {}
        self._clients: dict[object, tuple[str, asyncio.AbstractEventLoop]] = {}
        self._namespaces: dict[str, Namespace] = {}
        self._making = threading.Lock()
        self.passage = Passage(self.clock, self._awaits)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = ""

    @property
    def address(self) -> str:
        return MEMORY_SCHEME + self.name

    @property
    def is_elsewhere(self) -> bool:
        """Whether its consumers and its time belong to an event loop that is not the running one."""
        loop = self._loop
        return loop is not None and not loop.is_closed() and loop is not asyncio.get_running_loop()

    def stir(self) -> None:
        """Wake waiting calls to check again: a marker was written, so a message may be delivered later."""
        if self._loop is not None and self.is_elsewhere:
            self._loop.call_soon_threadsafe(self.passage.stir)
        else:
            self.passage.stir()

    def enter(self) -> None:
        """Note that the running event loop uses this broker; raise ConfigError if another one does."""
        loop = asyncio.get_running_loop()
        if loop is self._loop:
            self.passage.own()
            return
        if self._loop is not None and not self._loop.is_closed():
            raise ConfigError(
                f"{self.address} is used in an event loop of thread {self._thread!r}, and now in another one, of thread"
                f" {threading.current_thread().name!r}: all consumers of an in-memory broker, and the calls that let"
                " its time pass, must be in one event loop. Give each loop its own broker, memory://NAME"
            )
        self._loop, self._thread = loop, threading.current_thread().name
        self._forget_clients()
        self.passage.own()

    def started(self, client: object, description: str) -> None:
        self._clients[client] = description, asyncio.get_running_loop()

    def stopped(self, client: object) -> None:
        self._clients.pop(client, None)

    def warn_of_running(self) -> None:
        """Warn about the clients that were started and not stopped."""
        if left := sorted(description for description, _ in self._clients.values()):
            warnings.warn(
                f"{self.address}: left running at the end: {', '.join(left)}. Use `async with`, or call stop(), so that"
                " prefetched messages are released and outcomes are written",
                ClientLeftRunning,
                stacklevel=4,
            )

    def _awaits(self) -> bool:
        return any(owner.awaits for namespace in self._namespaces.values() for owner in namespace.owners)

    def _forget_clients(self) -> None:
        """Forget clients of closed event loops."""
        self._clients = {key: client for key, client in self._clients.items() if not client[1].is_closed()}
        self.passage = Passage(self.clock, self._awaits)
        for group in self.groups.values():
            group.forget_members()

    def namespace(self, settings: ClientSettings) -> Namespace:
        """Return the namespace of the settings' prefix, created at the first call."""
        prefix = settings.names.prefix
        # A SyncProducer calls from its own thread.
        with self._making:
            if prefix not in self._namespaces:
                self._namespaces[prefix] = Namespace(settings, self.clock, self.topics)
            return self._namespaces[prefix]

    def make_topic(self, name: str, partitions: int) -> Topic:
        """Create a topic."""
        if name in self.topics:
            raise ConfigError(f"topic {name} already exists at {self.address}")
        topic = self.topics[name] = Topic(name, partitions, topic_id=f"{next(self._topic_ids):012x}")
        if (former := self._deleted.pop(name, None)) is not None:
            topic.replace(former)
        return topic

    def delete_topic(self, name: str) -> None:
        """Delete a topic of :meth:`make_topic`, and the offsets that groups have committed for it."""
        if name not in self.topics or not self.topics[name].id:
            raise ConfigError(f"topic {name} was not created with create_topic at {self.address}")
        for namespace in self._namespaces.values():
            for owner in namespace.owners:
                owner.copy_from(name)
        self._deleted[name] = self.topics.pop(name)
        for group in self.groups.values():
            group.committed = {source: commit for source, commit in group.committed.items() if source.topic != name}

    def group(self, name: str) -> Group:
        """Return a consumer group, which may have no members."""
        return self.groups.setdefault(name, Group(name, self.snapshots))

    def position(self, namespace: Namespace, queue: str, source: Source) -> int:
        """Return the position of a queue in a partition."""
        names = namespace.names
        groups = [group for name, group in self.groups.items() if names.is_group(name)]
        return max([group.position(queue, source, names) for group in groups], default=0)

    def acquired(self, namespace: Namespace, queue: str, source: Source) -> int:
        """Return how far a queue was read in a partition; later messages are waiting."""
        position = self.position(namespace, queue, source)
        # The position of a queue with ordering is its lowest open message.
        marks = [owner.tracker.book.acquired.get((queue, source)) for owner in namespace.owners]
        return max([position, *[ranges.first_free(position) for ranges in marks if ranges is not None]])

    def sources(self, namespace: Namespace, queue: str) -> list[Source]:
        """Return the partitions of the topics in which a queue may have records."""
        own, shared = namespace.definitions(queue).topic, namespace.names.messages
        names = [shared, *([own] if own in self.topics else [])]
        return [source for name in names for source in self.topics[name].sources]

    def records(self, namespace: Namespace, queue: str, source: Source, start: int = 0) -> Iterator[Row]:
        """Return the records of a queue in a partition."""
        shared = source.topic == namespace.names.messages
        for record in self.topics[source.log.topic].logs[source.partition][start:]:
            if not shared or record.key == queue.encode():
                yield record

    def waiting(self, namespace: Namespace, queue: str) -> Iterator[tuple[Source, Row]]:
        """Return the waiting messages of a queue."""
        return self._after(namespace, queue, self.acquired)

    def _after(
        self, namespace: Namespace, queue: str, start: Callable[[Namespace, str, Source], int]
    ) -> Iterator[tuple[Source, Row]]:
        skipped = namespace.definitions.skipped(queue)
        for source in self.sources(namespace, queue):
            for record in self.records(namespace, queue, source, start(namespace, queue, source)):
                if skipped is None or skipped.left(source, record.offset, record.timestamp):
                    yield source, record

    def messages_of(self, namespace: Namespace, queue: str) -> UnfinishedMessages:
        """Count the messages of a queue that have not ended."""
        leases = [(source, lease) for source, _, lease, _ in namespace.open_messages(queue)]
        waiting = sum(1 for _ in self.waiting(namespace, queue))
        ordered = namespace.definitions(queue).by_key
        unread = sum(1 for _ in self._after(namespace, queue, self.position)) if ordered else waiting
        return unfinished(waiting, leases, unread - waiting)


_memories: dict[str, Memory] = {}


def memory_at(address: str) -> Memory:
    """Return the broker at an address in this process, created at the first call."""
    name = address.removeprefix(MEMORY_SCHEME)
    if not name:
        raise ConfigError(
            f"bootstrap_servers={address!r}: expected a name after {MEMORY_SCHEME}, such as memory://tests"
        )
    memory = _memories.get(name)
    return _memories.setdefault(name, Memory(name)) if memory is None else memory


def forget_memory(memory: Memory) -> None:
    """Free a broker's address: the next use creates a new broker."""
    if _memories.get(memory.name) is memory:
        del _memories[memory.name]
