"""The end of a world: when all is done, and what the logs say then."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

from lab.proof import history
from marq.core.storage.rows import IN_ORDER, parse_row_key
from marq.wire.markers import Source
from marq.wire.names import REASON_HEADER
from marq.wire.record_headers import expired
from tests.simulation.handling import KILLER
from tests.simulation.oracle import Violation, table_difference
from tests.simulation.table import LocalTable

if TYPE_CHECKING:
    from tests.simulation.group import Group
    from tests.simulation.tracker import Owner
    from tests.simulation.world import World

#: How often the inspector checks whether everything has ended.
INSPECT_MS = 250
#: How long the world may take to drain after the last fault, in simulated time.
DRAIN_MS = 60_000
#: After this time without events, a world with a stopped tracker counts as waiting for it.
QUIET_MS = 6_000


class Inspector:
    """Inspects the world from the last fault on."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._last_ms = world.faults_end_ms + DRAIN_MS
        self.drained = False
        self._events = 0
        self._quiet_since_ms = 0
        world.schedule(world.faults_end_ms + INSPECT_MS, self._inspect)

    def _inspect(self) -> None:
        world = self._world
        self.drained = (
            world.producer.unsent <= 0
            and (world.delayer is None or world.delayer.done)
            and (world.purger is None or world.purger.done)
            and (all(_group_is_done(group) for group in world.groups) or self._waits_for_halted())
            and all(_owner_is_done(owner) for owner in world.owners)
        )
        if not self.drained and world.now_ms > self._last_ms:
            raise Violation("stuck", _what_is_left(world))
        world.schedule(INSPECT_MS, self._inspect)

    def _waits_for_halted(self) -> bool:
        """Whether nothing happens, because consumers wait for the answer of a tracker that has stopped."""
        world, events = self._world, len(self._world.history.events)
        if events > self._events:
            self._events, self._quiet_since_ms = events, world.now_ms
        halted = bool(world.halted and world.ordering.queues)
        return halted and world.now_ms - self._quiet_since_ms > QUIET_MS


def _group_is_done(group: Group) -> bool:
    newest = group.world.definitions.newest
    if not group.members or any(member.busy or member.known != newest for member in group.members):
        return False
    return all(
        member.reader.positions.get(source, -1) >= group.world.messages[source].end(committed=group.committed_reads)
        for source, member in group.assignment.items()
        if member.serving.queues
    )


def _owner_is_done(owner: Owner) -> bool:
    if owner.halted:
        return True
    book = owner.tracker.book
    return (
        owner.alive
        and owner.working
        and owner.writing.attempt is None
        and not owner.engine.owes_rows
        and not owner.engine.answers
        and len(book) == len(_gone(owner))
        and owner.position >= len(owner.markers.records)
    )


def _gone(owner: Owner) -> list[tuple[str, Source, int]]:
    """Return open messages of queues with ordering that wait for a RESUME at a later record: their records are gone."""
    logs = owner.world.messages
    return [
        (lease.queue, source, offset)
        for source, offset, lease in owner.tracker.book.open_leases()
        if lease.state in IN_ORDER and source in logs and offset < logs[source].start
    ]


def _what_is_left(world: World) -> str:
    lags = [len(owner.markers.records) - owner.position for owner in world.owners]
    books = [len(owner.tracker.book) for owner in world.owners]
    offsets = {group.kafka_name: group.committed for group in world.groups}
    delayer = world.delayer
    delayed = "" if delayer is None else f"undelayed {delayer.unsent}, questions {delayer.asking}, "
    return f"unsent {world.producer.unsent}, {delayed}tracker lags {lags}, open {books}, offsets {offsets}"


def check_blame(world: World) -> None:
    """Check that a message whose handler ends its process uses up its own attempts, and no suspect's last one."""
    if not world.faults.killer:
        return
    definitions = world.definitions.versions[-1]
    for record in world.dead_letters.records:
        if record is None or not record.committed or record.value == KILLER:
            continue
        why = dict(record.headers).get(REASON_HEADER) or b""
        limit = definitions.settings((record.key or b"").decode()).max_attempts
        if b"its lease ran out, as" in why and limit > 1:
            raise Violation("blamed", f"ends no process, but is dead: {record.key!r} {record.value!r} {why!r}")
    if world.stats["subscriptions"]:
        # It is a message of two queues, and one may end the process in which the other waits.
        return
    for record in chain.from_iterable(world.messages[source].records for source in world.shared_sources):
        limit = 0 if record is None else definitions.settings((record.key or b"").decode()).max_attempts
        if record is not None and record.value == KILLER and expired(record.headers) > limit:
            raise Violation("unblamed", f"has ended too many processes: {record.key!r} {record.headers!r}")


def check_end(world: World) -> None:
    """Check what only the simulation can see: changelogs hold the folds of their logs, and tables the changelogs."""
    for partition, changelog in enumerate(world.changelogs):
        owner = world.owners[partition]
        if owner.halted:
            continue
        table = LocalTable()
        table.replay(changelog, len(changelog.records), world.now_ms)
        if wrong := table_difference(world.plain_fold(partition, world.durable_applied[partition]), table.rows):
            raise Violation("table-differs", f"changelog of partition {partition}: {wrong}")
        gone = _gone(owner)
        left = [key for key in table.rows if key[:1] in b"rs" and parse_row_key(key) not in gone]
        if left:
            raise Violation("rows-left", f"changelog of partition {partition}: {left[:3]}")
        if table.rows != owner.table.rows:
            raise Violation("table-differs", f"local table of partition {partition} is not its changelog")


def read_logs(world: World) -> None:
    """Add to the history what the logs say, read to their ends."""
    events = world.history.events
    definitions = world.definitions.versions[-1]
    for source, log in world.messages.items():
        for record in log.records:
            if record is None:
                continue
            shared = source.topic == world.names.messages
            # A record of a topic that several queues name is a message of each of them.
            for queue in [(record.key or b"").decode()] if shared else definitions.queues_of_topic(source.topic):
                events.append(
                    history.record(
                        log.name, record.offset, record.timestamp, queue, record.key, record.value, record.headers,
                        committed=record.committed,
                    )
                )  # fmt: skip
    for record in world.dead_letters.records:
        if record is not None:
            queue = (record.key or b"").decode()
            log_name, committed = world.dead_letters.name, record.committed
            events.append(
                history.record(
                    log_name, record.offset, record.timestamp, queue, record.key, record.value, record.headers,
                    committed=committed, op="dead",
                )
            )  # fmt: skip
    for record in world.quarantine.records:
        if record is not None and record.committed:
            fields = {"origin": record.about, "content": history.digest(record.value)}
            world.history.add(world.quarantine.name, "ok", "quarantine", **fields)
    for partition, log in enumerate(world.markers):
        events.extend(world.marker_events(partition, len(log.records)))
