from __future__ import annotations

from typing import Any

import pytest

from marq.client.send_options import check_headers, check_queues
from marq.producer.sending import Content, encode
from marq.wire.errors import ConfigError, MessageTooLarge
from marq.wire.names import HEADER_ROOM_BYTES

LIMIT = 10_000


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


class Broken:
    def __init__(self, outcome: object) -> None:
        self.outcome = outcome

    def encode(self, value: object) -> Any:
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome

    def decode(self, data: bytes) -> object:
        return data

    def __repr__(self) -> str:
        return "Broken"


@pytest.mark.parametrize(
    ("outcome", "kind", "expected"),
    [
        (TypeError("of no use"), TypeError, "queue 'q', item 3: Broken can't encode the value: of no use"),
        (ValueError("too odd"), ValueError, "queue 'q', item 3: Broken can't encode the value: too odd"),
        (KeyError("k"), ValueError, "queue 'q', item 3: Broken can't encode the value: 'k'"),
        ("text", TypeError, "queue 'q', item 3: Broken encoded to str, expected bytes"),
    ],
)
def test_what_can_not_be_encoded_is_named_with_queue_and_item(outcome, kind, expected) -> None:
    with pytest.raises(kind) as caught:
        encode(Broken(outcome), "q", object(), 3)

    assert str(caught.value) == expected


@pytest.mark.parametrize("error", [ConfigError("no schema"), ConnectionError("registry is away")])
def test_errors_of_a_codec_that_do_not_speak_of_the_value_stay_as_they_are(error) -> None:
    with pytest.raises(type(error)) as caught:
        encode(Broken(error), "q", object())

    assert caught.value is error


@pytest.mark.parametrize(
    ("queues", "expected"),
    [
        ([], "is empty"),
        (["a", "b", "a"], "queue 'a' appears twice"),
        (["a", ""], "must not be empty"),
        (["a", 5], "is text"),
        ({"a", "b"}, "a list of names"),
        (b"ab", "a list of names"),
        (None, "a list of names"),
        (iter(["a"]), "a list of names"),
    ],
)
def test_a_list_of_queues_names_each_once(queues, expected) -> None:
    with pytest.raises(ConfigError, match=expected):
        check_queues(queues)


def test_queues_keep_their_order() -> None:
    assert check_queues(("b", "a")) == ["b", "a"]


def test_headers_are_a_dict_or_pairs() -> None:
    assert check_headers({"a": b"1", "b": None}) == [("a", b"1"), ("b", None)]
    assert check_headers([("a", b"1"), ("a", b"2")]) == [("a", b"1"), ("a", b"2")]


def test_text_in_headers_becomes_utf_8() -> None:
    assert check_headers({"a": "Zoë", "b": "", "c": b"\xff"}) == [("a", b"Zo\xc3\xab"), ("b", b""), ("c", b"\xff")]


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({"marq-id": b"x"}, "are reserved"),
        ({5: b"x"}, "expected a name of type str"),
        ({"a": 7}, "header 'a': expected a value of type str, bytes or None, not int"),
        ({"a": "\ud800"}, "header 'a': the value can't be encoded as UTF-8"),
        (["ab"], "expected a dict, or pairs"),
        ({"é" * 32_768: b""}, "header 'é+'…: the name has 65536 bytes, at most 65535 are allowed"),
        ({"\ud800": b"x"}, "the name can't be encoded as UTF-8"),
        ([("a", b"")] * 65_501, "the message has 65501 headers, at most 65500 are allowed"),
    ],
)
def test_other_headers_are_refused(headers, expected) -> None:
    with pytest.raises(ConfigError, match=expected):
        check_headers(headers)
