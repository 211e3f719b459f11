"""What a document that defines a queue may say."""

from __future__ import annotations

import pytest

from marq.settings.backoff import Backoff
from marq.settings.queue import (
    CHECKS,
    UNLIMITED_ATTEMPTS,
    Breaker,
    QueueSettings,
    check_defaults,
    check_document,
    queue_settings,
    settings_document,
)
from marq.wire.errors import ConfigError


def test_a_queue_without_documents_has_our_defaults() -> None:
    assert queue_settings() == QueueSettings(30_000, 5, Backoff(1_000, 2.0, 600_000, True), True, None, None, None, 64)


def test_all_that_a_document_says_counts_in_the_units_of_the_core() -> None:
    document = check_document(
        {
            "lease": 0.5,
            "max_attempts": 2,
            "backoff": {"base": 0.25, "factor": 3, "max": 10, "jitter": False},
            "dead_letter": False,
            "group": "background",
            "topic": "orders",
            "handler": "shop.orders:handle",
            "concurrency": 7,
        },
        "here",
    )

    assert queue_settings(document) == QueueSettings(
        500, 2, Backoff(250, 3, 10_000, False), False, "background", "orders", "shop.orders:handle", 7
    )


def test_of_each_key_the_last_document_counts_and_backoff_is_replaced_as_a_whole() -> None:
    settings = queue_settings(
        {"lease": 10, "backoff": {"base": 5, "jitter": False}}, {"lease": 20}, {"backoff": {"base": 6}}
    )

    assert settings == QueueSettings(lease_ms=20_000, backoff=Backoff(base_ms=6_000))


def test_settings_can_be_said_as_a_document_again() -> None:
    said = {
        "lease": 0.5,
        "max_lease": 0.75,
        "max_attempts": 2,
        "backoff": {"base": 1, "factor": 3, "max": 10.25, "jitter": False},
        "dead_letter": False,
        "group": "background",
        "topic": "orders",
        "handler": "shop.orders:handle",
        "concurrency": 7,
        "delay": 1.5,
        "delivery": "at-most-once",
        "transactional": True,
        "errors": {"ValueError": "reject", "shop.Busy": {"delays": [1, 2.5], "jitter": True}},
        "breaker": {"failure_rate": 0.25, "window": 8, "reset_timeout": 1.5},
        "partitions": 2,
        "paused": True,
        "ordering": "key",
        "on_dead_letter": "block",
        "start": "latest",
        "deduplication_window": 3600,
        "shutdown_timeout": 7.5,
        "tracebacks": False,
        "key": "header:tenant",
        "limits": {"concurrency": 50, "rate": "200/s", "per_key": {"concurrency": 2, "rate": "10/min"}},
        "fair": True,
        "priority": 9,
        "expires_after": 90.5,
        "expired": "dead-letter",
    }

    assert settings_document(queue_settings(check_document(said, "here"))) == said
    assert settings_document(QueueSettings()).keys() == CHECKS.keys()


def test_attempts_without_a_limit_are_said_in_a_word() -> None:
    settings = queue_settings(check_document({"max_attempts": "unlimited"}, "here"))

    assert settings.max_attempts == UNLIMITED_ATTEMPTS
    assert settings_document(settings)["max_attempts"] == "unlimited"


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ([1, 0.5], Backoff(jitter=False, delays_ms=(1_000, 500))),
        ({"delays": [1], "jitter": True}, Backoff(jitter=True, delays_ms=(1_000,))),
        ({"delays": [1]}, Backoff(jitter=False, delays_ms=(1_000,))),
    ],
)
def test_a_backoff_may_be_a_list_of_delays_which_are_kept_to_unless_jitter_is_asked_for(
    said: object, expected: Backoff
) -> None:
    assert queue_settings(check_document({"backoff": said}, "here")).backoff == expected


def test_errors_have_a_backoff_of_their_own_or_none() -> None:
    said = {"ValueError": "reject", "shop.orders.Busy": [1, 5], "KeyError": False, "OSError": {"base": 2}}

    settings = queue_settings(check_document({"errors": said}, "here"))

    assert settings.errors == {
        "ValueError": None,
        "shop.orders.Busy": Backoff(jitter=False, delays_ms=(1_000, 5_000)),
        "KeyError": None,
        "OSError": Backoff(base_ms=2_000),
    }


