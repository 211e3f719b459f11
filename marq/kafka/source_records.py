"""Payloads that ACQUIREs left in their records, as a tracker copies them from there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from marq.core.storage.table_image import Place
from marq.kafka.records import Records
from marq.wire.markers import Payload, Source
from marq.wire.names import Names
from marq.wire.record_headers import origin


def payloads_in(
    names: Names, source: Source, read: Records, left: Mapping[Place, Payload]
) -> Iterable[tuple[Place, Payload]]:
    """Yield the messages in ``left`` whose records are among those in ``read``, with their payloads.

    All messages in ``left`` are from this source. A record with another key or timestamp belongs to another topic of
    this name, which was deleted.
    """
    own_topic = names.is_senders_topic(source.topic)
    offsets: dict[int, list[Place]] = {}
    for place in left:
        offsets.setdefault(place.offset, []).append(place)
    wanted = [index for index, offset in enumerate(read.offsets) if offset in offsets]
    read = read.at(wanted).without_copied_headers(own_topic=own_topic).with_fitting_headers()
    for record in read:
        for place in offsets[record.offset]:
            if record.timestamp == left[place].timestamp_ms and (own_topic or record.key == place.queue.encode()):
                attempt = origin(source, record.offset, record.timestamp, record.headers).attempt
                yield place, Payload(record.timestamp, attempt, record.key, record.headers, record.value)
