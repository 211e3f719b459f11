"""Blocked keys of queues with ordering, for pages, commands and programs.

A key is blocked while its first message waits for its next attempt, because later messages with the key wait for it.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Iterable, Mapping
from typing import Any

from marq.core.storage.gauges import is_blocked
from marq.core.storage.rows import LeaseRow
from marq.settings.queue import QueueSettings
from marq.wire.markers import Source
from marq.wire.record_headers import ordering_key
from marq_worker.owner.ownership import Ownership
from marq_worker.owner.tracker_owners import TrackerOwners
from marq_worker.redaction import Redaction
from marq_worker.web.message_listing import BLOCKED_S, described, in_pieces

#: Keys of one queue to list.
MAX_KEYS = 100

_Message = tuple[int, int, Source, int, LeaseRow, Ownership]


async def blocked_keys(
    owners: TrackerOwners, queue: str, settings: QueueSettings, redaction: Redaction
) -> list[dict[str, Any]]:
    """Return the first messages of blocked keys in this worker's partitions, those with the most attempts first.

    Each is described as in :func:`marq_worker.web.message_listing.described`. It has its ``key``, None for a message
    without one, and ``waits_for_operator``: whether it would have become a dead letter, but blocks its key instead.
    """
    if not settings.ordered:
        return []
    first: list[_Message] = []
    for owner in list(owners.owned.values()):
        for source, some in in_pieces(owner):
            blocked = [
                (-lease.attempt, lease.since_ms, source, number, lease, owner)
                for number, lease in some
                if lease.queue == queue and is_blocked(lease)
            ]
            first = heapq.nsmallest(MAX_KEYS, [*first, *blocked], key=lambda message: message[:4])
            await asyncio.sleep(0)
    return [_described(message, settings, redaction) for message in first]


def merged_keys(answers: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Merge the blocked keys of several workers."""
    # A worker of an older version has none.
    keys = [key for answer in answers for key in answer.get("blocked_keys", ())]
    keys.sort(key=lambda key: (-key["attempt"], key["since"], key["place"]))
    return keys[:MAX_KEYS]


def _described(message: _Message, settings: QueueSettings, redaction: Redaction) -> dict[str, Any]:
    _, _, source, number, lease, owner = message
    payload = owner.engine.payload(lease.queue, source, number)
    key = None
    if payload is not None:
        key = payload.key if source.log.topic == settings.topic else ordering_key(payload.headers)
    shown = described(lease.due_ms, source, number, lease, owner, redaction)
    waits = shown["due_in_seconds"] > BLOCKED_S
    return {**shown, "key": redaction.ordering_key(key), "waits_for_operator": waits}