@pytest.mark.parametrize(
    ("said", "expected"),
    [(False, None), ({}, Breaker()), ({"failure_rate": 1, "reset_timeout": 2}, Breaker(1, 20, 2_000))],
)
def test_a_queue_has_a_breaker_if_it_says_so(said: object, expected: Breaker | None) -> None:
    assert queue_settings(check_document({"breaker": said}, "here")).breaker == expected
    assert queue_settings().breaker is None


def test_a_lease_is_renewed_for_an_hour_or_as_long_as_it_is() -> None:
    assert queue_settings().max_lease_ms == queue_settings({"lease": 3_599}).max_lease_ms == 3_600_000
    assert queue_settings({"lease": 7_200}).max_lease_ms == 7_200_000
    assert queue_settings({"max_lease": 14_400}, {"lease": 60}).max_lease_ms == 14_400_000


def test_a_pause_may_have_an_end() -> None:
    settings = queue_settings({"paused": True}, check_document({"paused": "2026-11-23T15:05:00+01:00"}, "here"))

    assert (settings.paused, settings.paused_until_ms) == (True, 1_795_442_700_000)
    assert settings_document(settings)["paused"] == "2026-11-23T14:05:00Z"
    assert not queue_settings({"paused": "2026-11-23T14:05:00Z"}, {"paused": False}).paused


def test_a_queue_is_transactional_if_it_says_so_or_delivers_at_most_once() -> None:
    assert not queue_settings().transactional
    assert queue_settings(check_document({"transactional": True}, "here")).transactional
    assert not queue_settings({"transactional": True}, {"transactional": False}).transactional
    assert queue_settings({"transactional": False}, {"delivery": "at-most-once"}).transactional


