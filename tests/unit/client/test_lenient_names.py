"""A header's name that is not UTF-8: its record and the records around it are read."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from aiokafka import TopicPartition
from aiokafka.consumer.fetcher import READ_UNCOMMITTED
from aiokafka.record.default_records import _DefaultRecordBatchBuilderPy

from marq.kafka import fetched_columns
from marq.kafka.lenient_names import _PartitionRecords, _Records

NONE, GZIP = 0, 1
COUNT = 300
BAD = 150


class Raw(str):
    """A name that is written as other bytes."""

    __slots__ = ()

    def encode(self, *_: object) -> bytes:
        return b"\xff caf\xe9"


def batch(compression: int, *, base: int = 0) -> bytes:
    """Return a batch of records, one of which has such a header."""
    builder = _DefaultRecordBatchBuilderPy(2, compression, 0, -1, -1, -1, 1 << 20)
    for number in range(COUNT):
        headers = [("good", b"1"), (Raw("bad"), b"2")] if number == BAD else []
        assert builder.append(number, 1_000, None, b"%d" % (base + number), headers) is not None
    built = builder.build()
    return base.to_bytes(8) + bytes(built[8:])


@pytest.fixture(params=[NONE, GZIP])
def fetched(request: pytest.FixtureRequest) -> _PartitionRecords:
    """Two batches in the answer to a fetch that began within the first one."""
    data = batch(request.param) + batch(request.param, base=COUNT)
    return _PartitionRecords(
        TopicPartition("t", 0), _Records(data), None, 10, None, None, check_crcs=False,
        isolation_level=READ_UNCOMMITTED,
    )  # fmt: skip


def test_aiokafkas_records_have_them_once_and_in_order(fetched: _PartitionRecords) -> None:
    records = list(fetched)

    assert [(record.offset, record.value) for record in records] == [(n, b"%d" % n) for n in range(10, 2 * COUNT)]
    assert [record.offset for record in records if record.headers] == [BAD, COUNT + BAD]
    assert records[BAD - 10].headers == (("good", b"1"), ("\ufffd caf\ufffd", b"2"))
    assert fetched.next_fetch_offset == 2 * COUNT


def test_our_columns_have_them_once_and_in_order(fetched: _PartitionRecords) -> None:
    result = SimpleNamespace(
        _topic_partition=TopicPartition("t", 0),
        _partition_records=fetched,
        check_assignment=lambda _: True,
        has_more=lambda: True,
        _update_position=lambda: None,
    )

    records = fetched_columns._unpack(result, 10_000)

    assert records is not None
    assert list(records.offsets) == list(range(10, 2 * COUNT))
    assert list(records.values) == [b"%d" % n for n in range(10, 2 * COUNT)]
    assert records[BAD - 10].headers == (("good", b"1"), ("\ufffd caf\ufffd", b"2"))
