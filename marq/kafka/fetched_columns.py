"""Takes the records that aiokafka's consumer has fetched, as columns.

``AIOKafkaConsumer.getmany`` creates a Python object with eleven fields for each record, which is a third of the work of
a consumer of many small messages (docs/decisions/0026). Here aiokafka's parser unpacks record batches, and their fields
are kept as :class:`marq.kafka.records.Records`. Fetching, positions, assignment and errors stay aiokafka's.
tests/client/test_fetched_columns.py fails if aiokafka's private parts change.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

from aiokafka.consumer.fetcher import READ_COMMITTED, FetchResult
from aiokafka.errors import CorruptRecordException, KafkaError

from marq.kafka.records import Records
from marq.wire.markers import Source

#: Maximum number of records that exist as objects at a time.
_AT_ONCE = 128


async def fetch_records(
    consumer: Any, wait_s: float, max_records: int, woken: asyncio.Future[None] | None = None
) -> dict[Source, Records]:
    """Return the next records of each partition, or nothing if none came in time; raises KafkaError like ``getmany``.

    The last record batch may exceed ``max_records``. The consumer's position is then after the returned records.
    ``woken`` ends the wait early. Raises KafkaError also if the fetch task has ended, which aiokafka only logs.
    """
    fetcher, subscription = consumer._fetcher, consumer._subscription
    consumer._coordinator.check_errors()
    until_s = time.monotonic() + wait_s
    with subscription.fetch_context():
        while True:
            _check_fetching(fetcher)
            if subscription.reassignment_in_progress:
                # Another member may own the fetched partitions by now.
                await subscription.wait_for_assignment()
            taken = _take(fetcher, max_records)
            left_s = until_s - time.monotonic()
            if taken or left_s <= 0:
                return taken
            waiter = fetcher._create_fetch_waiter()
            waiters = [waiter, fetcher._fetch_task] if woken is None else [waiter, fetcher._fetch_task, woken]
            done, _ = await asyncio.wait(waiters, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            if waiter not in done:
                waiter.cancel()
                _check_fetching(fetcher)
                return {}
            # Raises an error of the fetch, such as a missing permission.
            waiter.result()
            if fetcher._closed:
                return {}


def _check_fetching(fetcher: Any) -> None:
    task = fetcher._fetch_task
    if task.done() and not fetcher._closed:
        error = None if task.cancelled() else task.exception()
        raise KafkaError(f"fetching ended unexpectedly: {getattr(error, '__cause__', None)!r}") from error


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
            # The next call raises it.
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
    """Allow aiokafka to fetch the partition again."""
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
            for records in _pieces(unread._records, batch):
                if records[0].offset < unread.next_fetch_offset:
                    records = [record for record in records if record.offset >= unread.next_fetch_offset]
                if records:
                    parts.append(Records.of(records))
                    left -= len(records)
        # Even if no record of the batch is left, or compaction removed its last one.
        unread.next_fetch_offset = batch.next_offset
    result._update_position()
    if not unread._records.has_next():
        result._partition_records = None
    return Records.joined(parts) if parts else None


def _pieces(fetched: Any, batch: Any) -> Iterator[list[Any]]:
    """Return the records of a batch, a few at a time: thousands of new objects would burden the garbage collector."""
    # chain() calls iter() on the batch only once; islice would do so for each piece.
    records, left = chain(batch), batch.base_offset
    try:
        while piece := list(islice(records, _AT_ONCE)):
            left = piece[-1].offset + 1
            yield piece
    except UnicodeDecodeError:
        yield [record for record in fetched.batch_again() if record.offset >= left]


def _is_skipped(unread: Any, batch: Any) -> bool:
    """Return whether to hide a batch: a control batch, or an aborted one if only committed records are read."""
    if unread._isolation_level == READ_COMMITTED and batch.producer_id is not None:
        unread._consume_aborted_up_to(batch.base_offset)
        if batch.is_control_batch and unread._contains_abort_marker(batch):
            unread._aborted_producers.discard(batch.producer_id)
        if batch.is_transactional and batch.producer_id in unread._aborted_producers:
            return True
    return bool(batch.is_control_batch)