def test_a_lease_is_never_0_ms() -> None:
    assert queue_settings({"lease": 0.0001}).lease_ms == 1


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ({"lese": 3}, r"^here: lese: unknown key; did you mean 'lease'\?$"),
        ({"max_retries": 3}, r"^here: max_retries: unknown key; did you mean 'max_attempts'\?$"),
        ({"visibility_timeout": 3}, r"^here: visibility_timeout: unknown key; did you mean 'lease'\?$"),
        ({"expires_in": 3}, r"^here: expires_in: unknown key; did you mean 'expires_after'\?$"),
        ({"ttl": 3}, r"^here: ttl: unknown key; did you mean 'expires_after'\?$"),
        ({"limits.concurrency": 3}, r"^here: .*unknown key; write limits = \{ concurrency = … \}, which replaces"),
        ({"x": 3}, r"^here: x: unknown key; expected one of lease, max_lease, max_attempts, backoff, dead_letter, "),
        ({"lease": "3"}, r"^here: lease: expected a number of seconds above 0, to 4294967, not '3'$"),
        ({"lease": 0}, r"lease: .* above 0"),
        ({"lease": 4_294_968}, r"lease: .* to 4294967"),
        ({"lease": True}, r"lease: "),
        ({"lease": float("nan")}, r"lease: .*not nan"),
        ({"lease": float("inf")}, r"lease: .*not inf"),
        ({"max_attempts": 0}, r"max_attempts: expected a whole number from 1 to 1000000, or \"unlimited\", not 0$"),
        ({"max_attempts": True}, r"max_attempts: .*not True"),
        ({"max_attempts": 2.0}, r"max_attempts: .*whole number"),
        ({"max_attempts": "for ever"}, r"max_attempts: .*not 'for ever'"),
        ({"max_attempts": None}, r"max_attempts: .*not None"),
        ({"backoff": 3}, r"^here: backoff: expected a table like .* or a list of seconds like \[1, 5, 60\], not 3$"),
        ({"backoff": {"base": -1}}, r"^here: backoff.base: expected a number of seconds from 0 to 31536000, not -1$"),
        ({"backoff": {"factor": 0.5}}, r"backoff.factor: expected a number from 1 to 1000, not 0.5"),
        (
            {"backoff": {"least": 1}},
            r"^here: backoff.least: unknown key; expected one of base, factor, max, jitter, delays$",
        ),
        ({"backoff": []}, r"^here: backoff: expected a list of 1 to 100 numbers of seconds, not \[\]$"),
        ({"backoff": [1, -1]}, r"^here: backoff\[1\]: expected a number of seconds from 0 to 31536000, not -1$"),
        ({"backoff": {"delays": 3}}, r"^here: backoff.delays: expected a list"),
        ({"backoff": {"delays": [1], "base": 1}}, r"^here: backoff: delays and base: use either a list"),
        ({"errors": ["ValueError"]}, r"^here: errors: expected a table of at most 100 names of exceptions"),
        ({"errors": {"ValueErr": "reject"}}, r"^here: errors: ValueErr is not a built-in exception"),
        ({"errors": {"print": "reject"}}, r"^here: errors: print is not a built-in exception"),
        ({"errors": {"SystemExit": "reject"}}, r"^here: errors: SystemExit is not a built-in exception"),
        ({"errors": {"a b": "reject"}}, r"^here: errors: expected the name of an exception, like ValueError or "),
        ({"errors": {"ValueError": "drop"}}, r'^here: errors.ValueError: expected a backoff, or "reject", not .drop'),
        ({"errors": {"ValueError": True}}, r"^here: errors.ValueError: expected a backoff"),
        ({"errors": {"a.B": {"base": -1}}}, r"^here: errors.a.B.base: expected a number"),
        ({"breaker": True}, r"^here: breaker: expected false or a table like .*not True$"),
        ({"breaker": {"failure_rate": 0}}, r"^here: breaker.failure_rate: expected a number above 0, to 1, not 0$"),
        ({"breaker": {"window": 0}}, r"^here: breaker.window: expected a whole number from 1 to 10000, not 0$"),
        ({"breaker": {"reset_timeout": 0}}, r"^here: breaker.reset_timeout: expected a number of seconds above 0"),
        (
            {"breaker": {"limit": 1}},
            r"^here: breaker.limit: unknown key; expected one of failure_rate, window, reset_timeout$",
        ),
        ({"paused": 1}, r"^here: paused: expected true, false, or a time with a time zone, .*not 1$"),
        ({"paused": "2026-11-23T14:05:00"}, r"^here: paused: expected true, false, or a time with a time zone"),
        ({"paused": "9999-12-31T23:59:59-05:00"}, r"^here: paused: expected true, false, or a time with a time zone"),
        ({"paused": "10m"}, r"^here: paused: expected true, false, or a time with a time zone, .*not '10m'$"),
        ({"dead_letter": 1}, r"dead_letter: expected true or false, not 1"),
        ({"transactional": "yes"}, r"transactional: expected true or false, not 'yes'"),
        ({"group": ""}, r"^here: group: a group's name must not be empty"),
        ({"group": "a\nb"}, r"group: .*unprintable characters"),
        ({"topic": "a b"}, r"topic: expected the name of a topic, .*not 'a b'"),
        ({"topic": ".."}, r"topic: .*does not allow"),
        ({"handler": "no_function"}, r"handler: expected 'module:function', not 'no_function'"),
        ({"handler": "a:b\n"}, r"handler: "),
        ({"concurrency": 10_001}, r"concurrency: expected a whole number from 1 to 10000"),
        *[
            ({"expires_after": value}, r"^here: expires_after: expected a number of seconds above 0")
            for value in (0, -1, "1h", True, None, float("nan"), 10**9)
        ],
        ({"expired": "x"}, r"^here: expired: expected 'drop' or 'dead-letter', not 'x'"),
        *[
            ({"partitions": value}, r'^here: partitions: expected a number of partitions from 1 to 10000, or "all"')
            for value in (0, -1, 1.5, True, "some", 10_001, None)
        ],
        ({"ordering": "all"}, r"^here: ordering: expected 'none' or 'key', not 'all'"),
        ({"ordering": True}, r"^here: ordering: expected 'none' or 'key', not True"),
        ({"on_dead_letter": "stop"}, r"^here: on_dead_letter: expected 'continue' or 'block', not 'stop'"),
        ([], r"^here: expected a table of settings, not \[\]$"),
        ({3: 4}, r"^here: 3: unknown key"),
    ],
)
def test_a_mistake_is_named_with_its_place_and_key(document: object, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_document(document, "here")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("group", "a"),
        ("topic", "a"),
        ("handler", "a:b"),
        ("partitions", 2),
        ("ordering", "key"),
        ("on_dead_letter", "block"),
    ],
)
def test_what_belongs_to_one_queue_can_be_no_default(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"^\[defaults\] can't name '{key}'; give each queue its own$"):
        check_defaults({"lease": 3, key: value}, "[defaults]")
