"""Ordering by key: settings that it excludes, keys, and the partition of a key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from marq.settings.combinations import check_combinations
from marq.settings.definitions import Definitions
from marq.settings.ordering_keys import check_ordering_key, line_of, partition_of
from marq.settings.queue import queue_settings
from marq.wire.errors import ConfigError


def test_a_queue_is_unordered_and_continues_after_a_dead_letter_unless_it_is_set_otherwise() -> None:
    default, ordered = queue_settings(), queue_settings({"ordering": "key", "on_dead_letter": "block"})

    assert (default.ordering, default.on_dead_letter, default.ordered) == ("none", "continue", False)
    assert (ordered.ordering, ordered.on_dead_letter, ordered.ordered) == ("key", "block", True)


@pytest.mark.parametrize(
    ("document", "defaults", "said"),
    [
        (
            {"on_dead_letter": "block"},
            {},
            'on_dead_letter = "block" .marq.toml. has no effect without ordering = "key"',
        ),
        (
            {"ordering": "key", "delivery": "at-most-once"},
            {},
            'delivery = "at-most-once" .marq.toml. cannot be combined with ordering = "key"',
        ),
        (
            {"ordering": "key"},
            {"delay": 1.5},
            r"delay = 1.5 \(\[defaults\] of marq.toml\) cannot be combined with ordering",
        ),
        (
            {"ordering": "key", "on_dead_letter": "block", "dead_letter": False},
            {},
            'dead_letter = false .marq.toml. cannot be combined with on_dead_letter = "block"',
        ),
    ],
)
def test_settings_that_ordering_excludes_are_refused_by_writers_and_read(
    document: Mapping[str, Any], defaults: Mapping[str, Any], said: str
) -> None:
    definitions = Definitions()
    definitions.fold(b"defaults", defaults)
    definitions.fold(b"file:orders", document)

    with pytest.raises(ConfigError, match=f"^queue 'orders': {said}"):
        check_combinations(definitions)


def test_dead_letters_of_an_ordered_queue_may_be_dropped_and_the_next_message_continues() -> None:
    definitions = Definitions()
    definitions.fold(b"file:orders", {"ordering": "key", "dead_letter": False, "partitions": 2})

    check_combinations(definitions)


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("", "the key is empty"),
        (b"", "the key is empty"),
        ("é" * 513, "the key has 1026 bytes, at most 1024 are allowed"),
        (b"x" * 1025, "the key has 1025 bytes, at most 1024 are allowed"),
        (7, "expected a key of type str or bytes, not int"),
        ("\ud800", "the key can't be encoded as UTF-8"),
    ],
)
def test_a_wrong_ordering_key_is_refused(key: object, said: str) -> None:
    with pytest.raises(ConfigError, match=f"ordering_key: {said}"):
        check_ordering_key(key)


def test_text_and_its_utf_8_are_the_same_key() -> None:
    assert check_ordering_key("é" * 512) == check_ordering_key("é".encode() * 512)


#: As in docs/protocol.md.
VECTORS = [
    (b"customer-42", 11_548_895_427_906_076_469, 15),
    (b"orders/7", 15_131_866_199_147_773_780, 12),
    ("Zürich".encode(), 4_778_715_432_666_969_653, 15),
    (b"\x00\xff", 498_630_079_751_789_029, 12),
]


@pytest.mark.parametrize(("key", "line", "partition"), VECTORS)
def test_a_key_has_a_line_and_a_partition(key: bytes, line: int, partition: int) -> None:
    assert line_of(key) == line
    assert partition_of(key, (10, 12, 15)) == partition
