"""What one fetch brought of one partition."""

from __future__ import annotations

from typing import NamedTuple

from aiokafka.structs import ConsumerRecord


class Fetched(NamedTuple):
    """Records of one partition; no record from ``start`` to before ``end`` is missing among them.

    The offsets between them belong to Kafka's control records, to aborted transactions or to records that retention or
    compaction removed.
    """

    start: int
    end: int
    records: list[ConsumerRecord[bytes, bytes]]
