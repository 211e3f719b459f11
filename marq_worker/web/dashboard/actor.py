"""Executes the actions of pages on the cluster."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from marq.admin import purge as purging
from marq.admin.purge import Extent, extent_now
from marq.backend.cluster import cluster_of, marker_writer
from marq.client.receipt import Receipt
from marq.dead_letters.dead_letters import DeadLetters, Deleted
from marq.dead_letters.filters import Filters
from marq.dead_letters.snapshots import Snapshot
from marq.kafka.marker_writer import MarkerRecord
from marq.producer.producer import Producer
from marq.queues.queues import Queues
from marq.queues.schedules import Schedules
from marq.settings.client import ClientSettings
from marq.settings.queue import AT_MOST_ONCE, CHECKS, check_document, settings_document
from marq.settings.schedule_definitions import LAYERS as SCHEDULE_LAYERS
from marq.wire.errors import ConfigError, MarqError
from marq.wire.markers import ANY_QUEUE, Release, Source
from marq.wire.names import log_name
from marq_worker.setting_values import NAMED, read_value, write_value
from marq_worker.web.dashboard.sending import OperatorSender
from marq_worker.web.dashboard.tasks import Reached
from marq_worker.web.dashboard.worker_commands import WorkerCommands
from marq_worker.web.message_listing import can_be_released

#: The error that the next consumer of a released message sees.
RELEASED_BY_OPERATOR = "released by an operator"


@dataclass(frozen=True, slots=True)
class DeadLetterSelection:
    """The dead letters of an action: of a queue (None: of all), filtered."""

    queue: str | None
    filters: Filters
    to: str | None = None
    limit: int | None = None
    rate: float | None = None
    #: The operator confirmed that ``to`` may be an unknown queue.
    allow_unknown: bool = False

    def __str__(self) -> str:
        filters = self.filters
        parts = [f"of queue {self.queue}" if self.queue else "of all queues"]
        if "kind" in filters:
            parts.append(f"with reason: {filters['kind'] or '(none given)'}")
        if "older_than" in filters:
            parts.append(f"at least {filters['older_than']} s old")
        parts += [f"with {name} containing: {filters[name]}" for name in ("reason", "error") if filters.get(name)]
        if "id" in filters:
            parts.append("that were selected")
        if self.to:
            parts.append(f"to queue {self.to}")
        return "dead letters " + ", ".join(parts)


class Actor:
    """Executes actions, each with clients of its own, because they are rare.

    All methods raise ConfigError for a wrong argument, and another MarqError if the outcome is not known. ``look``
    returns an open message by its queue and place, with its ``holder``; it raises MarqError if that is not known.

    Actions on messages concern those of a queue, or with ANY_QUEUE those of all queues that have one with such an id.
    """

    def __init__(
        self,
        client: ClientSettings,
        dead_letters: DeadLetters,
        queues: Queues,
        look: Callable[[str, str], Coroutine[Any, Any, Mapping[str, Any] | None]],
        workers: WorkerCommands,
        sender: OperatorSender,
    ) -> None:
        self._client = client
        self._dead_letters = dead_letters
        self._queues = queues
        self._look = look
        self._workers = workers
        self.sender = sender

    async def command(self, worker: str, command: str, details: Mapping[str, str], who: str) -> None:
        """Let a worker carry out a command in the name of an operator."""
        await self._workers.send(worker, command, details, who)

    async def carry_out(self, command: str, query: Mapping[str, str]) -> Mapping[str, Any]:
        """Carry out a command that another worker passes on."""
        return await self._workers.receive(command, query)

    async def cancel(self, queue: str, ids: Sequence[str]) -> Sequence[bool]:
        async with Producer.of(self._client) as producer:
            return await producer.cancel([Receipt.of(message_id, queue) for message_id in ids])

    async def deliver_now(self, queue: str, ids: Sequence[str]) -> Sequence[bool]:
        async with Producer.of(self._client) as producer:
            return await producer.reschedule([Receipt.of(message_id, queue) for message_id in ids], delay=0)

    async def release(self, queue: str, ids: Sequence[str]) -> Sequence[bool]:
        """Take messages from their holders; return for each whether that was possible.

        The RELEASEs are in the holders' names, so only those of messages that are still held count. The consumer of a
        message does not learn of the release, so some messages can't be released: see
        :func:`marq_worker.web.message_listing.can_be_released`.
        """
        await self._queues.start()
        groups: dict[tuple[str, int, Source], list[int]] = {}
        held = []
        for message_id in ids:
            receipt = Receipt.of(message_id)
            messages = [await self._look(name, receipt.id) for name in self._queues_at(queue, receipt)]
            releasable = [message for message in messages if message and self._is_releasable(message)]
            held.append(bool(releasable))
            for message in releasable:
                # It has the id of its topic's incarnation, which the id of a message has not.
                place = Receipt.of(message["place"])
                source = Source(place.topic, place.partition)
                groups.setdefault((message["queue"], message["holder"], source), []).append(place.offset)
        if groups:
            await self._write([_release(*group, sorted(set(offsets))) for group, offsets in groups.items()])
        return held

    def _is_releasable(self, message: Mapping[str, Any]) -> bool:
        at_most_once = self._queues.definitions(message["queue"]).delivery == AT_MOST_ONCE
        return bool(message["holder"]) and can_be_released(message["state"], at_most_once=at_most_once)

    def _queues_at(self, queue: str, receipt: Receipt) -> Sequence[str]:
        if queue != ANY_QUEUE:
            return [queue]
        return self._queues.definitions.queues_of_topic(log_name(receipt.topic)) or [ANY_QUEUE]

    async def pause(self, queue: str, duration_s: float | None) -> None:
        await self._queues.start()
        await self._queues.pause(queue, duration_s)

    async def resume(self, queue: str) -> None:
        await self._queues.start()
        await self._queues.resume(queue)

    async def setting(self, queue: str, key: str) -> str:
        """Return the current value of a setting as text; empty for none."""
        _check_changeable(queue, key)
        await self._queues.start()
        value = settings_document(self._queues.definitions.settings(queue)).get(key)
        return "" if value is None else write_value(value)

    async def change_setting(self, queue: str, key: str, text: str) -> None:
        """Change a setting as ``marq queue --set`` does, or for an empty text undo the change, as ``--unset``."""
        _check_changeable(queue, key)
        changes: dict[str, Any] = {key: None}
        if text:
            changes = {key: read_value(key, text, f"queue {queue!r}:")}
            check_document(changes, f"queue {queue!r}")
        await self._queues.start()
        await self._queues.change(queue, **changes)

    async def run_schedule(self, name: str) -> dict[str, Any]:
        """Send a schedule's message now, besides those at its times; return its id for the audit log."""
        schedule = (await self._schedules()).get(name)
        if schedule is None:
            raise ConfigError(f"schedule {name!r} does not exist any more, so nothing was sent")
        return await self.sender.send_value(
            schedule.queue,
            schedule.value.encode(),
            {"headers": dict(schedule.headers), "type": schedule.type or None},
        )

    async def switch_schedule(self, name: str, *, enabled: bool) -> None:
        """Enable or disable a schedule; if undoing an earlier change suffices, marq.toml applies again."""
        schedules = await self._schedules()
        file = self._queues.definitions.schedules.layer(SCHEDULE_LAYERS[0], name) or {}
        await schedules.change(name, enabled=None if file.get("enabled", True) is enabled else enabled)

    async def _schedules(self) -> Schedules:
        await self._queues.start()
        return Schedules.of(self._queues)

    async def extent(self, queue: str, clocks: Mapping[int, int], before_ms: int | None = None) -> Extent:
        """Return what a purge of a queue would affect now, given the trackers' clocks by markers partition.

        With ``before_ms``, messages sent at this time or later stay.

        Raises MarqError if a clock is missing: the purge would leave the partition's delayed and redriven messages.
        """
        topics = await cluster_of(self._client).topics()
        if missing := sorted(set(range(topics.markers_partitions)) - set(clocks)):
            raise MarqError(
                f"queue {queue!r}: nothing was purged, because no worker reported on markers partition"
                f" {', '.join(map(str, missing))}. Try again in a moment; if the error persists, run marq check"
            )
        await self._queues.start()
        return await extent_now(self._client, self._queues.definitions, queue, clocks, before_ms)

    async def purge(self, queue: str, *, delayed: bool, extent: Extent | None) -> Reached:
        """Purge a queue, with its delayed messages if ``delayed``; messages outside the extent stay."""
        purged = await purging.purge(self._client, queue, delayed=delayed, extent=extent)
        return Deleted(purged.total, purged.total, purged.total)

    async def _write(self, batches: Sequence[Release]) -> None:
        topics = await cluster_of(self._client).topics()
        async with marker_writer(cluster_of(self._client), topics) as writer:
            records = [MarkerRecord.of(batch, topics.markers_partitions) for batch in batches]
            await writer.write(records, self._client.request_timeout_ms / 1000)

    async def snapshot(self) -> Snapshot:
        """Return which dead letters exist now."""
        await self._dead_letters.start()
        return await self._dead_letters.snapshot()

    async def count(self, action: str, selection: DeadLetterSelection) -> int:
        """Return how many dead letters an action would affect; an invalid rate is refused here, too."""
        return (await self._settle(action, selection, dry_run=True)).chosen

    async def settle(self, action: str, selection: DeadLetterSelection, progress: Callable[[Reached], None]) -> Reached:
        return await self._settle(action, selection, progress=progress)

    async def _settle(self, action: str, selection: DeadLetterSelection, **options: Any) -> Reached:
        await self._dead_letters.start()
        options |= {"limit": selection.limit, **selection.filters}
        if action == "delete":
            return await self._dead_letters.delete(selection.queue, **options)
        # The page has asked about an unknown queue (Buttons._unknown_target).
        options |= {"to": selection.to, "allow_unknown": True, "rate": selection.rate}
        return await self._dead_letters.redrive(selection.queue, **options)


def _release(queue: str, holder: int, source: Source, offsets: Sequence[int]) -> Release:
    count = len(offsets)
    return Release(queue, holder, source, offsets, [0] * count, counted=False, errors=[RELEASED_BY_OPERATOR] * count)


def _check_changeable(queue: str, key: str) -> None:
    """Raise ConfigError unless operators may change a setting on a page."""
    if key not in CHECKS:
        raise ConfigError(f"unknown setting {key!r}; expected one of {', '.join(CHECKS)}")
    if key in NAMED:
        # A login for pages must not decide which code runs, or who receives which messages.
        raise ConfigError(
            f"queue {queue!r}: {key} can't be changed on a page; use marq queue {queue} --set {key}=VALUE"
        )
