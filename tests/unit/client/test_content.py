from __future__ import annotations

import pytest

from marq.content import Content, check_headers
from marq.core.errors import ConfigError, MessageTooLarge
from marq.core.names import HEADER_ROOM_BYTES

LIMIT = 10_000


@pytest.mark.parametrize("value", ["text", 5, None, {"a": 1}, bytearray(b"x")])
def test_a_value_that_is_not_bytes_shows_how_to_make_them(value) -> None:
    with pytest.raises(TypeError, match=r"json.dumps\(value\).encode\(\)"):
        Content(LIMIT).check("q", b"q", value, [])


def test_the_largest_message_leaves_room_for_the_headers_of_redelivery() -> None:
    content, largest = Content(LIMIT), LIMIT - HEADER_ROOM_BYTES - 1

    content.check("q", b"q", b"x" * largest, [])
    with pytest.raises(MessageTooLarge, match=f"has {largest + 2} bytes .* at most {largest + 1} are allowed"):
        content.check("q", b"q", b"x" * (largest + 1), [])


def test_headers_count_for_the_size() -> None:
    with pytest.raises(MessageTooLarge):
        Content(LIMIT).check("q", b"q", b"", [("h", b"x" * LIMIT)])


def test_among_many_the_item_is_named() -> None:
    content = Content(LIMIT)

    with pytest.raises(MessageTooLarge, match="item 1"):
        content.check_many("q", b"q", [b"", b"x" * LIMIT, b""], [])
    with pytest.raises(TypeError, match="item 2"):
        content.check_many("q", b"q", [b"", b"", "x"], [])
    content.check_many("q", b"q", [], [])


def test_headers_are_a_dict_or_pairs() -> None:
    assert check_headers({"a": b"1", "b": None}) == [("a", b"1"), ("b", None)]
    assert check_headers([("a", b"1"), ("a", b"2")]) == [("a", b"1"), ("a", b"2")]


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({"marq-id": b"x"}, "marq's own"),
        ({5: b"x"}, "expected a name of type str"),
        ({"a": "x"}, "expected a value of type bytes"),
        (["ab"], "expected a dict, or pairs"),
    ],
)
def test_other_headers_are_refused(headers, expected) -> None:
    with pytest.raises(ConfigError, match=expected):
        check_headers(headers)
