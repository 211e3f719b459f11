"""Consumer groups in memory: who has which partitions, and what was committed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from marq.core.markers import Source
from marq.core.names import Names
from marq.offsets import Committed, Search
from marq.positions import Positions, Progress
from marq.reader import Assignee, NotCommitted
from marq.records import Records
from marq.rosters import Roster
from marq.serving import Serving
from marq.testing.topics import Topic

#: Nobody is thrown out of a group here, however long it says nothing.
_KEEP_ALIVE_S = 3600.0


@dataclass
class Group:
    """One consumer group."""

    name: str
    #: Of all groups: those that commits name.
    rosters: dict[str, Roster]
    committed: dict[Source, Committed] = field(default_factory=dict)
    members: list[Member] = field(default_factory=list)
    _turn: asyncio.Lock | None = None
    _rebalances: set[asyncio.Task[None]] = field(default_factory=set)

    def forget_members(self) -> None:
        """Drop members whose event loop is gone."""
        self.members.clear()
        self._rebalances.clear()
        self._turn = None

    def position(self, queue: str, source: Source, names: Names) -> int:
        """Return how far a queue was read in a partition by this group."""
        committed = self.committed.get(source)
        if committed is None:
            return 0
        owner = names.owner_of_group(self.name)
        return Positions.decode(committed.offset, committed.metadata, owner, self.rosters).by_queue.get(queue, 0)

    async def join(self, member: Member) -> None:
        self.members.append(member)
        await self.rebalance()

    async def leave(self, member: Member) -> None:
        if member in self.members:
            self.members.remove(member)
            await self.rebalance()

    def rebalance_soon(self) -> None:
        task = asyncio.get_running_loop().create_task(self.rebalance(), name="marq-memory-rebalance")
        self._rebalances.add(task)
        task.add_done_callback(self._rebalances.discard)

    async def rebalance(self) -> None:
        """Take all partitions away and give them out anew, as a rebalance without cooperation does."""
        if self._turn is None:
            self._turn = asyncio.Lock()
        async with self._turn:
            members = list(self.members)
            await asyncio.gather(*[member.revoke() for member in members])
            shares = _shares(members)
            for member in members:
                member.assign(shares[id(member)])


def _shares(members: Sequence[Member]) -> dict[int, list[Source]]:
    """Deal the partitions out, each to one of the members that read its topic."""
    shares: dict[int, list[Source]] = {id(member): [] for member in members}
    turn = 0
    for name in sorted({topic for member in members for topic in member.topics}):
        readers = [member for member in members if name in member.topics]
        for partition in range(readers[0].partitions_of(name)):
            shares[id(readers[turn % len(readers)])].append(Source(name, partition))
            turn += 1
    return shares


class Member:
    """A :class:`marq.reader.GroupMember` that reads topics in memory."""

    keep_alive_s = _KEEP_ALIVE_S

    def __init__(
        self, groups: Mapping[str, Group], group: Group, names: Names, topics: Mapping[str, Topic], serving: Serving
    ) -> None:
        self._groups = groups
        self._group = group
        self._names = names
        self._topics = topics
        self._serving = serving
        self._assignee: Assignee
        self._read_to: dict[Source, int] = {}
        self._progress = Progress()
        self._assignments = 0
        self._more = asyncio.Event()
        self._heard: set[str] = set()

    @property
    def topics(self) -> list[str]:
        return self._serving.topics

    def partitions_of(self, topic: str) -> int:
        return self._topics[topic].partitions

    async def start(self, assignee: Assignee) -> None:
        self._assignee = assignee
        self._listen()
        await self._group.join(self)

    async def stop(self, limit_s: float) -> None:
        self._forget()
        for name in self._heard:
            self._topics[name].ignore(self._more.set)
        self._heard.clear()
        await self._group.leave(self)

    def serve(self, serving: Serving) -> None:
        self._serving = serving
        self._forget()
        self._listen()
        self._group.rebalance_soon()

    def _listen(self) -> None:
        for name in self.topics:
            self._topics[name].listen(self._more.set)
            self._heard.add(name)

    # --- assignment ---------------------------------------------------------------------------------------------------

    async def revoke(self) -> None:
        await self._assignee.revoked()
        self._forget()

    def _forget(self) -> None:
        self._read_to.clear()
        self._progress.clear()

    def assign(self, sources: Iterable[Source]) -> None:
        """Begin with these partitions, where the group's queues go on."""
        group = self._group
        search = Search(self._names, group.name, self._serving, sources, group.committed, group.rosters)
        if search.needs_others:
            for name, other in sorted(self._groups.items()):
                if other is not group and self._names.is_group(name):
                    search.consider(name, other.committed, group.rosters)
        for source, place in search.places().items():
            if place.roster is not None:
                group.rosters[place.roster.id] = place.roster
            self._read_to[source] = place.start
            self._progress.begin(source, place.positions, place.start)
        self._assignments += 1
        self._assignee.assigned()
        self._more.set()

    # --- what the flow asks -------------------------------------------------------------------------------------------

    async def fetch(self, max_records: int) -> Mapping[Source, Records]:
        assignment = self._assignments
        while not (fetched := self._take(max_records)):
            self._more.clear()
            await self._more.wait()
            if assignment != self._assignments:
                # Asked for before the partitions came: nobody would look at what is read now.
                return {}
        return self._progress.unmet(self._serving, fetched)

    def _take(self, left: int) -> dict[Source, Records]:
        taken: dict[Source, Records] = {}
        for source, start in list(self._read_to.items()):
            records = self._topics[source.topic].logs[source.partition][start : start + left]
            if records:
                taken[source] = Records.of(records)
                left -= len(records)
                # To the end, so that the next fetch begins with another partition.
                del self._read_to[source]
                self._read_to[source] = records[-1].offset + 1
        return taken

    async def commit(self, offsets: Mapping[Source, int]) -> None:
        after = self._progress.after(self._serving, offsets)
        for topic, partition in offsets.keys() - after.keys():
            raise NotCommitted(f"{topic}/{partition} is not assigned any more")
        for source, offset in offsets.items():
            self._group.committed[source] = Committed(offset, after[source].encode(offset))
        self._progress.take(after)

    def rewind(self, offsets: Mapping[Source, int]) -> None:
        for source, offset in offsets.items():
            if source in self._read_to:
                self._read_to[source] = offset
        self._more.set()

    async def keep_alive(self) -> None:
        return
