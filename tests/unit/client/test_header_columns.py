"""Records with their headers as columns: the same headers as those of each record."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from marq.consumer.ordering import ordering_keys
from marq.kafka.records import Records
from marq.wire.marker_codec import encode_headers
from marq.wire.names import MAX_HEADERS
from marq.wire.record_headers import ordering_key
from tests.unit.client.fakes import FakeRecord

KEY = "marq-ordering-key"
Headers = list[tuple[str, bytes | None]]

one_header = st.tuples(st.just(KEY), st.binary(max_size=3)).map(lambda header: [header])
any_headers = st.lists(st.tuples(st.sampled_from([KEY, "tenant"]), st.none() | st.binary(max_size=3)), max_size=2)
columns = st.lists(one_header, max_size=6) | st.lists(one_header | any_headers, max_size=6)


@given(columns, columns, st.data())
def test_columns_have_the_headers_of_each_record(
    first: list[Headers], second: list[Headers], data: st.DataObject
) -> None:
    rows = first + second
    parts = [
        Records.of([FakeRecord(offset, headers=rows[offset]) for offset in offsets])
        for offsets in (range(len(first)), range(len(first), len(rows)))
        if offsets
    ]
    if not parts:
        return
    records = Records.joined(parts)
    indexes = data.draw(st.lists(st.integers(0, len(rows) - 1), unique=True).map(sorted))
    start = data.draw(st.integers(0, len(rows)))

    for some, expected in (
        (records, rows),
        (records.at(indexes), [rows[index] for index in indexes]),
        (records[start:], rows[start:]),
    ):
        assert [list(row.headers) for row in some] == expected
        assert [list(some[index].headers) for index in range(len(some))] == expected
        assert (some.headers is None) == (not any(expected))
        if some.headers is not None:
            assert some.encoded_headers == [encode_headers(headers) for headers in expected]
        for name in (KEY, "tenant"):
            assert some.has_header(name) == any(name == each for headers in expected for each, _ in headers)


def test_headers_that_do_not_fit_into_markers_are_dropped_but_not_those_that_redelivery_added() -> None:
    rows: list[Headers] = [
        [("a", b"1"), ("é" * 32_768, b""), ("b", None)],
        [(f"h{number}", b"") for number in range(MAX_HEADERS)] + [("marq-attempt", b"2"), (KEY, b"k")],
        [("n" * 65_535, b"1")],
    ]
    fitting = Records.of([FakeRecord(offset, headers=headers) for offset, headers in enumerate(rows)])

    fitting = fitting.with_fitting_headers()

    assert [list(each.headers) for each in fitting] == [
        [("a", b"1"), ("b", None)],
        rows[1][: MAX_HEADERS - 2] + rows[1][-2:],
        rows[2],
    ]
    assert fitting.encoded_headers is not None
    assert fitting.with_fitting_headers() is fitting


def test_a_name_that_is_too_long_is_dropped_even_if_all_records_have_only_this_header() -> None:
    records = Records.of([FakeRecord(offset, headers=[("n" * 65_536, b"1")]) for offset in range(2)])

    assert records.with_fitting_headers().headers is None


two_keys = st.just([(KEY, b"a"), (KEY, b"b")])


@given(st.lists(one_header | st.just([("tenant", b"a"), (KEY, b"k")]) | two_keys, max_size=6))
def test_the_keys_of_lines(rows: list[Headers]) -> None:
    records = Records.of([FakeRecord(offset, headers=headers) for offset, headers in enumerate(rows)])

    assert ordering_keys(records, own_topic=False) == [ordering_key(headers) for headers in rows]


def test_in_its_own_topic_the_record_key_is_the_ordering_key_and_an_empty_one_is_none() -> None:
    records = Records.of([FakeRecord(offset, key=key) for offset, key in enumerate([b"a", b"", None, b"a"])])

    assert ordering_keys(records, own_topic=True) == [b"a", None, None, b"a"]
