"""Sums that clients compare, the selection of attributes, and their form as headers."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marq.client.send_options import check_headers
from marq_worker.sqs.attributes import MAX_MESSAGE_BYTES
from marq_worker.sqs.limits import check_message
from marq_worker.sqs.message_attributes import (
    TYPES_HEADER,
    AttributeNames,
    from_headers,
    md5_of_attributes,
    md5_of_body,
    to_headers,
)


def string(value: str, label: str = "String") -> dict[str, Any]:
    return {"DataType": label, "StringValue": value}


def binary(value: bytes, label: str = "Binary") -> dict[str, Any]:
    return {"DataType": label, "BinaryValue": value}


NAME_PARTS = st.text(st.sampled_from("abzAZ09_-"), min_size=1, max_size=5)
NAMES = st.lists(NAME_PARTS, min_size=1, max_size=3).map(".".join) | st.sampled_from(
    ["marq-id", "marq-", "sqs-types", "sqs-attribute-a", "sqs-", "Marq-x", "a" * 256]
)
NAMES = NAMES.filter(lambda name: not name.lower().startswith(("aws.", "amazon.")))
TEXT = st.text(st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="\ufffe\uffff"), min_size=1)
LABELS = st.sampled_from(["", ".x", ".int", ".a.b", ".ü"])
ATTRIBUTES = st.dictionaries(
    NAMES,
    st.builds(lambda value, label: string(value, f"String{label}"), TEXT, LABELS)
    | st.builds(lambda value, label: string(str(value), f"Number{label}"), st.integers(-(10**30), 10**30), LABELS)
    | st.builds(lambda value, label: binary(value, f"Binary{label}"), st.binary(min_size=1), LABELS),
    max_size=10,
)

# --- sums -------------------------------------------------------------------------------------------------------------


def test_the_sum_of_a_body_is_that_of_its_utf_8() -> None:
    # The example of SendMessage in SQS's API reference.
    assert md5_of_body("This is a test message") == "fafb00f5732ab283681e124bf8747ed1"
    assert md5_of_body("ü") == hashlib.md5(b"\xc3\xbc").hexdigest()


def test_the_sum_of_one_attribute_is_that_of_another_implementation() -> None:
    # From an answer of ElasticMQ: softwaremill/elasticmq, issue 97.
    assert md5_of_attributes({"version": string("1")}) == "75cba0c5eb8ce78d6a41a35f99bfd7a8"


def test_the_sum_covers_names_full_types_and_values_with_their_lengths_in_order_of_names() -> None:
    attributes = {
        "n": string("-1.5", "Number.float"),
        "ä": string("ü"),
        "b": binary(b"\x00\xff", "Binary.png"),
    }

    assert md5_of_attributes(attributes) == hashlib.md5(
        b"\x00\x00\x00\x01b\x00\x00\x00\x0aBinary.png\x02\x00\x00\x00\x02\x00\xff"
        b"\x00\x00\x00\x01n\x00\x00\x00\x0cNumber.float\x01\x00\x00\x00\x04-1.5"
        b"\x00\x00\x00\x02\xc3\xa4\x00\x00\x00\x06String\x01\x00\x00\x00\x02\xc3\xbc"
    ).hexdigest()  # fmt: skip


def test_without_attributes_there_is_no_sum() -> None:
    assert md5_of_attributes({}) is None


@given(ATTRIBUTES.filter(bool), st.randoms())
def test_the_order_of_attributes_does_not_change_the_sum(attributes: dict[str, dict[str, Any]], random: Any) -> None:
    names = list(attributes)
    random.shuffle(names)

    assert md5_of_attributes({name: attributes[name] for name in names}) == md5_of_attributes(attributes)


# --- selection --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ([], set()),
        (["All"], {"bar", "bar.a", "barn", "foo"}),
        (["ALL"], {"bar", "bar.a", "barn", "foo"}),
        ([".*"], {"bar", "bar.a", "barn", "foo"}),
        (["*"], {"bar", "bar.a", "barn", "foo"}),
        (["none", "all"], {"bar", "bar.a", "barn", "foo"}),
        (["foo", "none"], {"foo"}),
        (["FOO"], set()),
        (["bar"], {"bar"}),
        (["bar.*"], {"bar", "bar.a", "barn"}),
        (["bar.a.*", "foo"], {"bar.a", "foo"}),
        (["b*"], set()),
    ],
)
def test_a_receiver_gets_the_attributes_that_it_asks_for(names: list[str], expected: set[str]) -> None:
    attributes = {name: string(name) for name in ("bar", "bar.a", "barn", "foo")}

    assert AttributeNames(names).selected(attributes) == {name: string(name) for name in attributes if name in expected}


# --- headers ----------------------------------------------------------------------------------------------------------


def test_strings_are_headers_of_the_same_name_without_any_other() -> None:
    assert to_headers({"trace": string("grüße"), "a.b": string("1")}) == [("trace", "grüße".encode()), ("a.b", b"1")]


def test_other_types_are_in_one_header() -> None:
    headers = dict(to_headers({"s": string("x"), "n": string("1", "Number.int"), "b": binary(b"\xff")}))

    assert headers == {"s": b"x", "n": b"1", "b": b"\xff", TYPES_HEADER: b'{"b":"Binary","n":"Number.int"}'}


@pytest.mark.parametrize("name", ["marq-id", "sqs-types", "sqs-attribute-x"])
def test_names_of_marqs_and_the_endpoints_own_headers_are_stored_under_another(name: str) -> None:
    assert to_headers({name: string("x")}) == [(f"sqs-attribute-{name}", b"x")]


@given(ATTRIBUTES)
def test_attributes_come_back_as_they_were_sent(attributes: dict[str, dict[str, Any]]) -> None:
    headers = to_headers(attributes)

    assert check_headers(headers) == headers, "Marq accepts them"
    assert len(dict(headers)) == len(headers)
    assert from_headers(dict(headers)) == attributes


@pytest.mark.parametrize(
    ("value", "attribute"),
    [
        (b"text", string("text")),
        ("grüße\n".encode(), string("grüße\n")),
        (b"17", string("17")),
        (b"\xff\xfe", binary(b"\xff\xfe")),
        (b"bell \x07", binary(b"bell \x07")),
        ("\ufffe".encode(), binary("\ufffe".encode())),
    ],
)
def test_a_header_of_another_sender_is_a_string_if_it_is_sqs_text_and_else_binary(
    value: bytes, attribute: dict[str, Any]
) -> None:
    assert from_headers({"name": value}) == {"name": attribute}


@pytest.mark.parametrize(
    "name", ["", "a b", "ü", ".a", "a.", "a..b", "AWS.x", "amazon.x", "a" * 257, "marq-id", "sqs-other", "sqs-types"]
)
def test_a_header_that_no_attribute_can_have_is_left_out(name: str) -> None:
    assert from_headers({name: b"x", "kept": b"y"}) == {"kept": string("y")}


def test_a_header_without_a_value_is_left_out() -> None:
    assert from_headers({"null": None, "empty": b"", "kept": b"y"}) == {"kept": string("y")}


def test_more_than_ten_headers_are_all_returned() -> None:
    assert set(from_headers({f"h{number}": b"x" for number in range(25)})) == {f"h{number}" for number in range(25)}


@pytest.mark.parametrize(
    "types",
    [
        b"",
        b"{",
        b"[]",
        b"[" * 100_000,
        b"\xff",
        b'{"name": 1}',
        b'{"name": "Text"}',
        b'{"name": "Number"}',
        b'{"name": "String."}',
    ],
)
def test_a_list_of_types_that_does_not_fit_counts_as_absent(types: bytes) -> None:
    assert from_headers({"name": b"not a number", TYPES_HEADER: types}) == {"name": string("not a number")}


@given(
    st.dictionaries(NAMES | st.text(), st.none() | st.binary() | TEXT.map(str.encode), max_size=10),
    st.binary() | st.dictionaries(NAMES, st.text() | st.integers()).map(lambda types: json.dumps(types).encode()),
)
def test_whatever_the_headers_are_the_attributes_could_have_been_sent(
    headers: dict[str, bytes | None], types: bytes
) -> None:
    attributes = from_headers({**headers, TYPES_HEADER: types})

    message = {"MessageBody": "x", "MessageAttributes": attributes}
    check_message(message, "http://h/0/orders", MAX_MESSAGE_BYTES)
    assert len(attributes) <= len(headers)


@pytest.mark.parametrize("text", ["1" * 1_000_000 + "x", "1" * 1_000_000 + ".x", "." + "1" * 1_000_000 + "ex"])
def test_a_long_text_that_is_no_number_is_soon_refused(text: str) -> None:
    """A pattern that can match in several ways would take hours."""
    headers = {"n": text.encode(), TYPES_HEADER: b'{"n": "Number"}'}

    assert from_headers(headers) == {"n": string(text)}
