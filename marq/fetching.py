"""Takes what aiokafka's consumer has fetched, as columns.

``AIOKafkaConsumer.getmany`` makes an object of eleven fields for each record, in Python: a third of all that a consumer
of many small messages did (docs/decisions/0026). Record batches are what the broker sends and what an ACQUIRE is
made of, so they are unpacked by aiokafka's own parser and kept as :class:`marq.records.Records`. Fetching, positions,
assignment and errors stay aiokafka's; tests/client/test_fetching.py tells when what is relied on here changes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

from aiokafka.consumer.fetcher import READ_COMMITTED, FetchResult
from aiokafka.errors import CorruptRecordException

from marq.core.markers import Source
from marq.records import Records

#: Records that are objects at a time.
_AT_ONCE = 128


async def fetch_records(consumer: Any, wait_s: float, max_records: int) -> dict[Source, Records]:
    """Return the next records of each partition; nothing when none came in time.

    ``max_records`` may be passed by those of one record batch. The consumer's position is then after them.

    Raises:
        KafkaError: as ``getmany`` does.
    """
    fetcher, subscription = consumer._fetcher, consumer._subscription
    consumer._coordinator.check_errors()
    until_s = time.monotonic() + wait_s
    with subscription.fetch_context():
        while True:
            if subscription.reassignment_in_progress:
                # What is there may be somebody else's by now.
                await subscription.wait_for_assignment()
            taken = _take(fetcher, max_records)
            left_s = until_s - time.monotonic()
            if taken or left_s <= 0:
                return taken
            waiter = fetcher._create_fetch_waiter()
            done, _ = await asyncio.wait([waiter], timeout=left_s)
            if not done:
                waiter.cancel()
                return {}
            # An error: reading is not allowed, for one.
            waiter.result()
            if fetcher._closed:
                return {}


def _take(fetcher: Any, left: int) -> dict[Source, Records]:
    taken: dict[Source, Records] = {}
    for partition in list(fetcher._records):
        if left <= 0:
            break
        result = fetcher._records[partition]
        if not isinstance(result, FetchResult):
            if not taken:
                _forget(fetcher, partition)
                result.check_raise()
            # It is raised by the next call.
            break
        try:
            records = _unpack(result, left)
        except CorruptRecordException:
            _forget(fetcher, partition)
            raise
        if not result.has_more():
            _forget(fetcher, partition)
        if records is not None:
            taken[Source(*partition)] = records
            left -= len(records)
    return taken


def _forget(fetcher: Any, partition: Any) -> None:
    """Let the partition be fetched again."""
    del fetcher._records[partition]
    fetcher._notify(fetcher._wait_consume_future)


def _unpack(result: Any, left: int) -> Records | None:
    partition = result._topic_partition
    if not result.check_assignment(partition) or not result.has_more():
        return None
    unread = result._partition_records
    parts: list[Records] = []
    while left > 0 and unread._records.has_next():
        batch = unread._records.next_batch()
        if not batch.validate_crc():
            raise CorruptRecordException(f"a record batch of {partition.topic}/{partition.partition} has a wrong CRC")
        if not _is_skipped(unread, batch):
            for some in _pieces(batch):
                if some[0].offset < unread.next_fetch_offset:
                    some = [record for record in some if record.offset >= unread.next_fetch_offset]
                if some:
                    parts.append(_columns(some))
                    left -= len(some)
        # Also where nothing of a batch is left, or its last record was compacted away.
        unread.next_fetch_offset = batch.next_offset
    result._update_position()
    if not unread._records.has_next():
        result._partition_records = None
    return Records.joined(parts) if parts else None


def _pieces(batch: Any) -> Iterator[list[Any]]:
    """Return the records of a batch, a few at a time.

    Thousands of new objects at once are what the garbage collector looks through again and again.
    """
    # A batch must not be asked for an iterator twice, as islice does.
    records = chain(batch)
    while piece := list(islice(records, _AT_ONCE)):
        yield piece


def _is_skipped(unread: Any, batch: Any) -> bool:
    """Whether nobody is to see a batch: a control batch, or, where only what is committed is read, an aborted one."""
    if unread._isolation_level == READ_COMMITTED and batch.producer_id is not None:
        unread._consume_aborted_up_to(batch.base_offset)
        if batch.is_control_batch and unread._contains_abort_marker(batch):
            unread._aborted_producers.discard(batch.producer_id)
        if batch.is_transactional and batch.producer_id in unread._aborted_producers:
            return True
    return bool(batch.is_control_batch)


def _columns(records: list[Any]) -> Records:
    first, last = records[0].offset, records[-1].offset
    headers = [record.headers for record in records]
    return Records(
        range(first, last + 1) if last - first == len(records) - 1 else [record.offset for record in records],
        [record.timestamp for record in records],
        [record.key for record in records],
        [record.value for record in records],
        headers if any(headers) else None,
    )
