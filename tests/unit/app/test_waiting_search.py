"""Filters and order of the page of waiting messages."""

from __future__ import annotations

import time

import pytest

from marq.kafka.inspector import Peeked
from marq.kafka.records import Row
from marq.wire.errors import ConfigError
from marq.wire.markers import Source
from marq_worker.redaction import Redaction
from marq_worker.web.dashboard.waiting_search import WaitingSearch

VALUE = '{"name": "Zoë", "card": "4111-1111"}'.encode()


def message(offset: int = 0, value: bytes | None = VALUE, sent_ms: int | None = None) -> Peeked:
    headers = [("Tenant", b"Acme"), ("card", b"4111-1111"), ("empty", None)]
    sent_ms = int(time.time() * 1000) if sent_ms is None else sent_ms
    return Peeked(Source("t", 0), Row(offset, sent_ms, b"emails", value, headers))


@pytest.mark.parametrize(
    ("query", "fits"),
    [
        ({}, True),
        ({"text": "zoë"}, True),
        ({"text": "4111"}, True),
        ({"text": "Bob"}, False),
        ({"header": "tenant"}, True),
        ({"header": "tenant = acm"}, True),
        ({"header": "tenant=other"}, False),
        ({"header": "card=4111"}, True),
        ({"header": "empty"}, True),
        ({"header": "ten"}, False),
        ({"attempts": "2"}, False),
        ({"minutes": "1"}, False),
        ({"text": "zoë", "header": "tenant=other"}, False),
    ],
)
def test_a_message_fits_all_that_is_asked_for(query: dict[str, str], fits: bool) -> None:
    assert WaitingSearch.read(query).fitting(Redaction())(message()) is fits


@pytest.mark.parametrize("query", [{"text": "4111"}, {"header": "card=4111"}])
def test_what_is_hidden_can_not_be_found_out_by_a_search(query: dict[str, str]) -> None:
    assert not WaitingSearch.read(query).fitting(Redaction(["card"]))(message())
    assert WaitingSearch.read({"text": "zoë", "header": "tenant=acme"}).fitting(Redaction(["card"]))(message())


def test_messages_that_have_waited_long_enough_fit() -> None:
    sent_ms = int((time.time() - 61) * 1000)

    assert WaitingSearch.read({"minutes": "1"}).fitting(Redaction())(message(sent_ms=sent_ms))


@pytest.mark.parametrize(
    ("query", "offsets"),
    [
        ({}, [0, 1, 2]),
        ({"order": "desc"}, [2, 1, 0]),
        ({"sort": "bytes"}, [2, 0, 1]),
        ({"sort": "bytes", "order": "desc"}, [0, 1, 2]),
        ({"sort": "nonsense"}, [0, 1, 2]),
    ],
)
def test_messages_are_sorted_and_those_that_have_waited_longest_come_first_among_equals(
    query: dict[str, str], offsets: list[int]
) -> None:
    messages = [message(0, b"xx", 1), message(1, b"xx", 2), message(2, None, 3)]

    assert [peeked.row.offset for peeked in sorted(messages, key=WaitingSearch.read(query).order())] == offsets


def test_an_address_has_what_is_not_the_default() -> None:
    search = WaitingSearch.read({"text": " a&b ", "order": "desc", "attempts": "", "limit": "7"})

    assert search.query(sort="bytes") == {"text": "a&b", "order": "desc", "sort": "bytes"}
    assert (search.filters, WaitingSearch().filters) == (True, False)
    with pytest.raises(ConfigError, match="attempts=x"):
        WaitingSearch.read({"attempts": "x"})
