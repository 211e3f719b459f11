"""Rows of the lease table: what is written is read."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marq.core.storage import rows
from marq.core.storage.log_clock import LogClock
from marq.core.storage.rows import EventCounts, LeaseRow, State
from marq.wire.error_texts import MAX_TEXT_BYTES
from marq.wire.markers import Payload, Source
from tests.unit.core.batches import I64, U32, U64, any_payloads, any_sources

_U63 = st.integers(0, 2**63 - 1)
_queues = st.text(min_size=1, max_size=50)
_leases = st.builds(LeaseRow, _queues, U64, U32, I64, I64, st.sampled_from(State), st.booleans(), st.text(max_size=100))


def values(lease: LeaseRow) -> tuple[object, ...]:
    return dataclasses.astuple(lease)


@given(_leases)
def test_a_lease_is_read_as_it_was_written(lease: LeaseRow) -> None:
    row = rows.encode_lease(lease)

    found, end = rows.decode_lease(row)

    assert values(found) == values(lease)
    assert end == len(row)


@given(_leases, any_payloads)
def test_a_row_holds_its_lease_and_its_payload(lease: LeaseRow, payload: Payload) -> None:
    row = rows.encode_row(rows.encode_lease(lease), payload)

    assert values(rows.decode_lease(row)[0]) == values(lease)
    assert rows.decode_payload(row) == payload._replace(attempt=lease.attempt)


@given(_queues, any_sources, _U63)
def test_a_row_key_names_its_message(queue: str, source: Source, offset: int) -> None:
    key = rows.row_key(queue, source, offset)

    assert rows.parse_row_key(key) == (queue, source, offset)
    assert rows.row_keys(queue, source, [offset], b"r") == [key]
    assert rows.row_keys(queue, source, [offset], b"s") == [b"s" + key[1:]]


@given(_queues, any_sources, _U63, _U63)
def test_row_keys_of_one_source_sort_by_offset(queue: str, source: Source, first: int, second: int) -> None:
    assert (rows.row_key(queue, source, first) < rows.row_key(queue, source, second)) == (first < second)


@given(_queues, any_sources)
def test_a_mark_key_names_its_queue_and_source(queue: str, source: Source) -> None:
    assert rows.parse_mark_key(rows.mark_key(queue, source)) == (queue, source)


@given(st.tuples(any_sources, _U63, _queues), st.tuples(any_sources, _U63, _queues))
def test_different_things_have_different_keys(one: tuple[Source, int, str], other: tuple[Source, int, str]) -> None:
    def keys(source: Source, offset: int, queue: str) -> list[bytes]:
        row = rows.row_key(queue, source, offset)
        return [rows.APPLIED_KEY, rows.mark_key(queue, source), rows.counts_key(queue), row, b"s" + row[1:]]

    assert len(set(keys(*one))) == 5
    assert (keys(*one)[3] == keys(*other)[3]) == (one == other)
    same_mark = rows.mark_key(one[2], one[0]) == rows.mark_key(other[2], other[0])
    assert same_mark == ((one[2], one[0]) == (other[2], other[0]))


@given(I64, st.builds(LogClock, I64, I64, U64, I64, U64))
def test_the_applied_row_holds_the_offset_and_the_clock(offset: int, clock: LogClock) -> None:
    assert rows.decode_applied(rows.encode_applied(offset, clock)) == (offset, clock)


@given(st.lists(st.tuples(_U63, _U63), max_size=64))
def test_marks_are_read_as_they_were_written(intervals: list[tuple[int, int]]) -> None:
    assert rows.decode_marks(rows.encode_marks(intervals)) == intervals


@given(st.builds(EventCounts, *[_U63] * len(dataclasses.fields(EventCounts))))
def test_counts_are_read_as_they_were_written(counts: EventCounts) -> None:
    assert rows.decode_counts(rows.encode_counts(counts)) == counts


def test_counts_of_an_older_writer_lack_fields_which_are_then_0() -> None:
    row = rows.encode_counts(EventCounts(acquired=3, acked=2, renewed=1))

    assert rows.decode_counts(row[:16]) == EventCounts(acquired=3, acked=2)


def test_counts_of_a_newer_writer_have_more_fields_which_are_passed_over() -> None:
    row = rows.encode_counts(EventCounts(acquired=3, reacquired=9)) + b"\0" * 16

    assert rows.decode_counts(row) == EventCounts(acquired=3, reacquired=9)


def test_a_row_of_a_newer_version_is_refused() -> None:
    lease = rows.encode_lease(LeaseRow("q", 1, 1, 1, 1))
    applied = rows.encode_applied(1, LogClock())

    with pytest.raises(ValueError, match="version 2"):
        rows.decode_lease(b"\x02" + lease[1:])
    with pytest.raises(ValueError, match="has version 1"):
        rows.decode_applied(b"\x01" + applied[1:])


def test_a_long_error_is_cut_in_its_row() -> None:
    row = rows.encode_lease(LeaseRow("q", 1, 1, 1, 1, text="ü" * 5_000))

    assert rows.decode_lease(row)[0].text == "ü" * (MAX_TEXT_BYTES // 2)
