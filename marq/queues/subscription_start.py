"""Where a queue starts to read its topic: at the first record, or after the last one when the queue is defined.

The offsets of a queue with ``start = "latest"`` are written to the queues topic before its definition, so they do not
depend on when its first consumer starts. If several clients write them, the first one counts. They are written once
for each queue and topic, so a queue whose handler is removed and added again continues where it was.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from marq.settings.definitions import Definitions, start_key
from marq.settings.queue import LATEST
from marq.settings.skipped_records import SkippedRecords
from marq.wire.markers import Source

#: How far the clocks of senders may be ahead of this machine's.
SKEW_MS = 600_000


def starting(before: Definitions, after: Definitions) -> Iterator[tuple[str, str]]:
    """Yield the queues that are about to start after the last record of a topic, with the topic."""
    for queue in after.names():
        settings, begin = after.settings(queue), after.begin(queue)
        topic = settings.topic
        if topic is None or settings.start != LATEST or before.settings(queue).topic == topic:
            continue
        if begin is None or topic not in begin.topics:
            yield queue, topic


def start_document(
    topic: str, ends: Mapping[Source, int], now_s: float, former: SkippedRecords | None = None
) -> dict[str, Any]:
    """Return the record of a queue that starts at these offsets of a topic; ``now_s``: seconds since 1970.

    It also has the starts in the ``former`` topics of the queue, to which it may return.
    """
    # A topic that does not exist yet has no earlier records, even if the queue leaves it and returns.
    start = SkippedRecords(round(now_s * 1000) + SKEW_MS, ends or {Source(topic, 0): 0})
    return (start if former is None else start.along_with(former)).document()


def overruled(definitions: Definitions, documents: Mapping[bytes, Mapping[str, Any]]) -> dict[bytes, Mapping[str, Any]]:
    """Return the records that count instead of these, because other writers were first."""
    begins = {key: definitions.begin(key.removeprefix(start_key("")).decode()) for key in documents}
    deciding = {key: begin.document() for key, begin in begins.items() if begin is not None}
    return {key: document for key, document in deciding.items() if document != documents[key]}
