"""What a broker in memory keeps: topics, groups and installations, and the time that passes there."""

from __future__ import annotations

import asyncio
import threading

from marq.core.errors import ConfigError
from marq.core.markers import Source
from marq.core.names import Names
from marq.rosters import Roster
from marq.settings import MEMORY_SCHEME, ClientSettings
from marq.testing.clock import Clock
from marq.testing.group import Group
from marq.testing.installation import Installation
from marq.testing.passage import Passage
from marq.testing.topics import Topic


class Memory:
    """One broker in memory.

    Its consumers and its time belong to the first event loop that uses them, and to the next one when that is closed.
    Producers may send from anywhere.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.clock = Clock()
        self.topics: dict[str, Topic] = {}
        self.groups: dict[str, Group] = {}
        self.rosters: dict[str, Roster] = {}
        self._clients: dict[object, tuple[str, asyncio.AbstractEventLoop]] = {}
        self._installations: dict[str, Installation] = {}
        self._making = threading.Lock()
        self.passage = Passage(self.clock, self._awaits)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = ""

    @property
    def address(self) -> str:
        return MEMORY_SCHEME + self.name

    @property
    def is_elsewhere(self) -> bool:
        """Whether its consumers and its time belong to another event loop than the running one."""
        loop = self._loop
        return loop is not None and not loop.is_closed() and loop is not asyncio.get_running_loop()

    def stir(self) -> None:
        """Note that a marker was written, by which some message may come back some time."""
        if self._loop is not None and self.is_elsewhere:
            self._loop.call_soon_threadsafe(self.passage.stir)
        else:
            self.passage.stir()

    def enter(self) -> None:
        """Note that the running event loop uses this broker.

        Raises:
            ConfigError: another one does.
        """
        loop = asyncio.get_running_loop()
        if loop is self._loop:
            self.passage.own()
            return
        if self._loop is not None and not self._loop.is_closed():
            raise ConfigError(
                f"{self.address} is used in an event loop of thread {self._thread!r}, and now in another one, of thread"
                f" {threading.current_thread().name!r}: all consumers of a broker in memory, and the calls that let its"
                " time pass, belong in one event loop. Give each loop a name of its own, memory://NAME"
            )
        self._loop, self._thread = loop, threading.current_thread().name
        self._forget_clients()
        self.passage.own()

    def started(self, client: object, description: str) -> None:
        """Note that a client was started."""
        self._clients[client] = description, asyncio.get_running_loop()

    def stopped(self, client: object) -> None:
        """Note that a client was stopped."""
        self._clients.pop(client, None)

    @property
    def running(self) -> list[str]:
        """What clients were started and not stopped."""
        return sorted(description for description, _ in self._clients.values())

    def _awaits(self) -> bool:
        return any(owner.awaits for each in self._installations.values() for owner in each.owners)

    def _forget_clients(self) -> None:
        """The loop of all clients so far is closed, and they with it."""
        self._clients = {key: found for key, found in self._clients.items() if not found[1].is_closed()}
        self.clock.forget()
        self.passage = Passage(self.clock, self._awaits)
        for group in self.groups.values():
            group.forget_members()
        for installation in self._installations.values():
            for owner in installation.owners:
                owner.work()

    def installation(self, settings: ClientSettings) -> Installation:
        """Return an installation; it is made when it is first asked for."""
        prefix = settings.names.prefix
        # A SyncProducer asks in a thread of its own.
        with self._making:
            found = self._installations.get(prefix)
            if found is None:
                found = self._installations[prefix] = Installation(settings, self.clock, self.topics)
        return found

    def make_topic(self, name: str, partitions: int) -> Topic:
        """Make a topic that is nobody's yet."""
        if name in self.topics:
            raise ConfigError(f"topic {name} is there already at {self.address}")
        topic = self.topics[name] = Topic(name, partitions)
        return topic

    def group(self, name: str) -> Group:
        """Return a consumer group, which need not have members."""
        return self.groups.setdefault(name, Group(name, self.rosters))

    def acquired(self, names: Names, queue: str, source: Source) -> int:
        """Return how far a queue was read in a partition: what comes after it waits."""
        groups = [group for name, group in self.groups.items() if names.is_group(name)]
        return max([group.position(queue, source, names) for group in groups], default=0)


_memories: dict[str, Memory] = {}


def memory_at(address: str) -> Memory:
    """Return the broker at an address of this process; it is made when it is first asked for."""
    name = address.removeprefix(MEMORY_SCHEME)
    if not name:
        raise ConfigError(
            f"bootstrap_servers={address!r}: expected a name after {MEMORY_SCHEME}, such as memory://tests"
        )
    found = _memories.get(name)
    return _memories.setdefault(name, Memory(name)) if found is None else found


def forget_memory(memory: Memory) -> None:
    """Take a broker's name from it: who uses the address from now on gets a new one."""
    if _memories.get(memory.name) is memory:
        del _memories[memory.name]
