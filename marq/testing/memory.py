"""The state of an in-memory broker: topics, groups, namespaces, and virtual time."""

from __future__ import annotations

import asyncio
import threading
import warnings
from itertools import count

from marq.kafka.queue_positions import OffsetSnapshot
from marq.settings.client import MEMORY_SCHEME, ClientSettings
from marq.testing.clock import VirtualClock
from marq.testing.group import Group
from marq.testing.namespace import Namespace
from marq.testing.time_passing import Passage
from marq.testing.topics import Topic
from marq.wire.errors import ConfigError


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
                self._namespaces[prefix] = Namespace(settings, self.clock, self.topics, self.groups)
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
