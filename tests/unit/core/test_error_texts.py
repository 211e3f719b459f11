"""The text of a RELEASE or REJECT: an error, and perhaps a traceback after it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from marq.kafka.marker_writer import marker_records
from marq.wire.error_texts import (
    MAX_TEXT_BYTES,
    MAX_TRACEBACK_BYTES,
    cut_text,
    error_of,
    most_bytes,
    traceback_of,
    with_traceback,
)
from marq.wire.marker_codec import decode
from marq.wire.markers import Reject, Release, Source
from marq.wire.names import FRAME_BYTES

SOURCE = Source("marq.messages", 0)
LONG = "".join(f'  File "app.py", line {number}, in bill\n' for number in range(2_000)) + "ValueError: boom"


@given(st.text(), st.text(min_size=1))
def test_an_error_and_its_traceback_are_found_again(error: str, traceback: str) -> None:
    text = cut_text(with_traceback(error, traceback)).decode()

    assert error_of(text) == error.replace("\x1e", " ").encode("utf-8", "replace")[:MAX_TEXT_BYTES].decode(
        "utf-8", "ignore"
    )
    assert traceback_of(text) == traceback.encode("utf-8", "replace").decode()


def test_a_separator_in_an_error_does_not_begin_a_traceback() -> None:
    assert traceback_of(with_traceback("no\x1esuch customer", "")) == ""
    assert error_of(with_traceback("no\x1esuch customer", "File 1")) == "no such customer"


def test_a_text_without_a_traceback_is_the_error() -> None:
    assert with_traceback("boom", "") == "boom"
    assert (error_of("boom"), traceback_of("boom")) == ("boom", "")


def test_a_long_traceback_keeps_its_last_lines() -> None:
    text = cut_text(with_traceback("ValueError: boom", LONG)).decode()

    kept = traceback_of(text)
    assert len(kept.encode()) <= MAX_TRACEBACK_BYTES
    assert kept.startswith('…\n  File "app.py"')
    assert kept.endswith("line 1999, in bill\nValueError: boom")


@given(st.text(st.characters(codec="utf-8"), max_size=3_000), st.text(st.characters(codec="utf-8"), max_size=9_000))
def test_the_size_of_a_text_is_known_without_encoding_it(error: str, traceback: str) -> None:
    text = with_traceback(error, traceback)

    assert len(cut_text(text)) <= most_bytes(text)


def test_a_traceback_that_does_not_fit_into_a_marker_is_left_out_and_the_error_stays() -> None:
    text = with_traceback("ValueError: boom", LONG)
    release = Release("q", 1, SOURCE, [0], [0], True, [text])
    reject = Reject("q", 1, SOURCE, [0], [text])

    for limit_bytes, kept in ((FRAME_BYTES + 2_000, False), (1_000_000, True)):
        [released], [rejected] = (list(marker_records(batch, 1, limit_bytes)) for batch in (release, reject))

        assert len(released.value) <= limit_bytes
        assert error_of(decode(released.value).errors[0]) == "ValueError: boom"
        assert bool(traceback_of(decode(released.value).errors[0])) is kept
        assert bool(traceback_of(decode(rejected.value).reasons[0])) is kept


def test_many_tracebacks_are_spread_over_several_markers() -> None:
    text, count = with_traceback("ValueError: boom", LONG), 600
    release = Release("q", 1, SOURCE, range(count), [0] * count, True, [text] * count)

    records = list(marker_records(release, 1, 1_000_000))

    assert all(len(record.value) <= 1_000_000 for record in records)
    assert [offset for record in records for offset in decode(record.value).offsets] == list(range(count))
