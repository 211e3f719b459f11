"""Faults of a world as a whole: rebalances, clocks, retention, lost topics, queues that move."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from marq.wire.marker_codec import MAGIC
from tests.simulation.table import DELETE_RETENTION_MS

if TYPE_CHECKING:
    from tests.simulation.world import World

#: A topic that queues may name.
OWN_TOPIC = "orders"


class Nemesis:
    """Injects faults at random moments while the world is faulty."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._rng = world.rng
        for name, happen in (
            ("rebalance", self._rebalance),
            ("tracker_rebalance", self._move_owner),
            ("clock_step", self._step_clock),
            ("wall_step", self._step_wall_clock),
            ("clock_jump", self._jump_clock),
            ("garbage", self._write_garbage),
            ("unread_gone", self._remove_unread),
            ("markers_gone", self._remove_markers),
            ("changelog_lost", self._lose_changelog),
            ("changelog_compacted", self._compact_changelog),
            ("offsets_lost", self._lose_offsets),
            ("settings", self._change_settings),
            ("move", self._move_queue),
        ):
            mean_ms = getattr(world.faults, f"{name}_every_ms")
            if mean_ms:
                self._repeat(name, mean_ms, happen)

    def _repeat(self, name: str, mean_ms: float, happen: Callable[[], None]) -> None:
        self._world.schedule(int(self._rng.expovariate(1 / mean_ms)) + 1, self._happen, name, mean_ms, happen)

    def _happen(self, name: str, mean_ms: float, happen: Callable[[], None]) -> None:
        if self._world.faulty:
            self._world.fault_count += 1
            self._world.stats[name] += 1
            happen()
            self._repeat(name, mean_ms, happen)

    def _say(self, op: str, target: str) -> None:
        self._world.history.add("nemesis", "info", op, target=target)

    # --- ownership ----------------------------------------------------------------------------------------------------

    def _rebalance(self) -> None:
        self._rng.choice(self._world.groups).rebalance()

    def _move_owner(self) -> None:
        """Give a markers partition another owner; the former one hears of it late."""
        world = self._world
        partition = self._rng.randrange(len(world.markers))
        former = world.owners[partition]
        world.hosts[partition] = (world.hosts[partition] + 1) % len(world.disks)
        world.former_owners.append(former)
        if self._rng.random() < 0.5:
            former.pause(self._rng.randint(10, 1_000))
        world.schedule(self._rng.randint(0, 1_500), self._stop_owner, former)
        world.start_owner(partition)

    def _stop_owner(self, owner: Any) -> None:
        owner.alive = False

    # --- clocks -------------------------------------------------------------------------------------------------------

    def _step_clock(self) -> None:
        """Set a leader's wall clock a little forward or back."""
        log = self._rng.choice(self._world.markers)
        log.skew_ms = self._rng.randint(-60, 60)
        self._say("step", log.name)

    def _step_wall_clock(self) -> None:
        self._rng.choice(self._world.living()).step_wall_clock()

    def _jump_clock(self) -> None:
        """Set a leader's clock forward or back by more than the log clock tolerates."""
        log = self._rng.choice(self._world.markers)
        log.skew_ms += self._rng.choice([-1, 1]) * self._rng.randint(5_500, 15_000)
        self._say("clock", log.name)

    # --- contents of the logs -----------------------------------------------------------------------------------------

    def _write_garbage(self) -> None:
        value = self._rng.choice([None, b"", b"\x01" + MAGIC, b"???" + self._rng.randbytes(30)])
        self._rng.choice(self._world.markers).append(value)

    def _remove_unread(self) -> None:
        """Apply the retention of a messages topic, also to messages that no consumer has received."""
        log = self._rng.choice([log for log in self._world.messages.values() if log.records] or [None])
        if log is not None:
            log.truncate(self._rng.randint(log.start, len(log.records)))
            self._truncated(log)

    def _remove_markers(self) -> None:
        """Apply the retention of the markers topic; sometimes to markers that a tracker still needs."""
        world = self._world
        partition = self._rng.randrange(len(world.markers))
        log = world.markers[partition]
        needed = world.durable_applied[partition] + 1
        end = len(log.records) if world.hit(world.faults.markers_needed) else needed
        if end > log.start:
            log.truncate(self._rng.randint(log.start, end))
            self._truncated(log)

    def _truncated(self, log: Any) -> None:
        self._world.history.add(log.name, "ok", "truncate", offset=log.start)

    def _lose_changelog(self) -> None:
        """Delete and recreate a changelog; its owner ends, and the next owner finds it empty."""
        world = self._world
        partition = self._rng.randrange(len(world.markers))
        world.owners[partition].alive = False
        for former in world.former_owners:
            if former.partition == partition:
                former.alive = False
        world.transactional_ids[partition].fence()
        world.changelogs[partition] = world.new_changelog(partition)
        world.durable_applied[partition] = -1
        world.schedule(self._rng.randint(0, 200), world.start_owner, partition)

    def _compact_changelog(self) -> None:
        world = self._world
        world.stats["compacted"] += self._rng.choice(world.changelogs).compact(world.now_ms, DELETE_RETENTION_MS)

    def _lose_offsets(self) -> None:
        group = self._rng.choice(self._world.groups)
        for queue in self._world.queues:
            self._say("offsets", f"queue {queue}")
        group.lose_offsets()

    # --- definitions --------------------------------------------------------------------------------------------------

    def _change_settings(self) -> None:
        """Change a queue's settings, except its group, topic, delivery and ordering; limits stay, with other values."""
        world = self._world
        queue = self._rng.choice(world.queues)
        former = world.definitions.versions[-1].layer("file", queue) or {}
        kept = {key: value for key, value in former.items() if key in ("group", "topic", "delivery", "ordering")}
        if "limits" in former:
            kept |= world.ordering.limited(ordered="ordering" in former)
        lease_ms = self._rng.choice([world.lease_ms, world.lease_ms * 2])
        document = {**world.document(), "lease": lease_ms / 1000, **kept}
        world.definitions.change((queue, {**document, **world.expiring.document(document)}))

    def _move_queue(self) -> None:
        """Move a queue to another group or to a topic; one that has a topic keeps it, or its records would be lost.

        A queue with ordering stays: two groups would read it for a while, and its order would be lost. Queues of one
        topic are in different groups.
        """
        world = self._world
        queue = self._rng.choice(world.queues)
        if queue in world.ordering.queues:
            return
        definitions = world.definitions.versions[-1]
        document = dict(definitions.layer("file", queue) or {})
        document["group"] = self._rng.choice(["g", "h", None])
        if document["group"] is None:
            del document["group"]
        others = [each for each in definitions.queues_of_topic(OWN_TOPIC) if each != queue]
        # Records that are removed before a queue names the topic are not its messages.
        if self._rng.random() < 0.3 and (not others or (world.shares_topic and not world.faults.unread_gone_every_ms)):
            document["topic"] = OWN_TOPIC
        group = document.get("group")
        if "topic" in document and group is not None and group in [definitions.group(each) for each in others]:
            # Two queues of one group can't share a topic, because a group reads each record once.
            return
        world.definitions.change((queue, document))
